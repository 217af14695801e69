"""Whether KV that another program computed is this model's, for just these tokens: some of it is computed again.

Three looks where every layer has full attention:
    the first layer, at every token     its K and V follow from the token and its position alone: no wrong id is missed
    all layers, at the first tokens     computed from nothing
    all layers, at the last tokens      computed on top of what came
Where layers cannot step back (windows, states) all tokens are computed, chunk by chunk, on top of what came before. In
a ring that keeps its first tokens (`--max-kv-size`) mlx-lm lets a long chunk see less than ours does: either is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvstrata.attention.parts import Parts, SealedPart
from kvstrata.codecs.affine import AffineCodec
from kvstrata.engine.runner import Runner
from kvstrata.errors import UnusableFile
from kvstrata.index.ids import TokenIds
from kvstrata.layers.kept import PromptCaches
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.layers.tail import FullLayer
from kvstrata.spans.marks import Mark, RecurrentState, needs_marks, take_mark
from kvstrata.spans.mlx_caches import adopt_mlx_lm
from kvstrata.spans.span import Span, SpanRange, prefix_of
from kvstrata.store.errands import Steps

FIRST_TOKENS, LAST_TOKENS = 32, 8
CHUNK_TOKENS = 64  # in one step
MLX_CHUNK_TOKENS = 2048
# How far K and V may be from ours, of what tells one token from another. What belongs to another token is at 1.4.
EXACT, HALF = 0.02, 0.15
BY_BITS = {8: 0.2, 6: 0.3, 5: 0.35, 4: 0.6, 3: 0.8, 2: 0.9}
# The first layer's follow from the token alone, so that nothing adds up.
FIRST_LAYER = {8: 0.1, 6: 0.2, 5: 0.25, 4: 0.35, 3: 0.4, 2: 0.45}
# Of all values together: tokens that hardly differ from each other must not look far apart.
SMALLEST_SHARE = 0.05


def checking(runner: Runner, ids: TokenIds, span: Span) -> Steps[None]:
    """Raises UnusableFile where `span` is not what this model computes for these tokens."""
    tokens: list[int] = ids.tolist()
    if needs_marks(runner.layout):
        try:
            yield from _check_all(runner, tokens, span)
        except UnusableFile:
            if not _keeps_first(runner.layout):
                raise
            yield from _check_as_mlx_lm(runner, tokens, span)
        return
    yield from _check_first_layer(runner, tokens, span)
    first = min(FIRST_TOKENS, len(tokens))
    yield from _check_run(runner, tokens, span, 0, first)
    start = max(first, len(tokens) - LAST_TOKENS)
    if start < len(tokens):
        yield from _check_run(runner, tokens, span, start, len(tokens))


class _Seen(Exception):
    """Raised and caught here: the first layer's K and V are known, and nothing else is needed."""


