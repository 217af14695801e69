"""One decode step of a batch on CUDA, a launch for each layer: new tokens are written, and every row attends.

Buffers stay where they are, each row's own: the kernel takes all of them, and tables that say which row reads what.
Knows planes, buffers and rows; does not know sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda import RAW_DTYPES, PieceSegments, PlanesRange, Range, RawRange
from kvstrata.codecs import cuda_kernels, paths
from kvstrata.codecs.cuda_codes import (
    FUSED_DIMS,
    THREADS,
    piece_tokens,
    scalar,
    signs,
    tiles_for,
)
from kvstrata.codecs.cuda_kernels import WARPS

# Beyond these a launch has too many arguments: rows go one by one.
MOST_PLANES = 3
MOST_BUFFERS = 64
# What launches are padded to: kernels are compiled for a number of buffers, and that takes seconds.
BUFFER_COUNTS = (1, 4, 16, MOST_BUFFERS)


class Slot(NamedTuple):
    """Where a row's new token goes: a place in a buffer [1, kv_heads, size, dim] that no other row writes."""

    k: mx.array
    v: mx.array
    size: int  # of the buffer, in tokens
    at: int
    num_tokens: int  # of the buffer, with the new one


@dataclass(frozen=True, eq=False)
class Rows:
    """What the rows of one step read. Made for the step: nothing of it is kept, so whatever is replaced is free."""

    planes: tuple[PlanesRange, ...]  # one of each that has the same planes
    buffers: tuple[tuple[mx.array, mx.array], ...]
    sizes: tuple[int, ...]  # of the buffers, in tokens
    reads: tuple[RowReads, ...]
    slots: tuple[Slot, ...]

    @property
    def fits(self) -> bool:
        dtypes = {k.dtype for k, _ in self.buffers}  # the values' is the same
        return len(self.planes) <= MOST_PLANES and len(self.buffers) <= MOST_BUFFERS and len(dtypes) == 1

    @property
    def tables(self) -> Tables:
        heads = self.slots[0].k.shape[1]
        return _tables(self.reads, self.sizes, tuple([part.segments for part in self.planes]), heads)


class RowReads(NamedTuple):
    """By number: what a row reads beside the buffer that it writes to, and that one."""

    planes: tuple[tuple[int, int, int], ...]  # which, first token, end
    raw: tuple[tuple[int, int, int], ...]  # which buffer, first token, end
    own: int


class Tables(NamedTuple):
    """As the kernel has them; layers of one model have the same ones."""

    settled: mx.array  # int32 [pieces, 3]: buffer, first token, how many
    firsts: mx.array  # int32 [rows + 1]: where each row's begin
    sizes: mx.array  # int32 [buffers], in tokens
    ranges: mx.array  # int32 [rows, planes, 2]: of the pieces of planes, those of a row
    pieces: tuple[mx.array, ...]  # of each of the planes, see `pieces_of`
    num_settled: tuple[int, ...]  # of each row
    num_blocks: tuple[int, ...]  # of each row, those for planes


def fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether `attend_step` takes queries [rows, heads, 1, dim] for the tokens k and v [rows, kv_heads, 1, dim]."""
    group, dims = q.shape[1] // k.shape[1], (k.shape[3], v.shape[3])
    return (
        q.dtype == k.dtype == v.dtype
        and k.dtype in RAW_DTYPES
        and all(dim in FUSED_DIMS for dim in dims)
        and group <= 4 * tiles_for(group, max(dims))
    )


def rows_of(before: Sequence[Sequence[Range]], slots: Sequence[Slot]) -> Rows:
    """`before` are each row's ranges but for the buffer of its slot; all of them fit."""
    if not any(before):
        own = tuple([(slot.k, slot.v) for slot in slots])
        return Rows((), own, tuple([slot.size for slot in slots]), _own_alone(len(slots)), tuple(slots))
    planes: dict[tuple[int, int], tuple[int, PlanesRange]] = {}
    buffers: dict[int, tuple[int, tuple[mx.array, mx.array]]] = {}
    reads = []
    for ranges, slot in zip(before, slots, strict=True):
        coded, raw = [], []
        for part in ranges:
            if isinstance(part, PlanesRange):
                number, _ = planes.setdefault((id(part.k), id(part.v)), (len(planes), part))
                coded.append((number, part.start, part.end))
            else:
                number, _ = buffers.setdefault(id(part.k), (len(buffers), (part.k, part.v)))
                raw.append((number, part.start, part.end))
        own, _ = buffers.setdefault(id(slot.k), (len(buffers), (slot.k, slot.v)))
        reads.append(RowReads(tuple(coded), tuple(raw), own))
    return Rows(
        tuple(part for _, part in planes.values()),
        tuple(pair for _, pair in buffers.values()),
        tuple(k.shape[2] for _, (k, _) in buffers.values()),
        tuple(reads),
        tuple(slots),
    )


