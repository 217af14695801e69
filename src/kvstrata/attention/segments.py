"""Parts, which attention reads: runs of tokens of one sequence in one layer, raw or encoded.

Every part computes the scores of queries by its keys, the weighted sum of its values, and keys and values as plain
arrays. `like` has the dtype that the model computes in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import mlx.core as mx

from kvstrata.attention.cuda import join as cuda_join
from kvstrata.attention.cuda import ranges as cuda_ranges
from kvstrata.attention.cuda.trials import joined_works
from kvstrata.attention.metal import decode as metal_decode
from kvstrata.codecs import backends, dispatch
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda.addresses import KernelViews
from kvstrata.codecs.metal.planes import TokenRange
from kvstrata.codecs.raw import RawCodec, exact_mix, exact_scores


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

    def dense(self, like: mx.array) -> tuple[mx.array, mx.array]:
        """K and V, [1, kv_heads, tokens, dim]"""
        ...

    def cuda_range(self) -> cuda_ranges.Range:
        """The range that CUDA's kernels read, if it `fits` them."""
        ...

    def read(self) -> metal_decode.SegmentRead | None:
        """The `Read` of the portable kernel; None: the kernel does not read this part."""
        ...

    def stretches(self) -> tuple[TokenRange, TokenRange]:
        """Keys and values, for the kernel that joins parts."""
        ...


class SegmentSource(Protocol):
    """Tokens that another object holds. The codec of the tokens may change between two steps, never within a step."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def version(self) -> Hashable:
        """A value that changes whenever the parts or their addresses change."""
        ...

    def segments(self) -> tuple[Segment, ...]: ...


@dataclass(frozen=True)
class RawSegment:
    """Tokens of a buffer: `num_tokens` from `start` on."""

    k_buffer: mx.array  # [1, kv_heads, size, k_dim]
    v_buffer: mx.array  # [1, kv_heads, size, v_dim]
    num_tokens: int
    start: int = 0
    addresses: KernelViews = field(default_factory=KernelViews, compare=False)  # of the buffer

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

    def dense(self, like: mx.array) -> tuple[mx.array, mx.array]:  # noqa: ARG002
        return self.k, self.v

    def cuda_range(self) -> cuda_ranges.RawRange:
        return cuda_ranges.RawRange(
            self.k_buffer, self.v_buffer, self.start, self.start + self.num_tokens, self.addresses
        )

    def read(self) -> metal_decode.SegmentRead | None:
        return metal_decode.read_buffers(self.k_buffer, self.v_buffer, self.start, self.start + self.num_tokens)

    def stretches(self) -> tuple[TokenRange, TokenRange]:
        start, end = self.start, self.start + self.num_tokens
        return TokenRange(self.k_buffer.squeeze(0), start, end), TokenRange(self.v_buffer.squeeze(0), start, end)


@dataclass(frozen=True)
class SealedSegment:
    """Tokens that do not change any more. Immutable, so any number of sequences may share a part."""

    k: EncodedArray  # [kv_heads, tokens, k_dim]
    v: EncodedArray

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
        """Return the part itself: a part that never changes is its own source."""
        return (self,)

    def cuda_range(self) -> cuda_ranges.Range:
        return self._cuda_range

    @cached_property
    def _cuda_range(self) -> cuda_ranges.Range:
        """Range whose tables are made once."""
        if self.is_raw:
            k, v = (mx.contiguous(planes.arrays["values"])[None] for planes in (self.k, self.v))
            return cuda_ranges.RawRange(k, v, 0, self.num_tokens)
        return cuda_ranges.EncodedRange(self.k, self.v, 0, self.num_tokens)

    def read(self) -> metal_decode.SegmentRead | None:
        return self._read

    @cached_property
    def _read(self) -> metal_decode.SegmentRead | None:
        return metal_decode.read_planes(self.k, self.v, 0, self.num_tokens)

    def stretches(self) -> tuple[TokenRange, TokenRange]:
        k, v = (TokenRange(each.arrays.get("values", each), 0, self.num_tokens) for each in (self.k, self.v))
        return k, v

    def scores(self, q: mx.array, scale: float) -> mx.array:
        if isinstance(self.k.codec, RawCodec):
            return exact_scores(q, self.k.arrays["values"][None], scale)
        return self.k.codec.scores((q.astype(mx.float32) * scale).squeeze(0), self.k)[None]

    def mix(self, weights: mx.array) -> mx.array:
        return self.v.codec.mix(weights.squeeze(0), self.v)[None]

    def dense(self, like: mx.array) -> tuple[mx.array, mx.array]:
        return self.k.codec.decode(self.k, like.dtype)[None], self.v.codec.decode(self.v, like.dtype)[None]


@dataclass(frozen=True)
class SegmentSlice:
    """Tokens [start, end) of a sealed part, read in place: other sequences may read more of the part."""

    whole: SealedSegment
    start: int
    end: int

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

    def dense(self, like: mx.array) -> tuple[mx.array, mx.array]:
        return self._view.dense(like)

    def cuda_range(self) -> cuda_ranges.Range:
        return self._cuda_range

    @cached_property
    def _cuda_range(self) -> cuda_ranges.Range:
        """Range over the arrays of the whole part, which all readers share."""
        return replace(self.whole.cuda_range(), start=self.start, end=self.end)

    def read(self) -> metal_decode.SegmentRead | None:
        whole = self.whole.read()
        return None if whole is None else whole._replace(start=self.start, end=self.end)

    def stretches(self) -> tuple[TokenRange, TokenRange]:
        k, v = (whole._replace(start=self.start, end=self.end) for whole in self.whole.stretches())
        return k, v


@dataclass(frozen=True)
class SegmentedKV:
    """Parts of each row of the batch, oldest first. Replaces both keys and values."""

    rows: tuple[tuple[Segment, ...], ...]

    @property
    def has_codes(self) -> bool:
        """Whether any part has to be decoded to become a plain array."""
        wholes = [part.whole if isinstance(part, SegmentSlice) else part for row in self.rows for part in row]
        return any(isinstance(part, SealedSegment) and not part.is_raw for part in wholes)

    def to_arrays(self, like: mx.array) -> tuple[mx.array, mx.array]:
        """The only row's keys and values as plain arrays."""
        (row,) = self.rows
        on_gpu = {"cuda": _joined_on_cuda, "metal": _joined_on_metal}.get(backends.active())
        if on_gpu is not None and self.has_codes and (joined := on_gpu(row, like.dtype)) is not None:
            return joined
        dense = [part.dense(like) for part in row]
        if len(dense) == 1:
            return dense[0]
        return mx.concatenate([k for k, _ in dense], axis=2), mx.concatenate([v for _, v in dense], axis=2)


