"""Probe of a loaded model: its kinds of layer, their cost, and whether one pass can serve a batch.

mlx-lm's models differ in what they do with a cache: some compute on the arrays that they fetch (MLA), some take only
whole-number offsets. Two short sequences, alone and together, show which path gives the same logits. In 16 bits a
sequence alone gives other logits when its tokens come in other passes: that noise tells how near is the same.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvstrata.attention import gated_delta
from kvstrata.attention.cuda.step import UntraceableRead
from kvstrata.attention.dispatch import install
from kvstrata.errors import ModelError
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.decode_step import CompiledStep, can_compile
from kvstrata.kv.layout import LayerSpec, Layout, arrays_in, measure_layers, read_layer_specs
from kvstrata.kv.mixed_pass import MixedPass, can_mix
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.patches import mend_products, trim_rows
from kvstrata.models.rope_probe import with_rotations
from kvstrata.packed import operations
from kvstrata.packed.form import exact_activations

log = logging.getLogger(__name__)

Cut = Callable[[Sequence[int]], list[list[int]]]  # a prompt into passes

# Different lengths, so that a path which ignores offsets by row is found out.
_PROMPTS = ((1, 2, 3, 4, 5), (6, 7, 8))
_NUM_STEPS = 2
_CAPACITY = 16
# Of the logits' spread. A path that reads other tokens is off by about all of it.
_SAME = 1e-3
_SAME_ROUNDED = 0.05  # for 16-bit models, and for GPUs, which round float32 products
_NEVER_SAME = 0.5
# Of the noise that a sequence alone has.
_NOISE = 3.0


def probe(model: Any, max_kv_size: int | None = None) -> Layout:
    """Return the layout of a model, found by running it."""
    with exact_activations(model):
        return with_rotations(model, _probe(model, max_kv_size))


def _probe(model: Any, max_kv_size: int | None) -> Layout:
    install()
    gated_delta.install()
    operations.install()
    mend_products()
    trim_rows(model)
    alone = Layout(
        read_layer_specs(model, max_kv_size), batching="per_sequence", reason="the model brings a cache of its own kind"
    )
    try:
        expected, caches = _run_alone(model, alone)
    except ModelError as error:
        if max_kv_size is not None:
            raise
        # Some models reach into mlx-lm's caches. They get those, and nothing of them can be shared.
        reason = f"the model reaches into mlx-lm's own caches: {error.__cause__}"[:200]
        alone = Layout((LayerSpec("foreign"),) * len(alone.layers), batching="per_sequence", reason=reason)
        expected, caches = _run_alone(model, alone)
    alone = dataclasses.replace(alone, layers=measure_layers(alone.layers, caches[0].layers, len(_PROMPTS[0])))
    if any(layer.kind == "foreign" for layer in alone.layers):
        return alone
    together = dataclasses.replace(alone, batching="batched", reason="same logits in a batch as alone")
    try:
        reached = _run_together(model, together)
    except Exception as error:  # noqa: BLE001
        # Whatever a model does with objects that it does not expect.
        log.info("every sequence gets passes of its own: %s: %s", type(error).__name__, error)
        return dataclasses.replace(alone, reason=f"not over segments: {type(error).__name__}: {error}"[:200])
    bound = _Bound(model, alone, expected)
    if not bound.holds(reached):
        reason = f"over segments the logits differ by {bound.distance(reached):.2g} of their spread"
        log.warning("every sequence gets passes of its own, which is slower: %s", reason)
        return dataclasses.replace(alone, reason=reason)
    together = dataclasses.replace(together, compiles=_compiles(model, together, bound))
    return dataclasses.replace(together, mixes=_mixes(model, together, bound))


class _Bound:
    """Bound on the distance of logits from those of sequences alone."""

    def __init__(self, model: Any, layout: Layout, expected: Sequence[mx.array]) -> None:
        self._model = model
        self._layout = layout
        self._expected = expected
        self._spread = max(_number(mx.concatenate(list(expected)).std()), 1e-30)

    def distance(self, logits: Sequence[mx.array]) -> float:
        """Return the larger distance of the two sequences, as a share of the logits' spread."""
        pairs = zip(self._expected, logits, strict=True)
        return max(_number(mx.sqrt(mx.mean((x - y) ** 2))) for x, y in pairs) / self._spread

    def holds(self, logits: Sequence[mx.array]) -> bool:
        distance = self.distance(logits)
        return distance <= _SAME or distance <= self._allowed

    @functools.cached_property
    def _allowed(self) -> float:
        if _dtype_of(self._model) == mx.float32 and mx.default_device() == mx.cpu:
            return _SAME
        noise = max(self.distance(_run_alone(self._model, self._layout, cut)[0]) for cut in (_at_once, _one_by_one))
        return min(max(_SAME_ROUNDED, _NOISE * noise), _NEVER_SAME)


