"""A decode step of a batch on CUDA, a launch for each layer: new tokens are written, and every row attends.

The kernel finds KV through a table of addresses, so one kernel serves launches of any number of rows and parts, of any
bits. The arrays behind the addresses (`held_by`) are handed to MLX with the pass, and MLX keeps them until the pass has
ended. Knows planes, buffers and rows; does not know sequences.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda.ranges import RAW_DTYPES, Range, RawRange, have_one_dtype
from kvstrata.attention.cuda.tables import (
    RowReads,
    SegmentForm,
    SlotPlace,
    StepTables,
    places_of,
    raw_kind,
    segments_length,
    tables_of,
)
from kvstrata.codecs import backends
from kvstrata.codecs.cuda import addresses as cuda_addresses
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.addresses import PLANES_PLACES, RAW_PLACES, KernelViews
from kvstrata.codecs.cuda.planes import FUSED_DIMS, THREADS, bits_of, blocks_for, rotation_of, scalar, tiles_for
from kvstrata.codecs.hadamard import sign_values
from kvstrata.codecs.mean_runs import GROUP_TOKENS


class KvSlot(NamedTuple):
    """Slot of a row's new token: a place in a buffer [1, kv_heads, size, dim] that no other row writes."""

    k: mx.array
    v: mx.array
    size: int  # of the buffer, in tokens
    at: int
    num_tokens: int  # of the buffer, with the new one
    addresses: KernelViews  # of the buffer


@dataclass(frozen=True, eq=False)
class StepReads:
    """Tables and addresses of KV that the rows of a layer read. Keeps no KV alive: KV may change between steps."""

    tables: StepTables
    addresses: mx.array  # uint64 [parts, 12]


class LatestReads:
    """The latest `Reads` of one layer, made anew when the rows read other tokens or addresses."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._reads: StepReads | None = None

    def reads(self, before: Sequence[Sequence[Range]], slots: Sequence[KvSlot]) -> StepReads | None:
        """Return the reads. `before`: each row's ranges but for its slot's buffer; all fit. None: dtypes differ."""
        key = (
            tuple([tuple([(part.where, part.where.version, part.start, part.end) for part in r]) for r in before]),
            tuple([(slot.addresses, slot.addresses.version) for slot in slots]),
        )
        if key != self._key:
            self._reads = _reads_of(before, slots)
            self._key = key
        return self._reads


def held_by(before: Sequence[Sequence[Range]], slots: Sequence[KvSlot]) -> list[mx.array]:
    """Return the arrays that the addresses point to."""
    held = [array for slot in slots for array in (slot.k, slot.v)]
    return [*held, *(array for ranges in before for part in ranges for array in _arrays(part))]


def _reads_of(before: Sequence[Sequence[Range]], slots: Sequence[KvSlot]) -> StepReads | None:
    numbers: dict[KernelViews, int] = {}
    parts: list[Range] = []

    def number_of(part: Range) -> int:
        number = numbers.setdefault(part.where, len(parts))
        if number == len(parts):
            parts.append(part)
        return number

    rows = []
    for ranges, slot in zip(before, slots, strict=True):
        reads = tuple([(number_of(part), part.start, part.end) for part in ranges])
        rows.append(RowReads(reads, number_of(RawRange(slot.k, slot.v, 0, slot.size, slot.addresses))))
    if not have_one_dtype(parts):
        return None
    tables = tables_of(tuple([_kind(part) for part in parts]), tuple(rows), slots[0].k.shape[1])
    return StepReads(
        tables, cuda_addresses.collect([addresses_of(part) for part in parts], segments_length(len(parts)))
    )


def _kind(part: Range) -> SegmentForm:
    if isinstance(part, RawRange):
        return raw_kind(part.k.shape[2])
    turn = rotation_of(part.k)
    return SegmentForm(
        *(bits_of(part.k), bits_of(part.v), part.k.num_tokens, (part.k.mean_runs, part.v.mean_runs)),
        offset=part.k.position % GROUP_TOKENS,
        rotation=(turn.num_pairs, turn.first, int(turn.is_interleaved)) if turn else (0, 0, 0),
    )


def _arrays(part: Range) -> list[mx.array]:
    return [part.k, part.v] if isinstance(part, RawRange) else part.packed.get(part.arrays)


def addresses_of(part: Range) -> mx.array:
    places = RAW_PLACES if isinstance(part, RawRange) else PLANES_PLACES
    return part.where.get(lambda: cuda_addresses.take(_arrays(part), places))


def fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Whether `attend_step` takes queries [rows, heads, 1, dim] for the tokens k and v [rows, kv_heads, 1, dim]."""
    group, dims = q.shape[1] // k.shape[1], (k.shape[3], v.shape[3])
    return (
        q.dtype == k.dtype == v.dtype
        and k.dtype in RAW_DTYPES
        and all(dim in FUSED_DIMS for dim in dims)
        and group <= 4 * tiles_for(group, max(dims))
    )


