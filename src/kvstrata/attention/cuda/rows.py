"""Decode rows on CUDA: new tokens, one for each row, are written and attended to in one launch for each layer.

The launch writes into the rows' buffers without MLX's knowledge: neither MLX's graph nor the CUDA graph of an
evaluation has an edge to later readers of the buffers. Therefore every launch of a pass is issued when the pass ends
(`end_pass` returns `Step.launched`), and later work follows on the same stream. Tokens that a step reads from another
sequence's buffer were written before the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from kvstrata.attention.cuda import step as cuda_step
from kvstrata.attention.cuda.ranges import Range
from kvstrata.attention.cuda.step import KvSlot
from kvstrata.attention.cuda.trials import step_works
from kvstrata.attention.segments import Segment

HeadKind = tuple[mx.Dtype, int, int]  # dtype, and the sizes of a key and of a value


class CudaRow(Protocol):
    """A layer of a sequence, as a row of a batch."""

    def segments_before(self) -> tuple[Segment, ...]: ...

    def next_slot(self) -> KvSlot:
        """Provide the slot of one more token, not counted yet."""
        ...

    def count_next(self) -> None:
        """Count the token of the slot: the caller writes it there, or has it written by `put_last`."""
        ...

    def put_last(self, k: mx.array, v: mx.array) -> None: ...

    def segments(self) -> tuple[Segment, ...]: ...


def takes_rows(keys: mx.array, values: mx.array) -> bool:
    return keys.shape[2] == 1 and keys.dtype == values.dtype and step_works(keys.dtype, keys.shape[3], values.shape[3])


def slots_of(rows: Sequence[CudaRow]) -> list[KvSlot]:
    """Return the slot of each row's next token, and count the tokens."""
    slots = []
    for row in rows:
        slots.append(row.next_slot())
        row.count_next()
    return slots


def kernels(kinds: Collection[HeadKind]) -> str:
    """Describe for people which kernels compute attention."""
    if kinds and all(step_works(*kind) for kind in kinds):
        return "own (CUDA) for decode steps of up to 8 queries for each KV head (4 beyond 128 dims), MLX for the rest"
    return "MLX, by sequence: it has no step of a whole batch for these layers, or it did not work here (see the log)"


class LaunchState:
    """Counters of one layer, by which the blocks of a launch count themselves: launches of a layer do not overlap."""

    def __init__(self) -> None:
        self._counters: mx.array | None = None
        self.latest = cuda_step.LatestReads()

    def counters(self, size: int) -> mx.array:
        if self._counters is None or self._counters.size != size:
            self._counters = mx.zeros((size,), mx.uint32)
        return self._counters


class CudaStep:
    """New tokens that are not written yet. Replaces both keys and values, as `Parts` does."""

    def __init__(self, rows: Sequence[CudaRow], keys: mx.array, values: mx.array, counters: LaunchState) -> None:
        self._rows = rows
        self._keys = keys  # [rows, kv_heads, 1, k_dim]
        self._values = values
        self._counters = counters
        self._before: list[list[Range]] = []
        self._slots: list[KvSlot] = []
        self._reads: cuda_step.StepReads | None = None
        self._is_written = False
        self._launches: list[mx.array] = []

    @property
    def launched(self) -> list[mx.array]:
        """Arrays whose evaluation writes the new tokens. Arrays that the launches read through addresses are among
        them, so that MLX keeps these until the launches have ended."""
        return [*self._launches, *cuda_step.held_by(self._before, self._slots)] if self._launches else []

    def takes(self, queries: mx.array) -> bool:
        if not cuda_step.fits(queries, self._keys, self._values):
            return False
        if not self._slots:
            self._take_slots()
        return self._reads is not None

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        assert self._reads is not None, "ask `takes` first"
        self._is_written = True
        num_rows, kv_heads, _, k_dim = self._keys.shape
        cuda_step.compile_all(queries.dtype, kv_heads, queries.shape[1] // kv_heads, k_dim, self._values.shape[3])
        launch = cuda_step.launch_of(self._reads, self._slots, self._counters.counters(num_rows * kv_heads))
        out = cuda_step.attend_step(queries, self._keys, self._values, launch, scale, sinks)
        self._launches.append(out)
        return out

    def write(self) -> Sequence[CudaRow]:
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
        """Take slots for the new tokens, and find out whether the kernel can read all parts of the rows."""
        self._before = [[part.cuda_range() for part in row.segments_before()] for row in self._rows]
        self._slots = slots_of(self._rows)
        if all(part.fits for ranges in self._before for part in ranges):
            self._reads = self._counters.latest.reads(self._before, self._slots)


class UntraceableRead(Exception):
    """The model uses keys in a way that a compiled step does not support."""


class PreparedStep:
    """New tokens whose launch was prepared before the model was called. Replaces both keys and values."""

    def __init__(self, keys: mx.array, values: mx.array, launch: cuda_step.StepLaunch) -> None:
        self._keys = keys
        self._values = values
        self._launch = launch

    def takes(self, queries: mx.array) -> bool:
        return cuda_step.fits(queries, self._keys, self._values)

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        return cuda_step.attend_step(queries, self._keys, self._values, self._launch, scale, sinks)

    def write(self) -> Sequence[CudaRow]:
        raise UntraceableRead("a mask, or queries that the kernel does not take")


class PlannedReads(NamedTuple):
    """Inputs of a launch over one layer of all rows, found before the model is called. No token is counted."""

    reads: cuda_step.StepReads
    counters: mx.array
    kv_heads: int
    held: list[mx.array]


def plan_reads(rows: Sequence[CudaRow], counters: LaunchState) -> PlannedReads | None:
    """Find the inputs of a launch over one layer of all rows. None: a launch cannot take them."""
    before = [[part.cuda_range() for part in row.segments_before()] for row in rows]
    if not all(part.fits for ranges in before for part in ranges):
        return None
    slots = [row.next_slot() for row in rows]
    k, v = slots[0][:2]
    kv_heads = k.shape[1]
    if k.dtype != v.dtype or not step_works(k.dtype, k.shape[3], v.shape[3]):
        return None
    reads = counters.latest.reads(before, slots)
    if reads is None:
        return None
    return PlannedReads(reads, counters.counters(len(rows) * kv_heads), kv_heads, cuda_step.held_by(before, slots))