def attend_step(
    q: mx.array,  # [rows, heads, 1, k_dim]
    k: mx.array,  # [rows, kv_heads, 1, k_dim], the new token of each row
    v: mx.array,
    rows: Rows,
    counters: mx.array,  # uint32 [rows * kv_heads], 0 between launches; of launches that wait for each other
    scale: float,
    sinks: mx.array | None = None,  # [heads]
) -> mx.array:
    """One launch: puts K and V into the slots and attends over all -> [rows, heads, 1, v_dim]."""
    num_rows, kv_heads, _, k_dim = k.shape
    group, v_dim = q.shape[1] // kv_heads, v.shape[3]
    tables, slots = rows.tables, rows.slots
    size = piece_tokens(max([slot.num_tokens for slot in slots]), num_rows * kv_heads)
    places = tuple([(read.own, slot.at, slot.num_tokens, size) for read, slot in zip(rows.reads, slots, strict=True)])
    num_blocks = max(
        [
            blocks + -(-(settled - (-slot.num_tokens // size)) // WARPS)
            for blocks, settled, slot in zip(tables.num_blocks, tables.num_settled, slots, strict=True)
        ]
    )
    of_planes = [constant for i, part in enumerate(rows.planes) for constant in part.constants(i)]
    constants = (
        *(("T", q.dtype), ("BF", k.dtype == mx.bfloat16), ("K_DIM", k_dim), ("V_DIM", v_dim)),
        *(("TILES", tiles_for(group, max(k_dim, v_dim))), ("HAS_SINKS", sinks is not None), *of_planes),
    )
    buffers = _padded(rows.buffers)
    out, _, _ = cuda_kernels.attend_step(len(rows.planes), len(buffers)).run(
        constants,
        inputs=[
            *(k, v, _table(places), tables.settled, tables.firsts, tables.sizes, tables.ranges, counters),
            scalar(0.0) if sinks is None else sinks.astype(mx.float32),
            *(q.reshape(num_rows * kv_heads, group, k_dim), scalar(scale), signs(k_dim), signs(v_dim)),
            *(x for part, pieces in zip(rows.planes, tables.pieces, strict=True) for x in (pieces, *part.arrays)),
            *[x for pair in buffers for x in pair],
        ],
        output_shapes=[
            (*q.shape[:3], v_dim),
            (num_rows * kv_heads, num_blocks, group, v_dim),
            (num_rows * kv_heads, num_blocks, group, 2),
        ],
        output_dtypes=[q.dtype, mx.float32, mx.float32],
        grid=(num_blocks * THREADS, num_rows * kv_heads, 1),
        threadgroup=(THREADS, 1, 1),
    )
    return out


@cache
def compile_all(dtype: mx.Dtype, kv_heads: int, group: int, k_dim: int, v_dim: int, has_sinks: bool) -> None:
    """Compile the kernels for every number of buffers, seconds for each, so that no later step waits for one."""
    if paths.active() != "cuda":
        return
    heads = kv_heads * group
    q, k, v = (mx.zeros((1, n, 1, dim), dtype) for n, dim in ((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim)))
    for count in BUFFER_COUNTS:
        own, *others = [(mx.zeros_like(k), mx.zeros_like(v)) for _ in range(count)]
        rows = rows_of([[RawRange(*pair, 0, 1) for pair in others]], [Slot(*own, 1, 0, 1)])
        sinks = mx.zeros((heads,)) if has_sinks else None
        mx.eval(attend_step(q, k, v, rows, mx.zeros((kv_heads,), mx.uint32), 1.0, sinks))


@lru_cache(maxsize=64)
def _own_alone(num_rows: int) -> tuple[RowReads, ...]:
    return tuple(RowReads((), (), row) for row in range(num_rows))


@lru_cache(maxsize=32)
def _tables(
    reads: tuple[RowReads, ...],
    sizes: tuple[int, ...],
    segments: tuple[PieceSegments, ...],
    heads: int,
) -> Tables:
    num_heads = len(reads) * heads
    settled = [[piece for part in read.raw for piece in _pieces(*part, num_heads)] for read in reads]
    pieces: list[list[np.ndarray]] = [[] for _ in segments]
    ranges = np.zeros((len(reads), max(1, len(segments)), 2), np.int32)
    for row, read in enumerate(reads):
        for number, start, end in read.planes:
            mine = np.asarray(segments[number].pieces(start, end, num_heads))
            if not ranges[row, number, 1]:
                ranges[row, number, 0] = sum(map(len, pieces[number]))
            ranges[row, number, 1] += len(mine)
            pieces[number].append(mine)
    return Tables(
        _table(tuple(piece for row in settled for piece in row) or ((0, 0, 0),)),
        _table(tuple(accumulate(map(len, settled), initial=0))),
        _table(sizes),
        mx.array(ranges),
        tuple(mx.array(np.concatenate(arrays)) for arrays in pieces),
        tuple(map(len, settled)),
        tuple(int(-(-row[:, 1] // WARPS).sum()) for row in ranges),
    )


def _pieces(buffer: int, start: int, end: int, num_heads: int) -> list[tuple[int, int, int]]:
    size = piece_tokens(end - start, num_heads)
    return [(buffer, first, min(size, end - first)) for first in range(start, end, size)]


def _padded(buffers: Sequence[tuple[mx.array, mx.array]]) -> list[tuple[mx.array, mx.array]]:
    size = next(size for size in BUFFER_COUNTS if size >= len(buffers))
    return [*buffers, *[buffers[0]] * (size - len(buffers))]


@lru_cache(maxsize=64)
def _table(numbers: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> mx.array:
    return mx.array(np.array(numbers, np.int32))