def attend_step(
    q: mx.array,  # [rows, heads, 1, k_dim]
    k: mx.array,  # [rows, kv_heads, 1, k_dim], the new token of each row
    v: mx.array,
    launch: StepLaunch,
    scale: float,
    sinks: mx.array | None = None,  # [heads]
) -> mx.array:
    """Write K and V into their slots and attend over all tokens -> [rows, heads, 1, v_dim]."""
    num_rows, kv_heads, _, k_dim = k.shape
    group, v_dim, num_blocks = q.shape[1] // kv_heads, v.shape[3], launch.num_blocks
    tiles = tiles_for(group, max(k_dim, v_dim))
    out, _, _ = cuda_kernels.step(blocks_for(tiles, max(k_dim, v_dim))).run(
        (("BF", k.dtype == mx.bfloat16), ("K_DIM", k_dim), ("V_DIM", v_dim), ("TILES", tiles)),
        inputs=[
            *(q, k, v, launch.places, launch.pieces, launch.kinds, launch.addresses, launch.counters),
            scalar(0.0) if sinks is None else sinks.astype(mx.float32),
            _facts(scale, sinks is not None, k_dim, v_dim),
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


class StepLaunch(NamedTuple):
    """Inputs of a launch beside the tokens."""

    places: mx.array
    pieces: mx.array
    kinds: mx.array
    addresses: mx.array
    counters: mx.array  # uint32 [rows * kv_heads], 0 between launches; only for launches that do not overlap
    num_blocks: int


def launch_of(reads: StepReads, slots: Sequence[KvSlot], counters: mx.array) -> StepLaunch:
    heads = slots[0].k.shape[1]
    places = places_of(reads.tables, [SlotPlace(slot.at, slot.num_tokens) for slot in slots], heads)
    return StepLaunch(
        *(places.table, reads.tables.pieces, reads.tables.kinds, reads.addresses, counters),
        num_blocks=places.num_blocks,
    )


@lru_cache(maxsize=64)
def _facts(scale: float, has_sinks: bool, k_dim: int, v_dim: int) -> mx.array:
    numbers = np.concatenate([[scale, float(has_sinks)], sign_values(k_dim), sign_values(v_dim)])
    return mx.array(numbers.astype(np.float32))


@cache
def compile_all(dtype: mx.Dtype, kv_heads: int, group: int, k_dim: int, v_dim: int) -> None:
    """Compile the kernels that steps of such heads run, seconds for each, so that no later step waits for one."""
    if backends.active() != "cuda":
        return
    heads = kv_heads * group
    q, k, v = (mx.zeros((1, n, 1, dim), dtype) for n, dim in ((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim)))
    slot = KvSlot(mx.zeros_like(k), mx.zeros_like(v), 1, 0, 1, KernelViews())
    reads = LatestReads().reads([[]], [slot])
    assert reads is not None
    mx.eval(attend_step(q, k, v, launch_of(reads, [slot], mx.zeros((kv_heads,), mx.uint32)), 1.0))
    # The kernel that takes the addresses of planes.
    array = mx.zeros((1,), mx.uint32)
    mx.eval(cuda_addresses.take([array] * len(PLANES_PLACES), PLANES_PLACES))
