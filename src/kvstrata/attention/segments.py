"""Segments: runs of tokens of one sequence in one layer as attention reads them, raw or encoded.

Every segment computes the scores of queries by its keys, the weighted sum of its values, and its keys and values as
plain arrays. Segments know no back-end: what a kernel derives from a segment is memoized in its `KernelViews`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx

from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.raw import RawCodec, exact_mix, exact_scores

_Source = TypeVar("_Source")

_View = TypeVar("_View")

_NOT_MADE = object()


class KernelViews:
    """Memo of the views that kernels take of one segment's or buffer's arrays: addresses, tables, contiguous copies.

    A view must not refer to its segment: segments are freed by reference counting, which a cycle would defeat.
    """

    def __init__(self) -> None:
        self._views: dict[Callable[[Any], Any], Any] = {}
        # Equal to no other version, also of other views: a key that holds versions keeps no view alive.
        self.version = object()

    def get(self, make: Callable[[_Source], _View], source: _Source) -> _View:
        """Return `make(source)`, made at the first use and again after `forget`."""
        found = self._views.get(make, _NOT_MADE)
        if found is _NOT_MADE:
            found = self._views[make] = make(source)
        return found

    def forget(self) -> None:
        """Drop all views because MLX writes the arrays: whether it writes in place is not known."""
        self._views.clear()
        self.version = object()


class Segment(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    def scores(self, q: mx.array, scale: float) -> mx.array:
        """Score q [1, kv_heads, queries, k_dim] -> float32 [1, kv_heads, queries, tokens], times `scale`"""
        ...

    def mix(self, weights: mx.array) -> mx.array:
        """Mix values by float32 weights [1, kv_heads, queries, tokens] -> float32 [1, kv_heads, queries, v_dim]"""
        ...

    def dense(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """K and V, [1, kv_heads, tokens, dim]; encoded ones decoded to `dtype`, raw ones as they are."""
        ...


class SegmentSource(Protocol):
    """Tokens that another object holds. The codec of the tokens may change between two steps, never within a step."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def version(self) -> Hashable:
        """A value that changes whenever the segments or their addresses change."""
        ...

    def segments(self) -> tuple[Segment, ...]: ...


class SlotPlace(NamedTuple):
    """Place of a row's new token in its own buffer."""

    at: int
    num_tokens: int  # of the buffer, with the new one


class KvSlot(NamedTuple):
    """Slot of a row's new token: a place in a buffer [1, kv_heads, size, dim] that no other row writes."""

    k: mx.array
    v: mx.array
    size: int  # of the buffer, in tokens
    at: int
    num_tokens: int  # of the buffer, with the new one
    views: KernelViews  # of the buffer


class DecodeRow(Protocol):
    """A layer of one sequence, as a row of a decode step whose kernel writes the new token."""

    def segments_before(self) -> tuple[Segment, ...]:
        """Return all segments that the layer reads, except for the buffer that the next token goes to."""
        ...

    def next_slot(self) -> KvSlot:
        """Return the slot of one more token, which is not counted yet."""
        ...

    def count_next(self) -> None:
        """Count the token of the slot: the caller writes it there, or has written it by `put_last`."""
        ...

    def put_last(self, k: mx.array, v: mx.array) -> None:
        """Write the last counted token through MLX."""
        ...

    def segments(self) -> tuple[Segment, ...]: ...


