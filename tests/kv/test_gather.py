"""Gathering of planes of all layers into few arrays: equal values, views without copies, memory that is freed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.registry import parse
from kvstrata.kv import gather
from kvstrata.kv.gather import gather_some, has_to_gather, num_arrays
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import shrink, transcode_layer
from tests.codecs.arrays import keys, same_bits
from tests.support.memory import active_bytes

LAYERS, HEADS, DIM, TOKENS = 6, 2, 64, 300
LAYOUT = Layout((LayerSpec("full", kv_heads=HEADS, k_dim=DIM, v_dim=DIM),) * LAYERS)


def encoded_span(k: str = "planes:8", v: str = "planes:4") -> Span:
    plan = make_plan(LAYOUT, parse(k), parse(v))
    held = {}
    for layer, (k_codec, v_codec) in enumerate(plan.pairs):
        arrays = keys(HEADS, TOKENS, DIM, seed=layer), keys(HEADS, TOKENS, DIM, seed=layer + 100)
        held[layer] = (SealedSegment(k_codec.encode(arrays[0]), v_codec.encode(arrays[1])),)
    return Span(LAYOUT, 0, TOKENS, held)


def gathered(span: Span) -> Span:
    while gather_some(span):
        pass
    return span


def all_arrays(span: Span) -> list[dict[str, mx.array]]:
    return [dict(side.arrays) for segment in span.sealed_segments() for side in (segment.k, segment.v)]


@pytest.mark.parametrize(("k", "v", "arrays"), [("raw", "raw", 2), ("planes:8", "planes:4", 9), ("affine:4", "raw", 4)])
def test_gathered_span_has_few_arrays_of_equal_values(k: str, v: str, arrays: int) -> None:
    span = encoded_span(k, v)
    before, nbytes = all_arrays(span), span.kv_bytes
    assert num_arrays(span) == LAYERS * arrays
    gathered(span)
    assert num_arrays(span) == arrays
    assert not has_to_gather(span)
    assert span.kv_bytes == nbytes
    for old, new in zip(before, all_arrays(span), strict=True):
        assert all(same_bits(old[name], new[name]) for name in old)


@pytest.mark.usefixtures("exact_buffers")
def test_gathered_span_takes_no_more_memory_and_is_read_without_copies() -> None:
    before = active_bytes()
    span = encoded_span()
    held = active_bytes() - before
    gathered(span)
    assert active_bytes() - before <= held
    reading = active_bytes()
    mx.eval([array[..., :8, :].sum() for planes in all_arrays(span) for array in planes.values()])
    assert active_bytes() <= reading


@pytest.mark.usefixtures("exact_buffers")
def test_step_down_of_the_last_layer_frees_the_gathered_plane() -> None:
    span = gathered(encoded_span("planes:8", "planes:8"))
    before, kv_bytes = active_bytes(), span.kv_bytes
    pair = make_plan(LAYOUT, parse("planes:4"), parse("planes:4")).pairs[0]
    for layer in span.layers:
        transcode_layer(span, layer, pair)
    freed = kv_bytes - span.kv_bytes
    assert freed > kv_bytes / 3
    assert before - active_bytes() == pytest.approx(freed, rel=0.01)
    assert not has_to_gather(span)
    assert num_arrays(span) == 8


@pytest.mark.usefixtures("exact_buffers")
def test_deleted_gathered_span_frees_all_memory() -> None:
    before = active_bytes()
    span = gathered(encoded_span())
    del span
    assert active_bytes() == before


def test_large_arrays_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LARGE_BYTES", 100)
    span = encoded_span("raw", "raw")
    assert not has_to_gather(span)
    assert num_arrays(gathered(span)) == 2 * LAYERS


def test_shrunk_cut_of_a_gathered_span_is_gathered_again() -> None:
    span = gathered(encoded_span())
    span.cut(10, 200)
    for layer in span.layers:
        shrink(span, layer)
    assert has_to_gather(span)
    assert not has_to_gather(gathered(span))
