"""Attention on CUDA: one query for each head over planes and raw vectors, with kernels of our own.

Codes and vectors are read in place, a piece of up to 256 tokens by each warp. The results of pieces are combined by
their largest scores and sums of exponentials: exact, in float32. Prefill decodes a layer into scratch instead
(join.py). Knows planes and arrays; does not know sequences or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from kvstrata.attention.segments import KernelViews, RawSegment, SealedSegment, Segment, SegmentSlice
from kvstrata.codecs.base import EncodedArray
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.kernels import WARPS, Constant, Kind
from kvstrata.codecs.cuda.planes import (
    FUSED_DIMS,
    RAW_BITS,
    THREADS,
    arrays_of,
    bits_of,
    piece_tokens,
    pieces_of,
    rotation_constants,
    rotation_of,
    scalar,
    signs,
    table_of,
    tiles_for,
)
from kvstrata.codecs.mean_runs import GROUP_TOKENS, MeanRuns

RAW_DTYPES = (mx.bfloat16, mx.float16)

# Most ranges of one launch. With more there would be more kinds of launch to compile.
PARTS_AT_ONCE = 3

_COMBINE_THREADS = 1024


class PieceRuns(NamedTuple):
    mean_runs: tuple[MeanRuns, MeanRuns]  # of keys and of values
    offset: int  # of token 0 in the group that shares a mean

    def pieces(self, start: int, end: int, heads: int) -> mx.array:
        return pieces_of(self.mean_runs, self.offset, start, end, piece_tokens(end - start, heads))


@dataclass(frozen=True, eq=False)
class EncodedRange:
    """Tokens [start, end) of encoded arrays [kv_heads, tokens, dim]; keys or values may be raw. A range serves many
    steps and caches its lookups."""

    k: EncodedArray
    v: EncodedArray
    start: int
    end: int
    views: KernelViews = field(default_factory=KernelViews)  # of the arrays, shared by all ranges of them

    @cached_property
    def fits(self) -> bool:
        return fits(self.k) and fits(self.v) and rotation_of(self.v) is None

    @cached_property
    def raw_dtypes(self) -> set[mx.Dtype]:
        """Dtypes of keys or values that are raw."""
        return {planes.arrays["values"].dtype for planes in (self.k, self.v) if is_raw(planes)}

    @cached_property
    def arrays(self) -> list[mx.array]:
        return [*arrays_of(self.k), *arrays_of(self.v), table_of(rotation_of(self.k), self.k.dim)]

    def constants(self, number: int) -> list[Constant]:
        """Return the constants of range `number` of a launch."""
        bits: list[Constant] = [(f"K_BITS{number}", bits_of(self.k)), (f"V_BITS{number}", bits_of(self.v))]
        return bits + rotation_constants(rotation_of(self.k), "K_", str(number))

    @property
    def segments(self) -> PieceRuns:
        """Segments that, with the range and the number of heads, determine the pieces."""
        return PieceRuns((self.k.mean_runs, self.v.mean_runs), self.k.position % GROUP_TOKENS)

    @cached_property
    def pieces(self) -> mx.array:
        return self.segments.pieces(self.start, self.end, self.k.leading[0])


@dataclass(frozen=True, eq=False)
class RawRange:
    """Tokens [start, end) of vectors [1, kv_heads, tokens, dim], read in place."""

    k: mx.array
    v: mx.array
    start: int
    end: int
    views: KernelViews = field(default_factory=KernelViews)  # of the buffer

    @property
    def fits(self) -> bool:
        return _raw_fits(self.k, self.v)

    @property
    def raw_dtypes(self) -> set[mx.Dtype]:
        return {self.k.dtype}

    def vectors(self) -> list[mx.array]:
        return [array[:, :, self.start : self.end] for array in (self.k, self.v)]


Range = EncodedRange | RawRange


def range_of(segment: Segment) -> Range:
    """Return the range that the kernels read, if it `fits` them."""
    if isinstance(segment, RawSegment):
        return range_of_raw(segment)
    if isinstance(segment, SegmentSlice):
        return segment.views.get(_range_of_slice, segment)
    assert isinstance(segment, SealedSegment)
    return segment.views.get(_range_of_sealed, segment)


def range_of_raw(segment: RawSegment) -> RawRange:
    end = segment.start + segment.num_tokens
    return RawRange(segment.k_buffer, segment.v_buffer, segment.start, end, segment.views)


def _range_of_slice(segment: SegmentSlice) -> Range:
    """Return a range over the arrays of the whole segment, which all readers share."""
    return replace(range_of(segment.whole), start=segment.start, end=segment.end)


def _range_of_sealed(segment: SealedSegment) -> Range:
    if segment.is_raw:
        k, v = (mx.contiguous(encoded.arrays["values"])[None] for encoded in (segment.k, segment.v))
        return RawRange(k, v, 0, segment.num_tokens)
    return EncodedRange(segment.k, segment.v, 0, segment.num_tokens)


class RangePartial(NamedTuple):
    """Attention over some of the tokens: the results of each block of a launch."""

    sums: mx.array  # float32 [kv_heads, blocks, queries, v_dim], not divided by the sum of exponentials
    stats: mx.array  # float32 [kv_heads, blocks, queries, 2]: largest score, sum of exponentials


class Attended(NamedTuple):
    out: mx.array  # [kv_heads, queries, v_dim]
    log_sum: mx.array  # float32 [kv_heads, queries]: log of the sum of the exponentials of all scores


def _raw_fits(k: mx.array, v: mx.array) -> bool:
    """Whether the kernels read these vectors [..., dim]."""
    return k.dtype in RAW_DTYPES and k.dtype == v.dtype and k.shape[-1] in FUSED_DIMS and v.shape[-1] in FUSED_DIMS


def fits(planes: EncodedArray) -> bool:
    """Whether the kernels read these planes; other planes are decoded."""
    is_known = planes.arrays["values"].dtype in RAW_DTYPES if is_raw(planes) else "top" in planes.arrays
    return is_known and planes.dim in FUSED_DIMS and len(planes.leading) == 1


def is_raw(planes: EncodedArray) -> bool:
    return bits_of(planes) == RAW_BITS


def have_one_dtype(ranges: Sequence[Range]) -> bool:
    """Whether raw vectors have a single dtype: a launch reads the bits of all of them as one dtype."""
    return len({dtype for kv in ranges for dtype in kv.raw_dtypes}) <= 1


def fit_together(ranges: Sequence[Range]) -> bool:
    """Whether one `attend` reads all ranges. It takes no planes whose keys or values alone are raw."""
    is_mixed = any(isinstance(kv, EncodedRange) and kv.raw_dtypes for kv in ranges)
    return not is_mixed and have_one_dtype(ranges) and all(kv.fits for kv in ranges)


def attend(
    q: mx.array,  # [1, heads, 1, k_dim]
    ranges: Sequence[Range],
    scale: float,
    sinks: mx.array | None = None,  # [heads]
) -> mx.array:
    """Attend with one query for each head over all ranges, which must `fit_together` -> [1, heads, 1, v_dim]"""
    kv_heads = _num_heads(ranges[0])
    grouped = q.reshape(kv_heads, q.shape[1] // kv_heads, q.shape[3])
    launches = [ranges[i : i + PARTS_AT_ONCE] for i in range(0, len(ranges), PARTS_AT_ONCE)]
    partials = [partial(grouped, ranges, scale) for ranges in launches]
    return combine(partials, q.dtype, sinks).out.reshape(1, q.shape[1], 1, -1)


def attend_planes(q: mx.array, k: EncodedArray, v: EncodedArray, start: int, end: int, scale: float = 1.0) -> Attended:
    """Attend with q [kv_heads, queries, k_dim] over tokens [start, end) -> float32"""
    return combine([partial(q, [EncodedRange(k, v, start, end)], scale)], mx.float32)


def partial(q: mx.array, ranges: Sequence[Range], scale: float) -> RangePartial:
    """Attend with q [kv_heads, queries, k_dim] over some ranges, in one launch."""
    heads, queries, k_dim = q.shape
    v_dim = _v_dim(ranges[0])
    tiles = tiles_for(queries, max(k_dim, v_dim))
    calls = [_call(i, kv, heads) for i, kv in enumerate(ranges)]
    num_blocks = sum(call.num_blocks for call in calls)
    sums, stats = cuda_kernels.attend(tuple(call.kind for call in calls)).run(
        inputs=[q, scalar(scale), signs(k_dim), signs(v_dim), *(x for call in calls for x in call.inputs)],
        constants=(
            *(("T", q.dtype), ("BF", _is_bf16(ranges)), ("K_DIM", k_dim), ("V_DIM", v_dim), ("TILES", tiles)),
            *(number for call in calls for number in call.constants),
        ),
        output_shapes=[(heads, num_blocks, queries, v_dim), (heads, num_blocks, queries, 2)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(num_blocks * THREADS, heads, -(-queries // (4 * tiles))),
        threadgroup=(THREADS, 1, 1),
    )
    return RangePartial(sums, stats)


def combine(partials: Sequence[RangePartial], dtype: mx.Dtype, sinks: mx.array | None = None) -> Attended:
    """Combine partial results. A sink takes a share of the softmax and contributes nothing."""
    heads, _, queries, v_dim = partials[0].sums.shape
    num_threads = _COMBINE_THREADS // v_dim * v_dim
    out, log_sum = cuda_kernels.combine(len(partials)).run(
        inputs=[scalar(0.0) if sinks is None else sinks.astype(mx.float32), *(x for pair in partials for x in pair)],
        constants=(
            ("T", dtype),
            ("V_DIM", v_dim),
            ("HAS_SINKS", sinks is not None),
        ),
        grid=(heads * queries * num_threads, 1, 1),
        threadgroup=(num_threads, 1, 1),
        output_shapes=[(heads, queries, v_dim), (heads, queries)],
        output_dtypes=[dtype, mx.float32],
    )
    return Attended(out, log_sum)


class _AttendCall(NamedTuple):
    """Inputs and constants that a range adds to a launch."""

    kind: Kind
    inputs: list[mx.array]
    constants: list[Constant]
    num_blocks: int


def _call(i: int, kv: Range, heads: int) -> _AttendCall:
    if isinstance(kv, RawRange):
        num_tokens = kv.end - kv.start
        size = piece_tokens(num_tokens, heads)
        return _AttendCall("raw", kv.vectors(), [(f"SIZE{i}", size)], -(-num_tokens // (size * WARPS)))
    return _AttendCall("planes", [kv.pieces, *kv.arrays], kv.constants(i), -(-kv.pieces.shape[0] // WARPS))


def _is_bf16(ranges: Sequence[Range]) -> bool:
    return any(isinstance(kv, RawRange) and kv.k.dtype == mx.bfloat16 for kv in ranges)


def _num_heads(kv: Range) -> int:
    return kv.k.shape[1] if isinstance(kv, RawRange) else kv.k.leading[0]


def _v_dim(kv: Range) -> int:
    return kv.v.shape[3] if isinstance(kv, RawRange) else kv.v.dim
