"""Planes of all layers in few arrays: the same values, views that copy nothing, memory that goes when it should."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.registry import parse
from kvstrata.kv import gather
from kvstrata.kv.gather import gather_some, has_to_gather, num_arrays
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import edges_of, make_plan
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import shrink, transcode_layer
from tests.allocated import active_bytes
from tests.codecs.arrays import keys, same_bits

LAYERS, HEADS, DIM, TOKENS = 6, 2, 64, 300
LAYOUT = Layout((LayerSpec("full", kv_heads=HEADS, k_dim=DIM, v_dim=DIM),) * LAYERS)


def stored(k: str = "planes:8", v: str = "planes:4", **edges: object) -> Span:
    plan = make_plan(LAYOUT, parse(k), parse(v), **edges)  # pyright: ignore[reportArgumentType]
    held = {}
    for layer, (k_codec, v_codec) in enumerate(plan.pairs):
        arrays = keys(HEADS, TOKENS, DIM, seed=layer), keys(HEADS, TOKENS, DIM, seed=layer + 100)
        held[layer] = (SealedSegment(k_codec.encode(arrays[0]), v_codec.encode(arrays[1])),)
    return Span(LAYOUT, 0, TOKENS, held)


def gathered(span: Span, apart: frozenset[int] = frozenset()) -> Span:
    while gather_some(span, apart):
        pass
    return span


def all_planes(span: Span) -> list[dict[str, mx.array]]:
    return [dict(planes.arrays) for part in span.sealed_segments() for planes in (part.k, part.v)]


@pytest.mark.parametrize(("k", "v", "arrays"), [("raw", "raw", 2), ("planes:8", "planes:4", 9), ("affine:4", "raw", 4)])
def test_few_arrays_with_the_same_values(k: str, v: str, arrays: int) -> None:
    span = stored(k, v)
    before, nbytes = all_planes(span), span.kv_bytes
    assert num_arrays(span) == LAYERS * arrays
    gathered(span)
    assert num_arrays(span) == arrays
    assert not has_to_gather(span)
    assert span.kv_bytes == nbytes
    for old, new in zip(before, all_planes(span), strict=True):
        assert all(same_bits(old[name], new[name]) for name in old)


def test_layers_of_another_precision_are_gathered_apart() -> None:
    span = gathered(stored("planes:4", "planes:4", edge_layers=1, edge=parse("planes:8")))
    assert num_arrays(span) == 2 * (4 + 5)


@pytest.mark.usefixtures("exact_buffers")
def test_it_takes_no_more_memory_and_copies_once() -> None:
    before = active_bytes()
    span = stored()
    held = active_bytes() - before
    gathered(span)
    assert active_bytes() - before <= held
    reading = active_bytes()
    mx.eval([array[..., :8, :].sum() for planes in all_planes(span) for array in planes.values()])
    assert active_bytes() <= reading


@pytest.mark.usefixtures("exact_buffers")
def test_stepping_down_frees_the_plane_with_its_last_layer() -> None:
    span = gathered(stored("planes:8", "planes:8"))
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
def test_a_span_that_goes_leaves_nothing() -> None:
    before = active_bytes()
    span = gathered(stored())
    del span
    assert active_bytes() == before


def test_large_arrays_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "LARGE_BYTES", 100)
    span = stored("raw", "raw")
    assert not has_to_gather(span)
    assert num_arrays(gathered(span)) == 2 * LAYERS


@pytest.mark.usefixtures("exact_buffers")
def test_layers_that_keep_more_bits_keep_nothing_of_the_others() -> None:
    """Of planes:8 all are alike; then all but the edges step down."""
    edges = edges_of(LAYOUT, 1)
    span = gathered(stored("planes:8", "planes:8", edge_layers=1, edge=parse("planes:8")), edges)
    assert num_arrays(span) == 2 * 10
    before, kv_bytes = active_bytes(), span.kv_bytes
    for layer, pair in enumerate(
        make_plan(LAYOUT, parse("planes:4"), parse("planes:4"), edge_layers=1, edge=parse("planes:8")).pairs
    ):
        transcode_layer(span, layer, pair)
    assert before - active_bytes() == pytest.approx(kv_bytes - span.kv_bytes, rel=0.01)


def test_a_cut_of_it_has_memory_of_its_own() -> None:
    span = gathered(stored())
    span.cut(10, 200)
    for layer in span.layers:
        shrink(span, layer)
    assert has_to_gather(span)
    assert not has_to_gather(gathered(span))
