"""The memo of kernel views of a segment or buffer."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvstrata.attention.cuda.ranges import range_of
from kvstrata.attention.metal.decode import read_of
from kvstrata.attention.segments import KernelViews, RawSegment, SealedSegment, SegmentSlice
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
    assert (made, views.version) == ([1], 0)
    views.forget()
    assert views.get(make, 2) == [2]
    assert (made, views.version) == ([1, 2], 1)


def test_view_of_none_is_made_once() -> None:
    views, made = KernelViews(), []
    assert views.get(made.append, 1) is None
    assert views.get(made.append, 1) is None
    assert made == [1]


@pytest.mark.parametrize("view", [range_of, read_of])
def test_slices_share_views_of_their_whole_segment(view: object) -> None:
    assert callable(view)
    whole = sealed()
    one, other = view(SegmentSlice(whole, 3, 40)), view(SegmentSlice(whole, 10, 64))
    assert (one.start, one.end, other.start, other.end) == (3, 40, 10, 64)
    if view is range_of:
        assert one.views is other.views is view(whole).views
    else:
        assert one.arrays == other.arrays == view(whole).arrays


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
    assert buffer.views.version == before + 1


def test_cut_of_a_raw_segment_shares_the_views_of_its_buffer() -> None:
    buffer = KvBuffer(8, KvShape(1, 4, 4, mx.float32))
    buffer.put(0, mx.ones((1, 1, 6, 4)), mx.ones((1, 1, 6, 4)))
    segment = buffer.segment(6)
    assert isinstance(segment, RawSegment)
    assert range_of(segment).views is buffer.views
