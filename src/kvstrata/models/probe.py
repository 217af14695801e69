"""Which kinds of layer a model has, what they cost, and whether it can run a batch over parts: found by trying.

mlx-lm's models differ in what they do with a cache: some compute on the arrays that they fetch (MLA), some take only
whole-number offsets. Two short sequences, alone and together, show which path gives the same logits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvstrata.errors import ModelError
from kvstrata.layers.attention import install
from kvstrata.layers.batch import BatchCache
from kvstrata.layers.kinds import LayerSpec, Layout, arrays_in, measure, read_kinds
from kvstrata.layers.mixed import MixedPass, can_mix
from kvstrata.layers.sequence import SequenceCache
from kvstrata.models.experts import mend_products
from kvstrata.models.heads import trim_rows

log = logging.getLogger(__name__)

# Different lengths, so that a path which ignores offsets by row is found out.
_PROMPTS = ((1, 2, 3, 4, 5), (6, 7, 8))
_NUM_STEPS = 2
_CAPACITY = 16


def probe(model: Any, max_kv_size: int | None = None) -> Layout:
    install()
    mend_products()
    trim_rows(model)
    alone = Layout(read_kinds(model, max_kv_size), path="rows", reason="the model brings a cache of its own kind")
    try:
        expected, caches = _run_alone(model, alone)
    except ModelError as error:
        if max_kv_size is not None:
            raise
        # Some models reach into mlx-lm's caches. They get those, and nothing of them can be shared.
        reason = f"the model reaches into mlx-lm's own caches: {error.__cause__}"[:200]
        alone = Layout((LayerSpec("foreign"),) * len(alone.layers), path="rows", reason=reason)
        expected, caches = _run_alone(model, alone)
    alone = dataclasses.replace(alone, layers=measure(alone.layers, caches[0].layers, len(_PROMPTS[0])))
    if any(layer.kind == "foreign" for layer in alone.layers):
        return alone
    together = dataclasses.replace(alone, path="parts", reason="same logits in a batch as alone")
    try:
        reached = _run_together(model, together)
    except Exception as error:  # noqa: BLE001
        # Whatever a model does with objects that it does not expect.
        return dataclasses.replace(alone, reason=f"not over parts: {type(error).__name__}: {error}"[:200])
    distance = _distance(expected, reached)
    if distance > _tolerance(expected, _dtype_of(model)):
        return dataclasses.replace(alone, reason=f"over parts the logits differ by {distance:.2g}")
    return dataclasses.replace(together, mixes=_mixes(model, together, expected))


def _mixes(model: Any, layout: Layout, expected: Sequence[mx.array]) -> bool:
    """Whether a chunk of one sequence beside a token of the other changes no logits of either."""
    if not can_mix(layout):
        return False
    try:
        reached = _run_mixed(model, layout)
    except Exception as error:  # noqa: BLE001
        # Whatever a model does with objects that it does not expect: prompts then get passes of their own.
        log.info("no mixed passes: %s: %s", type(error).__name__, error)
        return False
    return _distance(expected, reached) <= _tolerance(expected, _dtype_of(model))


def _run_alone(model: Any, layout: Layout) -> tuple[list[mx.array], list[SequenceCache]]:
    caches = [SequenceCache(layout, model, _CAPACITY) for _ in _PROMPTS]
    logits = []
    try:
        for prompt, cache in zip(_PROMPTS, caches, strict=True):
            outputs = [_pass(model, cache, tokens) for tokens in _passes(prompt)]
            logits.append(outputs[-1][0, -1].astype(mx.float32))
        mx.eval(logits, [cache.arrays() for cache in caches])
    except Exception as error:
        raise ModelError(f"The model loads but cannot run: {type(error).__name__}: {error}") from error
    return logits, caches


def _run_together(model: Any, layout: Layout) -> list[mx.array]:
    caches = [SequenceCache(layout, model, _CAPACITY) for _ in _PROMPTS]
    for prompt, cache in zip(_PROMPTS, caches, strict=True):
        _pass(model, cache, _passes(prompt)[0])
    batch = BatchCache(caches)
    out = mx.zeros(())
    for i in range(1, 1 + _NUM_STEPS):
        tokens = mx.array([_passes(prompt)[i] for prompt in _PROMPTS])
        out = model(tokens, cache=batch.begin_step())
        batch.end_step()
    mx.eval(out)
    return [out[row, -1].astype(mx.float32) for row in range(len(_PROMPTS))]


def _run_mixed(model: Any, layout: Layout) -> list[mx.array]:
    """The first prompt but for its last token comes in two chunks, beside two steps of the other sequence."""
    chunked, decoded = (SequenceCache(layout, model, _CAPACITY) for _ in _PROMPTS)
    begun, *steps = _passes(_PROMPTS[1])
    _pass(model, decoded, begun)
    *prompt, last = _PROMPTS[0]
    out = mx.zeros(())
    for chunk, step in zip((prompt[:1], prompt[1:]), steps, strict=True):
        mixed = MixedPass(chunked, len(chunk), BatchCache([decoded]))
        out = model(mx.array([*chunk, *step])[:, None], cache=mixed.begin())
        mixed.end()
        mx.eval(out, chunked.arrays())
    return [logits[-1, -1].astype(mx.float32) for logits in (_pass(model, chunked, [last]), out)]


def _pass(model: Any, cache: SequenceCache, tokens: Sequence[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=cache.caches())
    cache.end_pass(len(tokens))
    return logits


def _passes(prompt: Sequence[int]) -> list[list[int]]:
    """A prefill of all but the last tokens, then those one by one."""
    return [list(prompt[:-_NUM_STEPS]), *([token] for token in prompt[-_NUM_STEPS:])]


def _distance(a: Sequence[mx.array], b: Sequence[mx.array]) -> float:
    return max(_number(mx.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def _tolerance(logits: Sequence[mx.array], dtype: mx.Dtype) -> float:
    """A share of the logits' spread that rounding stays below and a wrong path does not.

    Wide for 16-bit kernels, and for GPUs, which round float32 products.
    """
    exact = dtype == mx.float32 and mx.default_device() == mx.cpu
    return (1e-3 if exact else 0.1) * _number(mx.concatenate(list(logits)).std())


def _dtype_of(model: Any) -> mx.Dtype:
    return next(array.dtype for array in arrays_in(model.parameters()) if mx.issubdtype(array.dtype, mx.floating))


def _number(scalar: mx.array) -> float:
    value = scalar.item()
    assert isinstance(value, float)
    return value
