"""The memo of kernel views of a segment or buffer."""

from __future__ import annotations

import weakref

import mlx.core as mx
import pytest

from kvstrata.attention.cuda.ranges import range_of
from kvstrata.attention.cuda.step import LaunchState
from kvstrata.attention.metal.decode import read_of
from kvstrata.attention.segments import KernelViews, RawSegment, SealedSegment, SegmentSlice
from kvstrata.codecs.cuda import addresses as cuda_addresses
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.kv.buffers import KvBuffer, KvShape


def sealed(num_tokens: int = 64) -> SealedSegment:
    k, v = (mx.random.normal((2, num_tokens, 64), key=mx.random.key(seed)) for seed in (1, 2))
    return SealedSegment(PlanesCodec(4).encode(k), PlanesCodec(4).encode(v))


def test_view_is_made_once_until_forgotten() -> None:
    views, made = KernelViews(), []

    def make(source: int) -> list[int]:
        made.append(source)
        return [source]

    first = views.get(make, 1)
    assert views.get(make, 1) is first
    assert made == [1]
    before = views.version
    views.forget()
    assert views.get(make, 2) == [2]
    assert made == [1, 2]
    assert views.version != before


def test_launch_state_keeps_no_replaced_segment_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_addresses, "take", lambda *_: mx.zeros((12,), mx.uint64))
    monkeypatch.setattr(cuda_addresses, "collect", lambda addresses, _: mx.stack(addresses))
    buffer, state = KvBuffer(8, KvShape(2, 64, 64, mx.float32)), LaunchState()
    segment = sealed()
    first = state.reads([[range_of(segment)]], [buffer.slot(0, 1)])
    assert first is not None
    assert state.reads([[range_of(segment)]], [buffer.slot(0, 1)]) is first
    views = weakref.ref(range_of(segment).views)
    del segment
    assert views() is None
    assert state.reads([[range_of(sealed())]], [buffer.slot(0, 1)]) is not first


def test_view_of_none_is_made_once() -> None:
    views, made = KernelViews(), []
    assert views.get(made.append, 1) is None
    assert views.get(made.append, 1) is None
    assert made == [1]


def test_slices_share_the_arrays_and_views_of_their_whole_segment() -> None:
    whole = sealed()
    slices = [SegmentSlice(whole, 3, 40), SegmentSlice(whole, 10, 64)]
    ranges = [range_of(each) for each in slices]
    assert [(each.start, each.end) for each in ranges] == [(3, 40), (10, 64)]
    assert all(each.views is range_of(whole).views for each in ranges)
    reads = [read_of(each) for each in (whole, *slices)]
    assert all(read is not None and reads[0] is not None and read.arrays is reads[0].arrays for read in reads)
    assert [read and (read.start, read.end) for read in reads] == [(0, 64), (3, 40), (10, 64)]


@pytest.mark.parametrize("write", ["put", "adopt"])
def test_write_by_mlx_forgets_views_of_the_buffer(write: str) -> None:
    buffer = KvBuffer(8, KvShape(1, 4, 4, mx.float32))
    slot = buffer.slot(0, 1)
    assert slot.views is buffer.segment(1).views is buffer.views
    before = buffer.views.version
    tokens = mx.ones((1, 1, 8, 4))
    if write == "put":
        buffer.put(1, tokens[:, :, :2], tokens[:, :, :2])
    else:
        buffer.adopt(tokens, tokens + 1)
    assert buffer.views.version != before


def test_cut_of_a_raw_segment_shares_the_views_of_its_buffer() -> None:
    buffer = KvBuffer(8, KvShape(1, 4, 4, mx.float32))
    buffer.put(0, mx.ones((1, 1, 6, 4)), mx.ones((1, 1, 6, 4)))
    segment = buffer.segment(6)
    assert isinstance(segment, RawSegment)
    assert range_of(segment).views is buffer.views