def _mixes(model: Any, layout: Layout, bound: _Bound) -> bool:
    """Whether chunks of two sequences in one pass, and one beside a token of the other, change no logits of either."""
    if not can_mix(layout):
        return False
    try:
        reached = _run_mixed(model, layout)
    except Exception as error:  # noqa: BLE001
        # Whatever a model does with objects that it does not expect: prompts then get passes of their own.
        log.info("no mixed passes: %s: %s", type(error).__name__, error)
        return False
    if not bound.holds(reached):
        log.warning("prompts get passes of their own: mixed ones differ by %.2g of the spread", bound.distance(reached))
        return False
    return True


def _compiles(model: Any, layout: Layout, bound: _Bound) -> bool:
    """Whether a compiled decode step changes no logits: of two, the second runs what the first has traced."""
    if not can_compile(layout):
        return False
    try:
        reached = _run_compiled(model, layout)
    except Exception as error:  # noqa: BLE001
        # Whatever a model does with objects that it does not expect: its steps then go layer by layer.
        log.info("decode steps are not compiled: %s: %s", type(error).__name__, error)
        return False
    if not bound.holds(reached):
        log.warning("decode steps are not compiled: they differ by %.2g of the spread", bound.distance(reached))
        return False
    return True


def _run_alone(model: Any, layout: Layout, cut: Cut | None = None) -> tuple[list[mx.array], list[SequenceCache]]:
    caches = [SequenceCache(layout, model, _CAPACITY) for _ in _PROMPTS]
    logits = []
    try:
        for prompt, cache in zip(_PROMPTS, caches, strict=True):
            outputs = [_pass(model, cache, tokens) for tokens in (cut or _passes)(prompt)]
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


def _run_compiled(model: Any, layout: Layout) -> list[mx.array]:
    """The first sequence as a batch of its own, the second beside it: MLX has other operations for one row."""
    step = CompiledStep(model)
    return [_steps_compiled(model, layout, step, _PROMPTS[:1])[0], _steps_compiled(model, layout, step, _PROMPTS)[1]]


def _steps_compiled(model: Any, layout: Layout, step: CompiledStep, prompts: Sequence[Sequence[int]]) -> list[mx.array]:
    caches = [SequenceCache(layout, model, _CAPACITY) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        _pass(model, cache, _passes(prompt)[0])
    batch, out = BatchCache(caches), None
    for i in range(1, 1 + _NUM_STEPS):
        out = step.run(mx.array([_passes(prompt)[i][0] for prompt in prompts]), batch)
    if out is None:
        raise UntraceableRead("its layers have no launch that can be prepared")
    mx.eval(out)
    return [row.astype(mx.float32) for row in out]


def _run_mixed(model: Any, layout: Layout) -> list[mx.array]:
    """The beginnings of both prompts in one pass. Then the rest of the first but for its last token in two chunks,
    beside two steps of the other sequence."""
    first, second = (SequenceCache(layout, model, _CAPACITY) for _ in _PROMPTS)
    begun, *steps = _passes(_PROMPTS[1])
    *prompt, last = _PROMPTS[0]
    together = MixedPass([(first, 1), (second, len(begun))], None)
    model(mx.array([prompt[0], *begun])[:, None], cache=together.begin())
    together.end()
    mx.eval(first.arrays(), second.arrays())
    out = mx.zeros(())
    for chunk, step in zip((prompt[1:2], prompt[2:]), steps, strict=True):
        mixed = MixedPass([(first, len(chunk))], BatchCache([second]), is_planned=layout.compiles)
        out = model(mx.array([*chunk, *step])[:, None], cache=mixed.begin())
        mixed.end()
        mx.eval(out, first.arrays())
    return [logits[-1, -1].astype(mx.float32) for logits in (_pass(model, first, [last]), out)]


def _pass(model: Any, cache: SequenceCache, tokens: Sequence[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=cache.caches())
    cache.end_pass(len(tokens))
    return logits


def _passes(prompt: Sequence[int]) -> list[list[int]]:
    """A prefill of all but the last tokens, then those one by one."""
    return [list(prompt[:-_NUM_STEPS]), *([token] for token in prompt[-_NUM_STEPS:])]


def _at_once(prompt: Sequence[int]) -> list[list[int]]:
    return [list(prompt)]


def _one_by_one(prompt: Sequence[int]) -> list[list[int]]:
    return [[token] for token in prompt]


def _dtype_of(model: Any) -> mx.Dtype:
    return next(array.dtype for array in arrays_in(model.parameters()) if mx.issubdtype(array.dtype, mx.floating))


def _number(scalar: mx.array) -> float:
    value = scalar.item()
    assert isinstance(value, float)
    return value