@dataclass(frozen=True)
class RawSegment:
    """Tokens of a buffer: `num_tokens` from `start` on."""

    k_buffer: mx.array  # [1, kv_heads, size, k_dim]
    v_buffer: mx.array  # [1, kv_heads, size, v_dim]
    num_tokens: int
    start: int = 0
    views: KernelViews = field(default_factory=KernelViews, compare=False)  # of the buffer

    @property
    def num_heads(self) -> int:
        return self.k_buffer.shape[1]

    @property
    def k(self) -> mx.array:
        return _range(self.k_buffer, self.start, self.num_tokens)

    @property
    def v(self) -> mx.array:
        return _range(self.v_buffer, self.start, self.num_tokens)

    def scores(self, q: mx.array, scale: float) -> mx.array:
        return exact_scores(q, self.k, scale)

    def mix(self, weights: mx.array) -> mx.array:
        return exact_mix(weights, self.v)

    def dense(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:  # noqa: ARG002
        return self.k, self.v


@dataclass(frozen=True)
class SealedSegment:
    """Tokens that do not change any more. Immutable, so any number of sequences may share a segment."""

    k: EncodedArray  # [kv_heads, tokens, k_dim]
    v: EncodedArray
    views: KernelViews = field(default_factory=KernelViews, init=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.k.num_tokens

    @property
    def num_heads(self) -> int:
        return self.k.leading[0]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def is_raw(self) -> bool:
        return isinstance(self.k.codec, RawCodec) and isinstance(self.v.codec, RawCodec)

    def arrays(self) -> list[mx.array]:
        return [*self.k.arrays.values(), *self.v.arrays.values()]

    @property
    def version(self) -> Hashable:
        return 0

    def segments(self) -> tuple[Segment, ...]:
        """Return the segment itself: a segment that never changes is its own source."""
        return (self,)

    def scores(self, q: mx.array, scale: float) -> mx.array:
        if isinstance(self.k.codec, RawCodec):
            return exact_scores(q, self.k.arrays["values"][None], scale)
        return self.k.codec.scores((q.astype(mx.float32) * scale).squeeze(0), self.k)[None]

    def mix(self, weights: mx.array) -> mx.array:
        return self.v.codec.mix(weights.squeeze(0), self.v)[None]

    def dense(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return self.k.codec.decode(self.k, dtype)[None], self.v.codec.decode(self.v, dtype)[None]


@dataclass(frozen=True)
class SegmentSlice:
    """Tokens [start, end) of a sealed segment, read in place: other sequences may read more of the segment."""

    whole: SealedSegment
    start: int
    end: int
    views: KernelViews = field(default_factory=KernelViews, init=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_heads(self) -> int:
        return self.whole.num_heads

    @cached_property
    def _view(self) -> SealedSegment:
        return SealedSegment(self.whole.k.view(self.start, self.end), self.whole.v.view(self.start, self.end))

    def scores(self, q: mx.array, scale: float) -> mx.array:
        return self._view.scores(q, scale)

    def mix(self, weights: mx.array) -> mx.array:
        return self._view.mix(weights)

    def dense(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        return self._view.dense(dtype)


@dataclass(frozen=True)
class SegmentedKV:
    """Segments of each row of the batch, oldest first. Replaces both keys and values."""

    rows: tuple[tuple[Segment, ...], ...]

    @property
    def has_codes(self) -> bool:
        """Whether any segment has to be decoded to become a plain array."""
        return any(has_codes(row) for row in self.rows)


def has_codes(segments: Iterable[Segment]) -> bool:
    """Whether any segment has to be decoded to become a plain array."""
    wholes = [segment.whole if isinstance(segment, SegmentSlice) else segment for segment in segments]
    return any(isinstance(whole, SealedSegment) and not whole.is_raw for whole in wholes)


def cut_segments(segments: Iterable[Segment], start: int, end: int) -> Iterator[Segment]:
    """Yield tokens [start, end) of consecutive segments. No memory moves."""
    first = 0
    for segment in segments:
        a, b = max(start - first, 0), min(end - first, segment.num_tokens)
        if a < b:
            yield segment if b - a == segment.num_tokens else _cut(segment, a, b)
        first += segment.num_tokens


def _cut(segment: Segment, start: int, end: int) -> Segment:
    if isinstance(segment, RawSegment):
        return RawSegment(segment.k_buffer, segment.v_buffer, end - start, segment.start + start, segment.views)
    if isinstance(segment, SegmentSlice):
        return SegmentSlice(segment.whole, segment.start + start, segment.start + end)
    assert isinstance(segment, SealedSegment)
    return SegmentSlice(segment, start, end)


def _range(buffer: mx.array, start: int, num_tokens: int) -> mx.array:
    return buffer if buffer.shape[2] == num_tokens else buffer[:, :, start : start + num_tokens]
