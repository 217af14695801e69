"""16-bit models over segments, as on a Mac: their error to float32 is that of mlx-lm's own 16-bit caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.raw import RawCodec
from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import Checkpoint, LayerState, RecurrentState, needs_checkpoints, take_checkpoint
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import RAW, CodecPair, make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import transcode_layer
from tests.kv.drive import sealed_span
from tests.support.models import NUM_SCORED, NUM_TOKENS, OFFSET, WITH_DTYPES, Error, Sixteen, check, rms, run, scored

pytestmark = pytest.mark.usefixtures("as_on_metal")

BEFORE = NUM_TOKENS - NUM_SCORED
Side = tuple[Any, Any]  # a model and its layout


def sealed_prefix(side: Side, ids: tuple[int, ...], num_tokens: int, pairs: tuple[CodecPair, ...] | None = None) -> Any:
    """Return a sealed span of the first tokens, and the checkpoint at its end."""
    model, layout = side
    cache = SequenceCache(layout, model, num_tokens)
    run(model, cache, ids[:num_tokens])
    checkpoint = take_checkpoint(cache) if needs_checkpoints(layout) else None
    span = sealed_span(layout, cache)
    for layer in span.layers:
        transcode_layer(span, layer, pairs[layer] if pairs else RAW)
    return span, checkpoint


def resumed(side: Side, ranges: list[SpanRange], checkpoint: Any) -> SequenceCache:
    model, layout = side
    return SequenceCache(layout, model, NUM_TOKENS, prefix_of(layout, ranges, checkpoint))


def raw_error(m: Sixteen, at: tuple[int, ...]) -> Error:
    """Return the error after a hit on spans that end at these positions, each computed over the ones before it."""
    side, ranges, checkpoint, start = (m.model, m.layout), [], None, 0
    for end in at:
        cache = resumed(side, ranges, checkpoint) if ranges else SequenceCache(m.layout, m.model, NUM_TOKENS)
        run(m.model, cache, m.ids[start:end])
        checkpoint = take_checkpoint(cache) if needs_checkpoints(m.layout) else None
        span = sealed_span(m.layout, cache)
        for layer in span.layers:
            transcode_layer(span, layer, RAW)
        ranges.append(SpanRange(span, start, end))
        start = end
    return m.error(scored(m.model, resumed(side, ranges, checkpoint), m.ids))


@pytest.mark.parametrize(("case", "dtype"), WITH_DTYPES)
@pytest.mark.parametrize("at", [(BEFORE,), (17, 40, 51, BEFORE - 3)], ids=["hit", "several"])
def test_16_bit_raw_segments_have_the_error_of_mlx_lm(case: str, dtype: str, at: tuple[int, ...]) -> None:
    check(case, dtype, lambda m: raw_error(m, at))


def cut_error(m: Sixteen) -> Error:
    """Return the error after a hit that ends in the middle of a span."""
    side = (m.model, m.layout)
    span, checkpoint = sealed_prefix(side, m.ids, BEFORE - 10)
    cut = 40 if checkpoint is None else BEFORE - 10
    return m.error(scored(m.model, resumed(side, [SpanRange(span, 0, cut)], checkpoint), m.ids))


@pytest.mark.parametrize(("case", "dtype"), WITH_DTYPES)
def test_16_bit_cut_span_has_the_error_of_mlx_lm(case: str, dtype: str) -> None:
    check(case, dtype, cut_error)


def grown_error(m: Sixteen) -> Error:
    """Return the error of a reply that outgrows its first buffers."""
    cache = SequenceCache(m.layout, m.model, BEFORE + 2)

    def grow() -> None:
        if not cache.free_tokens:
            cache.grow(3)

    return m.error(scored(m.model, cache, m.ids, grow))


@pytest.mark.parametrize(("case", "dtype"), WITH_DTYPES)
def test_16_bit_reply_past_its_first_buffer_has_the_error_of_mlx_lm(case: str, dtype: str) -> None:
    check(case, dtype, grown_error)


def decoded(
    layout: Layout, span: Span, checkpoint: Checkpoint | None, dtype: mx.Dtype
) -> tuple[Span, Checkpoint | None]:
    """Return the span and the checkpoint decoded to raw values."""
    held = {}
    for layer in span.layers:
        pairs = [segment.dense(dtype) for segment in span.segments(layer, span.position, span.end)]
        k, v = (mx.concatenate([pair[i].squeeze(0) for pair in pairs], axis=1) for i in range(2))
        held[layer] = (_raw(k, v, span.position),)
    plain = Span(layout, span.position, span.num_tokens, held)
    return plain, checkpoint and replace(
        checkpoint, states=tuple(_decoded_state(state, dtype) for state in checkpoint.states)
    )


def _raw(k: mx.array, v: mx.array, position: int) -> SealedSegment:
    return SealedSegment(RawCodec().adopt(k, position), RawCodec().adopt(v, position))


def _decoded_state(state: LayerState, dtype: mx.Dtype) -> LayerState:
    if isinstance(state, SealedSegment):
        k, v = (array.squeeze(0) for array in state.dense(dtype))
        return _raw(k, v, state.k.position)
    if isinstance(state, RecurrentState):
        arrays = [array if array is None or not _is_float(array) else array.astype(dtype) for array in state.arrays]
        return RecurrentState(tuple(arrays))
    return state


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def encoded_error(m: Sixteen, names: tuple[str, str], num_tokens: int = NUM_TOKENS) -> Error:
    """Return the error relative to the same codes decoded to float32, and that of the codes decoded to 16 bits."""
    ids, before = (m.ids * 20)[:num_tokens], num_tokens - NUM_SCORED
    side, wide_side = (m.model, m.layout), (m.wide, m.wide_layout)
    span, checkpoint = sealed_prefix(side, ids, before, make_plan(m.layout, *map(parse, names)).pairs)
    found = scored(m.model, resumed(side, [SpanRange(span, 0, before)], checkpoint), ids)
    wide, wide_checkpoint = decoded(m.wide_layout, span, checkpoint, mx.float32)
    expected = scored(m.wide, resumed(wide_side, [SpanRange(wide, 0, before)], wide_checkpoint), ids)
    narrow, narrow_checkpoint = decoded(m.layout, span, checkpoint, m.dtype)
    theirs = scored(m.model, resumed(side, [SpanRange(narrow, 0, before)], narrow_checkpoint), ids)
    return Error(rms(found - expected), rms(theirs - expected))


@pytest.mark.parametrize("case", ["llama", OFFSET])
@pytest.mark.parametrize("name", ["raw", "planes:8", "affine:8:g32"])
def test_16_bit_span_of_several_groups_has_the_error_of_decoded_ones(case: str, name: str) -> None:
    check(case, "bfloat16", lambda m: encoded_error(m, (name, name), 700), num_seeds=2)


@pytest.mark.parametrize(("case", "dtype"), WITH_DTYPES)
@pytest.mark.parametrize("names", [("planes:8", "planes:8"), ("planes:4", "planes:2")], ids="-".join)
def test_16_bit_encoded_segments_have_the_error_of_decoded_arrays(
    case: str, dtype: str, names: tuple[str, str]
) -> None:
    check(case, dtype, lambda m: encoded_error(m, names))
