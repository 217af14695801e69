"""Decode steps of a batch on CUDA: a single launch for each layer writes the new token of every row and attends.

The kernel finds KV through a table of addresses, so one kernel serves launches of any number of rows and segments, of
any bits. The arrays behind the addresses (`held_by`) are handed to MLX with the pass, and MLX keeps them until the pass
has ended.

The launch writes into the rows' buffers without MLX's knowledge: neither MLX's graph nor the CUDA graph of an
evaluation has an edge to later readers of the buffers. Therefore every launch of a pass is issued when the pass ends
(`end_pass` returns `CudaStep.launched`), and later work follows on the same stream. Tokens that a step reads from
another sequence's buffer were written before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kvstrata.attention.cuda.ranges import RAW_DTYPES, EncodedRange, Range, RawRange, have_one_dtype, range_of
from kvstrata.attention.cuda.tables import (
    RowReads,
    SegmentForm,
    StepTables,
    places_of,
    raw_kind,
    segment_table_length,
    tables_of,
)
from kvstrata.attention.segments import DecodeRow, KernelViews, KvSlot, SlotPlace
from kvstrata.codecs.backends import runtime
from kvstrata.codecs.cuda import addresses as cuda_addresses
from kvstrata.codecs.cuda import kernels as cuda_kernels
from kvstrata.codecs.cuda.addresses import PLANES_PLACES, RAW_PLACES
from kvstrata.codecs.cuda.planes import FUSED_DIMS, THREADS, bits_of, blocks_for, rotation_of, scalar, tiles_for
from kvstrata.codecs.hadamard import sign_values
from kvstrata.codecs.mean_runs import GROUP_TOKENS

# Whether the kernel passed its trial for this dtype and these sizes of a key and of a value.
Works = Callable[[mx.Dtype, int, int], bool]


@dataclass(frozen=True, eq=False)
class StepReads:
    """Tables and addresses of KV that the rows of a layer read. Keeps no KV alive: KV may change between steps."""

    tables: StepTables
    addresses: mx.array  # uint64 [ranges, 12]


class LaunchState:
    """State of one layer between its launches, which do not overlap: counters of blocks, and the latest reads."""

    def __init__(self) -> None:
        self._counters: mx.array | None = None
        self._key: Hashable = None
        self._reads: StepReads | None = None

    def counters(self, size: int) -> mx.array:
        """uint32 [size], 0 between launches: the blocks of a launch count themselves by it."""
        if self._counters is None or self._counters.size != size:
            self._counters = mx.zeros((size,), mx.uint32)
        return self._counters

    def reads(self, before: Sequence[Sequence[Range]], slots: Sequence[KvSlot]) -> StepReads | None:
        """Return the reads, made anew when the rows read other tokens or addresses. `before`: each row's ranges but for
        its slot's buffer; all fit. None: dtypes differ."""
        key = (
            tuple([tuple([(kv.views.version, kv.start, kv.end) for kv in r]) for r in before]),
            tuple([slot.views.version for slot in slots]),
        )
        if key != self._key:
            self._reads = _reads_of(before, slots)
            self._key = key
        return self._reads


def held_by(before: Sequence[Sequence[Range]], slots: Sequence[KvSlot]) -> list[mx.array]:
    """Return the arrays that the addresses point to."""
    held = [array for slot in slots for array in (slot.k, slot.v)]
    return [*held, *(array for ranges in before for kv in ranges for array in _arrays(kv))]


def _reads_of(before: Sequence[Sequence[Range]], slots: Sequence[KvSlot]) -> StepReads | None:
    numbers: dict[KernelViews, int] = {}
    distinct: list[Range] = []

    def number_of(kv: Range) -> int:
        number = numbers.setdefault(kv.views, len(distinct))
        if number == len(distinct):
            distinct.append(kv)
        return number

    rows = []
    for ranges, slot in zip(before, slots, strict=True):
        reads = tuple([(number_of(kv), kv.start, kv.end) for kv in ranges])
        rows.append(RowReads(reads, number_of(RawRange(slot.k, slot.v, 0, slot.size, slot.views))))
    if not have_one_dtype(distinct):
        return None
    tables = tables_of(tuple([_kind(kv) for kv in distinct]), tuple(rows), slots[0].k.shape[1])
    return StepReads(
        tables, cuda_addresses.collect([addresses_of(kv) for kv in distinct], segment_table_length(len(distinct)))
    )


def _kind(kv: Range) -> SegmentForm:
    if isinstance(kv, RawRange):
        return raw_kind(kv.k.shape[2])
    rotation = rotation_of(kv.k)
    return SegmentForm(
        *(bits_of(kv.k), bits_of(kv.v), kv.k.num_tokens, (kv.k.mean_runs, kv.v.mean_runs)),
        offset=kv.k.position % GROUP_TOKENS,
        rotation=(rotation.num_pairs, rotation.first, int(rotation.is_interleaved)) if rotation else (0, 0, 0),
    )


def _arrays(kv: Range) -> list[mx.array]:
    """Return the arrays behind the addresses, contiguous: MLX makes no copies of arrays that it does not see read."""
    return [kv.k, kv.v] if isinstance(kv, RawRange) else kv.views.get(_contiguous, kv)


def _contiguous(kv: EncodedRange) -> list[mx.array]:
    return [mx.contiguous(array) for array in kv.arrays]