class _Tap(KVCache):
    """Stands for the first layer's cache at a position, and ends the pass when it has K and V."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.offset = position
        self.seen: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self.seen = keys, values
        raise _Seen


def _check_first_layer(runner: Runner, tokens: Sequence[int], span: Span) -> Steps[None]:
    for last in range(CHUNK_TOKENS, len(tokens) + CHUNK_TOKENS, CHUNK_TOKENS):
        end = min(last, len(tokens))
        # A few tokens alone tell little of how far apart tokens are.
        start = max(0, end - CHUNK_TOKENS)
        tap = _Tap(start)
        caches = runner.new_cache(1).caches()
        with contextlib.suppress(_Seen):
            runner.model(mx.array([tokens[start:end]]), cache=PromptCaches([tap, *caches[1:]]))
        assert tap.seen is not None
        _compare(span, 0, start, tap.seen, is_first=True)
        yield


def _check_run(runner: Runner, tokens: Sequence[int], span: Span, start: int, end: int) -> Steps[None]:
    """Tokens [start, end), in all layers, on top of what came before them."""
    prefix = prefix_of(runner.layout, [SpanRange(span, 0, start)], None) if start else None
    cache = runner.new_cache(end - start, prefix)
    runner.prefill(cache, tokens[start:end])
    yield
    yield from _compare_layers(cache, span, start, end)


def _check_all(runner: Runner, tokens: Sequence[int], span: Span) -> Steps[None]:
    """Full attention reads what came, which was found good up to there; the other layers go on from their own."""
    layout, mark = runner.layout, None
    for start in range(0, len(tokens), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(tokens))
        prefix = prefix_of(layout, [SpanRange(span, 0, start)], mark) if start else None
        cache = runner.new_cache(end - start, prefix)
        runner.prefill(cache, tokens[start:end])
        mark = take_mark(cache)
        yield
        yield from _compare_layers(cache, span, start, end)
    assert mark is not None
    _compare_marks(span.marks[len(tokens)], mark)


def _keeps_first(layout: Layout) -> bool:
    return all(spec.kind == "window" and spec.keep for spec in layout.layers)


def _check_as_mlx_lm(runner: Runner, tokens: Sequence[int], span: Span) -> Steps[None]:
    """In chunks as long as `mlx_lm.cache_prompt` takes them: what a token sees depends on that."""
    caches: list[Any] = [RotatingKVCache(spec.max_size, keep=spec.keep) for spec in runner.layout.layers]
    last = len(tokens) - 1
    for start in range(0, last, MLX_CHUNK_TOKENS):
        runner.model(mx.array([tokens[start : min(start + MLX_CHUNK_TOKENS, last)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        yield
    runner.model(mx.array([tokens[last:]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    _compare_marks(span.marks[span.end], adopt_mlx_lm(runner.layout, caches, span.end).marks[span.end])


def _compare_layers(cache: SequenceCache, span: Span, start: int, end: int) -> Steps[None]:
    for layer, own in enumerate(cache.flat):
        if not isinstance(own, FullLayer):
            continue
        like = mx.zeros((), span.layout.flat()[layer].dtype)
        _compare(span, layer, start, Parts((own.own.parts(start, end),)).joined(like), is_first=False)
        yield


def _compare(span: Span, layer: int, start: int, ours: tuple[mx.array, mx.array], *, is_first: bool) -> None:
    """`ours`: K and V from `start` on, [1, kv_heads, tokens, dim]."""
    parts = span.parts(layer, start, start + ours[0].shape[2])
    codec = span.sealed(layer)[0].k.codec  # a prompt cache has one for each layer
    bits = codec.bits if isinstance(codec, AffineCodec) else None
    limit = _limit(bits, ours[0].dtype, is_first=is_first)
    for theirs, computed in zip(Parts((parts,)).joined(ours[0]), ours, strict=True):
        # Under the same codec what is the same has the same codes.
        same = codec.decode(codec.encode(computed.squeeze(0)), computed.dtype)[None] if bits else computed
        errors = _errors(_numbers(same), _numbers(theirs))
        worst = float(errors.max()) if is_first else float(np.sqrt((errors**2).mean()))
        if not worst <= limit:
            place = start + int(np.nan_to_num(errors, nan=np.inf).argmax())
            raise _mismatch(f"what it holds near token {place} is {worst:.2f} from what this model computes", limit)


def _compare_marks(theirs: Mark, ours: Mark) -> None:
    for layer, (one, other) in enumerate(zip(theirs.states, ours.states, strict=True)):
        if isinstance(one, SealedPart) and isinstance(other, SealedPart):
            like = other.k.arrays["values"]
            pairs = list(zip(one.dense(like), other.dense(like), strict=True))
        elif isinstance(one, RecurrentState) and isinstance(other, RecurrentState):
            pairs = [(a, b) for a, b in zip(one.arrays, other.arrays, strict=True) if a is not None and b is not None]
        else:
            continue
        for a, b in pairs:
            limit = _limit(None, b.dtype, is_first=False)
            x, y = (np.asarray(each.astype(mx.float32)).ravel() for each in (a, b))
            worst = float(np.linalg.norm(x - y) / max(float(np.linalg.norm(y)), 1e-9))
            if not worst <= limit:
                raise _mismatch(f"layer {layer} at its end is {worst:.2f} from what this model computes", limit)


def _numbers(array: mx.array) -> np.ndarray:
    """[1, kv_heads, tokens, dim] -> float32 [tokens, values]"""
    flat = array.squeeze(0).swapaxes(0, 1).astype(mx.float32)
    return np.asarray(flat).reshape(flat.shape[0], -1)


def _errors(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """For each token, as a share of what tells tokens from each other."""
    total = float(np.sqrt((ours**2).sum(-1).mean()))
    apart = float(np.sqrt(((ours - ours.mean(0)) ** 2).sum(-1).mean())) if len(ours) > 3 else total
    return np.linalg.norm(ours - theirs, axis=-1) / max(apart, SMALLEST_SHARE * total, 1e-9)


def _limit(bits: int | None, dtype: mx.Dtype, *, is_first: bool) -> float:
    if bits is not None:
        return (FIRST_LAYER if is_first else BY_BITS)[bits]
    return EXACT if dtype == mx.float32 else HALF


def _mismatch(what: str, limit: float) -> UnusableFile:
    return UnusableFile(
        f"This prompt cache is not this model's for this prompt: {what} (at most {limit:g} is taken). Give the prompt "
        "that it was made of, and serve the model that made it. Nothing was stored.",
        code="other_prompt",
    )
