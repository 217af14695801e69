"""16-bit models over parts, as a Mac runs them: as near to float32 as mlx-lm's own 16-bit caches are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.layers.parts import SealedPart
from kvstrata.layers.sequence import Pair, SequenceCache
from kvstrata.spans import rewrite
from kvstrata.spans.marks import needs_marks, take_mark
from kvstrata.spans.plan import RAW, make_plan
from kvstrata.spans.span import Span, SpanRange, live_span, prefix_of
from tests.sixteen import CASES, DTYPES, NUM_SCORED, NUM_TOKENS, Sixteen, check, rms, run, scored

pytestmark = pytest.mark.usefixtures("as_on_metal")

BEFORE = NUM_TOKENS - NUM_SCORED
Side = tuple[Any, Any]  # a model and its layout


def stored(side: Side, ids: tuple[int, ...], num_tokens: int, pairs: tuple[Pair, ...] | None = None) -> Any:
    """A span of the first tokens, and the mark at its end."""
    model, layout = side
    cache = SequenceCache(layout, model, num_tokens)
    run(model, cache, ids[:num_tokens])
    mark = take_mark(cache) if needs_marks(layout) else None
    span = live_span(layout, cache)
    span.num_tokens = num_tokens
    for layer in span.layers:
        span.rewrite(layer, pairs[layer] if pairs else RAW)
    return span, mark


def resumed(side: Side, ranges: list[SpanRange], mark: Any) -> SequenceCache:
    model, layout = side
    return SequenceCache(layout, model, NUM_TOKENS, prefix_of(layout, ranges, mark))


def raw_error(m: Sixteen, at: tuple[int, ...]) -> float:
    """A hit on spans that end at these places, each computed over the ones before it."""
    side, ranges, mark, start = (m.model, m.layout), [], None, 0
    for end in at:
        cache = resumed(side, ranges, mark) if ranges else SequenceCache(m.layout, m.model, NUM_TOKENS)
        run(m.model, cache, m.ids[start:end])
        mark = take_mark(cache) if needs_marks(m.layout) else None
        span = live_span(m.layout, cache)
        span.num_tokens = end - start
        for layer in span.layers:
            span.rewrite(layer, RAW)
        ranges.append(SpanRange(span, start, end))
        start = end
    return rms(scored(m.model, resumed(side, ranges, mark), m.ids) - m.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at", [(BEFORE,), (17, 40, 51, BEFORE - 3)], ids=["hit", "several"])
def test_raw_parts(case: str, dtype: str, at: tuple[int, ...]) -> None:
    check(case, dtype, lambda m: raw_error(m, at))


def cut_error(m: Sixteen) -> float:
    """A hit on the middle of a longer span."""
    side = (m.model, m.layout)
    span, mark = stored(side, m.ids, BEFORE - 10)
    cut = 40 if mark is None else BEFORE - 10
    return rms(scored(m.model, resumed(side, [SpanRange(span, 0, cut)], mark), m.ids) - m.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_cut(case: str, dtype: str) -> None:
    check(case, dtype, cut_error)


def pieces_error(m: Sixteen) -> float:
    """A reply that outgrows its first buffers."""
    cache = SequenceCache(m.layout, m.model, BEFORE + 2)

    def grow() -> None:
        if not cache.free_tokens:
            cache.grow(3)

    return rms(scored(m.model, cache, m.ids, grow) - m.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_reply_past_its_first_buffer(case: str, dtype: str) -> None:
    check(case, dtype, pieces_error)


def widened(side: Side, span: Span, mark: Any) -> Any:
    """What is stored, decoded to float32."""
    _, layout = side
    held = {}
    for layer in span.layers:
        parts = [part.dense(mx.zeros(1)) for part in span.parts(layer, span.position, span.end)]
        k, v = (mx.concatenate([pair[i].squeeze(0) for pair in parts], axis=1) for i in range(2))
        held[layer] = (rewrite.adopt(k, v, RAW, span.position),)
    wide = Span(layout, span.position, span.num_tokens, held)
    return wide, mark and _wide_mark(mark)


def _wide_mark(mark: Any) -> Any:
    from dataclasses import replace

    return replace(mark, states=tuple(_wide_state(state) for state in mark.states))


def _wide_state(state: Any) -> Any:
    if isinstance(state, SealedPart):
        k, v = (array.squeeze(0) for array in state.dense(mx.zeros(1)))
        return rewrite.adopt(k, v, RAW, state.k.position)
    if isinstance(state, mx.array):
        return state.astype(mx.float32) if mx.issubdtype(state.dtype, mx.floating) else state
    if isinstance(state, list | tuple):
        return type(state)(_wide_state(each) for each in state)
    return state


def encoded_error(names: tuple[str, str], change: Callable[[Span, Any], None] | None = None) -> Any:
    def error(m: Sixteen) -> float:
        side, wide_side = (m.model, m.layout), (m.wide, m.wide_layout)
        pairs = make_plan(m.layout, *names).pairs
        span, mark = stored(side, m.ids, BEFORE, pairs)
        if change is not None:
            change(span, m)
        wide, wide_mark = widened(wide_side, span, mark)
        expected = scored(m.wide, resumed(wide_side, [SpanRange(wide, 0, BEFORE)], wide_mark), m.ids)
        found = scored(m.model, resumed(side, [SpanRange(span, 0, BEFORE)], mark), m.ids)
        return rms(np.asarray(found) - np.asarray(expected))

    return error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("names", [("planes:8", "planes:8"), ("planes:4", "planes:2")], ids="-".join)
def test_encoded_parts(case: str, dtype: str, names: tuple[str, str]) -> None:
    check(case, dtype, encoded_error(names))
