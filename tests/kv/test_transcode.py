"""Transcoding of long layers in slices: each step is short, and between two steps a layer is whole."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.registry import parse
from kvstrata.kv.precision_plan import RAW, make_plan
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import LayerTranscoder, encode_live, is_transcoded, shrink, transcode_layer
from kvstrata.kv.work_sizes import slices, work_sizes_of
from tests.kv.drive import LAYOUT, TOKEN_BYTES, filled_layer, live_span_of, random_kv
from tests.support.memory import active_bytes, peak_bytes

SIZES = work_sizes_of(LAYOUT.flat()[0])
NUM_TOKENS = 2 * SIZES.segment_tokens + 3000
PLANES = ("planes:8", "planes:4")


def steps(span: Span, name: str, *, upward: bool = False) -> Iterator[None]:
    transcoder = LayerTranscoder(0, make_plan(LAYOUT, parse(name), parse(name)).pairs[0])
    while transcoder.advance(span, upward=upward):
        yield


def dense(span: Span) -> tuple[mx.array, mx.array]:
    return segments_to_arrays(span.segments(0, span.position, span.end), random_kv(1)[0].dtype)


def long_span() -> Span:
    return live_span_of(filled_layer(NUM_TOKENS, capacity=NUM_TOKENS + 100))


def transcoded(name: str) -> Span:
    span = long_span()
    transcode_layer(span, 0, make_plan(LAYOUT, parse(name), parse(name)).pairs[0])
    return span


def test_slices_end_at_the_same_positions_from_any_start() -> None:
    assert list(slices(300, 1100, 512)) == [(300, 512), (512, 1024), (1024, 1100)]
    assert list(slices(0, 512, 512)) == [(0, 512)]


@pytest.mark.parametrize("name", ["raw", "affine:4", *PLANES])
def test_transcode_in_slices_equals_encoding_at_once(name: str) -> None:
    span = transcoded(name)
    k, v = (array.squeeze(0) for array in random_kv(NUM_TOKENS))
    codecs = make_plan(LAYOUT, parse(name), parse(name)).pairs[0]
    for side, (array, codec) in enumerate(zip((k, v), codecs, strict=True)):
        wanted = codec.decode(codec.encode(array), mx.float32)
        assert mx.array_equal(dense(span)[side][0], wanted)
    assert [segment.num_tokens for segment in span.sealed(0)] == [SIZES.segment_tokens, SIZES.segment_tokens, 3000]
    assert is_transcoded(span, 0, codecs)


@pytest.mark.parametrize(("before", "after"), [("raw", "planes:8"), ("planes:8", "planes:4"), ("planes:8", "affine:4")])
def test_transcoder_steps_are_one_slice_and_leave_the_layer_readable(before: str, after: str) -> None:
    span = transcoded(before)
    was = dense(span)[0]
    tolerance = 0.35 * float(mx.abs(was).max().item())  # pyright: ignore[reportArgumentType]
    encodes = (before, after) != PLANES
    count = 0
    for _ in steps(span, after):
        count += 1
        assert float(mx.abs(dense(span)[0] - was).max().item()) < tolerance  # pyright: ignore[reportArgumentType]
    size = SIZES.slice_tokens if encodes else SIZES.segment_tokens
    assert count + 1 == -(-NUM_TOKENS // size)


def test_transcode_needs_scratch_for_one_slice() -> None:
    """Sealed segments are replaced one by one."""
    span = transcoded("planes:8")
    held = span.kv_bytes

    def act() -> None:
        for _ in steps(span, "affine:4"):
            pass

    one_slice = SIZES.slice_tokens * TOKEN_BYTES
    assert peak_bytes(act) <= 0.02 * held + 5 * one_slice
    assert span.codec_pairs(0)[0][0].name == "affine:4"


def test_transcode_of_a_span_cut_and_joined_meanwhile_completes() -> None:
    span = transcoded("raw")
    work = steps(span, "planes:4")
    for _ in range(3):
        next(work)
    end = SIZES.segment_tokens + 700
    span.cut(0, end)
    shrink(span, 0)
    after = live_span_of(filled_layer(500, capacity=500, seed=3))
    transcode_layer(after, 0, RAW)
    shifted = [EncodedArray(p.codec, p.arrays, 500, end, p.dim) for p in (after.sealed(0)[0].k, after.sealed(0)[0].v)]
    after.replace(0, [type(after.sealed(0)[0])(*shifted)])
    after.position = end
    span.append(after)
    for _ in work:
        pass
    pair = make_plan(LAYOUT, parse("planes:4"), parse("planes:4")).pairs[0]
    assert is_transcoded(span, 0, pair)
    assert sum(segment.num_tokens for segment in span.sealed(0)) == end + 500
    wanted = mx.concatenate([random_kv(NUM_TOKENS)[0][:, :, :end], random_kv(500, seed=3)[0]], axis=2)
    assert float(mx.abs(dense(span)[0] - wanted).max().item()) < 1  # pyright: ignore[reportArgumentType]


def test_abandoned_transcode_leaks_no_memory() -> None:
    before = active_bytes()
    span = transcoded("raw")
    work = steps(span, "planes:8")
    for _ in range(3):
        next(work)
    del work
    assert active_bytes() - before == pytest.approx(span.kv_bytes, rel=0.02)


def test_shrink_copies_only_the_cut_segment() -> None:
    span = transcoded("planes:8")
    span.cut(0, NUM_TOKENS - 10)
    first = span.sealed(0)[0]
    assert peak_bytes(lambda: shrink(span, 0)) <= 3000 * TOKEN_BYTES / 3
    assert span.sealed(0)[0] is first


def test_encode_live_seals_in_slices_while_the_owner_writes() -> None:
    layer = filled_layer(NUM_TOKENS, capacity=NUM_TOKENS + 100)
    span, pair = live_span_of(layer), make_plan(LAYOUT, parse("planes:8"), parse("planes:8")).pairs[0]
    count = 0
    for _ in encode_live(span, 0, pair, RawWindow(4, 128), up_to=NUM_TOKENS):
        count += 1
        assert not layer.own.sealed_tokens
        if count < 4:
            layer.append(*random_kv(1, seed=count))
    assert count == -(-(NUM_TOKENS - 128) // SIZES.slice_tokens)
    assert layer.own.sealed_tokens == NUM_TOKENS - 128
    assert layer.offset == NUM_TOKENS + 3
    k = segments_to_arrays(layer.segments(), random_kv(1)[0].dtype)[0]
    wanted = mx.concatenate([random_kv(NUM_TOKENS)[0], *(random_kv(1, seed=i)[0] for i in (1, 2, 3))], axis=2)
    assert mx.array_equal(k[:, :, -131:], wanted[:, :, -131:])
    assert float(mx.abs(k - wanted).max().item()) < 0.1  # pyright: ignore[reportArgumentType]