def _joined_on_cuda(row: Sequence[Segment], dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
    """Join parts, some of them encoded, by CUDA kernels. None: decode part by part."""
    *before, last = row
    own = last.cuda_range() if isinstance(last, RawSegment) else None
    stored = row if own is None else before
    # A raw part may only be the last one, the sequence's own tokens: another sequence's may not be written yet.
    if any(isinstance(part, RawSegment) for part in stored):
        return None
    parts = cuda_join.join_input([part.cuda_range() for part in stored], own, dtype)
    if parts is None or not joined_works(dtype, parts):
        return None
    return cuda_join.join(parts, dtype)


def _joined_on_metal(row: Sequence[Segment], dtype: mx.Dtype) -> tuple[mx.array, mx.array] | None:
    """Join parts, some of them encoded, by the portable kernel. None: decode part by part."""
    keys, values = zip(*(part.stretches() for part in row), strict=True)
    k = _joined_side(keys, dtype)
    v = None if k is None else _joined_side(values, dtype)
    return None if k is None or v is None else (k[None], v[None])


def _joined_side(stretches: Sequence[TokenRange], dtype: mx.Dtype) -> mx.array | None:
    """Keys or values alone, [heads, tokens, dim]"""
    if any(isinstance(held, EncodedArray) for held, _, _ in stretches):
        return dispatch.join_planes(stretches, dtype)
    raw = [held[:, start:end] for held, start, end in stretches if isinstance(held, mx.array)]
    return raw[0] if len(raw) == 1 else mx.concatenate(raw, axis=1)


def cut_segments(parts: Iterable[Segment], start: int, end: int) -> Iterator[Segment]:
    """Yield tokens [start, end) of consecutive parts. No memory moves."""
    first = 0
    for part in parts:
        a, b = max(start - first, 0), min(end - first, part.num_tokens)
        if a < b:
            yield part if b - a == part.num_tokens else _cut(part, a, b)
        first += part.num_tokens


def _cut(part: Segment, start: int, end: int) -> Segment:
    if isinstance(part, RawSegment):
        return RawSegment(part.k_buffer, part.v_buffer, end - start, part.start + start, part.addresses)
    if isinstance(part, SegmentSlice):
        return SegmentSlice(part.whole, part.start + start, part.start + end)
    assert isinstance(part, SealedSegment)
    return SegmentSlice(part, start, end)


def _range(buffer: mx.array, start: int, num_tokens: int) -> mx.array:
    return buffer if buffer.shape[2] == num_tokens else buffer[:, :, start : start + num_tokens]