def addresses_of(kv: Range) -> mx.array:
    """uint64 [12]: the addresses of a range's arrays."""
    return kv.views.get(_take_addresses, kv)


def _take_addresses(kv: Range) -> mx.array:
    return cuda_addresses.take(_arrays(kv), RAW_PLACES if isinstance(kv, RawRange) else PLANES_PLACES)


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
    if runtime().backend != "cuda":
        return
    heads = kv_heads * group
    q, k, v = (mx.zeros((1, n, 1, dim), dtype) for n, dim in ((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim)))
    slot = KvSlot(mx.zeros_like(k), mx.zeros_like(v), 1, 0, 1, KernelViews())
    reads = LaunchState().reads([[]], [slot])
    assert reads is not None
    mx.eval(attend_step(q, k, v, launch_of(reads, [slot], mx.zeros((kv_heads,), mx.uint32)), 1.0))
    # The kernel that takes the addresses of planes.
    array = mx.zeros((1,), mx.uint32)
    mx.eval(cuda_addresses.take([array] * len(PLANES_PLACES), PLANES_PLACES))


def slots_of(rows: Sequence[DecodeRow]) -> list[KvSlot]:
    """Return the slot of each row's next token, and count the tokens."""
    slots = []
    for row in rows:
        slots.append(row.next_slot())
        row.count_next()
    return slots


class CudaStep:
    """New tokens that are not written yet. Replaces both keys and values, as `SegmentedKV` does."""

    def __init__(self, rows: Sequence[DecodeRow], keys: mx.array, values: mx.array, state: LaunchState) -> None:
        self._rows = rows
        self._keys = keys  # [rows, kv_heads, 1, k_dim]
        self._values = values
        self._state = state
        self._before: list[list[Range]] = []
        self._slots: list[KvSlot] = []
        self._reads: StepReads | None = None
        self._is_written = False
        self._launches: list[mx.array] = []

    @property
    def launched(self) -> list[mx.array]:
        """Arrays whose evaluation writes the new tokens. Arrays that the launches read through addresses are among
        them, so that MLX keeps these until the launches have ended."""
        return [*self._launches, *held_by(self._before, self._slots)] if self._launches else []

    def takes(self, queries: mx.array) -> bool:
        if not fits(queries, self._keys, self._values):
            return False
        if not self._slots:
            self._take_slots()
        return self._reads is not None

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        assert self._reads is not None, "ask `takes` first"
        self._is_written = True
        num_rows, kv_heads, _, k_dim = self._keys.shape
        compile_all(queries.dtype, kv_heads, queries.shape[1] // kv_heads, k_dim, self._values.shape[3])
        launch = launch_of(self._reads, self._slots, self._state.counters(num_rows * kv_heads))
        out = attend_step(queries, self._keys, self._values, launch, scale, sinks)
        self._launches.append(out)
        return out

    def write(self) -> Sequence[DecodeRow]:
        """Write the new tokens; for readers of the rows that take another path."""
        mx.eval(self._launches)
        if not self._is_written:
            if not self._slots:
                self._take_slots()
            for i, row in enumerate(self._rows):
                row.put_last(self._keys[i : i + 1], self._values[i : i + 1])
            self._is_written = True
        return self._rows

    def _take_slots(self) -> None:
        """Take slots for the new tokens, and find out whether the kernel can read all segments of the rows."""
        self._before = [[range_of(segment) for segment in row.segments_before()] for row in self._rows]
        self._slots = slots_of(self._rows)
        if all(kv.fits for ranges in self._before for kv in ranges):
            self._reads = self._state.reads(self._before, self._slots)


class UntraceableRead(Exception):
    """The model uses keys in a way that a compiled step does not support."""


class PreparedStep:
    """New tokens whose launch was prepared before the model was called. Replaces both keys and values."""

    def __init__(self, keys: mx.array, values: mx.array, launch: StepLaunch) -> None:
        self._keys = keys
        self._values = values
        self._launch = launch

    @property
    def launched(self) -> Sequence[mx.array]:
        return ()

    def takes(self, queries: mx.array) -> bool:
        return fits(queries, self._keys, self._values)

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        return attend_step(queries, self._keys, self._values, self._launch, scale, sinks)

    def write(self) -> Sequence[DecodeRow]:
        raise UntraceableRead("a mask, or queries that the kernel does not take")


class PlannedReads(NamedTuple):
    """Inputs of a launch over one layer of all rows, found before the model is called. No token is counted."""

    reads: StepReads
    counters: mx.array
    kv_heads: int
    held: list[mx.array]


def plan_reads(rows: Sequence[DecodeRow], state: LaunchState, works: Works) -> PlannedReads | None:
    """Find the inputs of a launch over one layer of all rows. None: a launch cannot take them."""
    before = [[range_of(segment) for segment in row.segments_before()] for row in rows]
    if not all(kv.fits for ranges in before for kv in ranges):
        return None
    slots = [row.next_slot() for row in rows]
    k, v = slots[0][:2]
    kv_heads = k.shape[1]
    if k.dtype != v.dtype or not works(k.dtype, k.shape[3], v.shape[3]):
        return None
    reads = state.reads(before, slots)
    if reads is None:
        return None
    return PlannedReads(reads, state.counters(len(rows) * kv_heads), kv_heads, held_by(before, slots))
