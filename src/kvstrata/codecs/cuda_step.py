"""One decode step of a batch on CUDA, a launch for each layer: new tokens are written, and every row attends.

Buffers stay where they are, each row's own: the kernel takes all of them, and tables that say which row reads what.
Knows planes, buffers and rows; does not know sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.codecs import cuda_kernels
from kvstrata.codecs.cuda import RAW_DTYPES, PlanesRange, Range, RawRange, planes_call
from kvstrata.codecs.cuda_codes import FUSED_DIMS, THREADS, piece_tokens, scalar, signs, tiles_for
from kvstrata.codecs.cuda_kernels import WARPS

# Beyond these a launch has too many arguments: rows go one by one.
MOST_PLANES = 3
MOST_BUFFERS = 64


class Slot(NamedTuple):
    """Where a row's new token goes: a place in a buffer [1, kv_heads, size, dim] that nobody else writes."""

    k: mx.array
    v: mx.array
    at: int
    num_tokens: int  # of the buffer, with the new one


@dataclass(frozen=True, eq=False)
class Rows:
    """What the rows of a step read. Good for as long as each row has the same ranges and the same buffer."""

    planes: tuple[PlanesRange, ...]  # each once, whoever reads it
    buffers: tuple[tuple[mx.array, mx.array], ...]
    own: tuple[int, ...]  # of each row, the buffer that it writes to
    num_pieces: tuple[int, ...]  # of each row, those that do not change
    num_blocks: tuple[int, ...]  # of each row, those for planes
    tables: tuple[mx.array, ...]  # settled, firsts, sizes, uses: as the kernel has them
    counters: mx.array  # uint32 [rows * kv_heads], 0 between launches

    @property
    def fits(self) -> bool:
        dtypes = {array.dtype for pair in self.buffers for array in pair}
        return len(self.planes) <= MOST_PLANES and len(self.buffers) <= MOST_BUFFERS and len(dtypes) == 1


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
    num_heads = len(slots) * slots[0].k.shape[1]
    planes = {_key(part): part for ranges in before for part in ranges if isinstance(part, PlanesRange)}
    raw = [[part for part in ranges if isinstance(part, RawRange)] for ranges in before]
    pairs = [(part.k, part.v) for ranges in raw for part in ranges] + [(slot.k, slot.v) for slot in slots]
    buffers = {id(k): (k, v) for k, v in pairs}
    places = {key: place for place, key in enumerate(buffers)}
    settled = [[piece for part in ranges for piece in _pieces(places, part, num_heads)] for ranges in raw]
    used = [{_key(part) for part in ranges if isinstance(part, PlanesRange)} for ranges in before]
    return Rows(
        tuple(planes.values()),
        tuple(buffers.values()),
        tuple(places[id(slot.k)] for slot in slots),
        tuple(map(len, settled)),
        tuple(sum(_num_blocks(part) for key, part in planes.items() if key in keys) for keys in used),
        (
            _table(tuple(piece for pieces in settled for piece in pieces) or ((0, 0, 0),)),
            _table(tuple(accumulate(map(len, settled), initial=0))),
            _table(tuple(k.shape[2] for k, _ in buffers.values())),
            _table(tuple(tuple(int(key in keys) for key in planes) for keys in used) if planes else (0,)),
        ),
        mx.zeros((num_heads,), mx.uint32),
    )


def attend_step(
    q: mx.array,  # [rows, heads, 1, k_dim]
    k: mx.array,  # [rows, kv_heads, 1, k_dim], the new token of each row
    v: mx.array,
    rows: Rows,
    slots: Sequence[Slot],
    scale: float,
    sinks: mx.array | None = None,  # [heads]
) -> mx.array:
    """One launch: puts K and V into the slots and attends over all -> [rows, heads, 1, v_dim]."""
    num_rows, kv_heads, _, k_dim = k.shape
    group, v_dim = q.shape[1] // kv_heads, v.shape[3]
    size = piece_tokens(max(slot.num_tokens for slot in slots), num_rows * kv_heads)
    places = tuple((own, slot.at, slot.num_tokens, size) for own, slot in zip(rows.own, slots, strict=True))
    num_blocks = max(
        blocks + -(-(pieces - (-slot.num_tokens // size)) // WARPS)
        for blocks, pieces, slot in zip(rows.num_blocks, rows.num_pieces, slots, strict=True)
    )
    calls = [planes_call(i, part) for i, part in enumerate(rows.planes)]
    buffers = _padded(rows.buffers)
    out, _, _ = cuda_kernels.attend_step(len(calls), len(buffers)).run(
        inputs=[
            *(k, v, _table(places), *rows.tables, rows.counters),
            scalar(0.0) if sinks is None else sinks.astype(mx.float32),
            *(q.reshape(num_rows * kv_heads, group, k_dim), scalar(scale), signs(k_dim), signs(v_dim)),
            *(x for call in calls for x in call.inputs),
            *(x for pair in buffers for x in pair),
        ],
        template=[
            *(("T", q.dtype), ("BF", k.dtype == mx.bfloat16), ("K_DIM", k_dim), ("V_DIM", v_dim)),
            *(("TILES", tiles_for(group, max(k_dim, v_dim))), ("HAS_SINKS", sinks is not None)),
            *(number for call in calls for number in call.template),
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


def _key(part: PlanesRange) -> tuple[int, int, int, int]:
    return id(part.k), id(part.v), part.start, part.end


def _num_blocks(part: PlanesRange) -> int:
    return -(-part.pieces.shape[0] // WARPS)


def _pieces(places: dict[int, int], part: RawRange, num_heads: int) -> list[tuple[int, int, int]]:
    size = piece_tokens(part.end - part.start, num_heads)
    firsts = range(part.start, part.end, size)
    return [(places[id(part.k)], first, min(size, part.end - first)) for first in firsts]


def _padded(buffers: Sequence[tuple[mx.array, mx.array]]) -> list[tuple[mx.array, mx.array]]:
    """To a power of two: kernels are compiled for a number of buffers, and that takes seconds."""
    return [*buffers, *[buffers[0]] * ((1 << (len(buffers) - 1).bit_length()) - len(buffers))]


@lru_cache(maxsize=64)
def _table(numbers: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> mx.array:
    """Layers of one model have the same ones."""
    return mx.array(np.array(numbers, np.int32))
