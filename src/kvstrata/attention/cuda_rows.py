"""One new token for each row on CUDA: written and attended to in one launch for each layer.

The launch writes into the rows' buffers without MLX's knowledge: neither its graph nor the one that CUDA gets of an
evaluation has an edge to their later readers. So every launch of a pass is issued when the pass ends (`end_pass`
hands `Step.launched` up), and what comes after it comes after it on the same stream. What a step reads of another
sequence's buffer was written before the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import mlx.core as mx

from kvstrata.attention import cuda_step
from kvstrata.attention.cuda_check import step_works
from kvstrata.attention.cuda_step import Slot
from kvstrata.attention.parts import Part

HeadKind = tuple[mx.Dtype, int, int]  # dtype, and the sizes of a key and of a value


class Row(Protocol):
    """One layer of one sequence."""

    def before_slot(self) -> tuple[Part, ...]: ...

    def slot_for_next(self, k: mx.array, v: mx.array) -> Slot: ...

    def put_last(self, k: mx.array, v: mx.array) -> None: ...

    def parts(self) -> tuple[Part, ...]: ...


def fits(keys: mx.array, values: mx.array) -> bool:
    return keys.shape[2] == 1 and keys.dtype == values.dtype and step_works(keys.dtype, keys.shape[3], values.shape[3])


def kernels(kinds: Collection[HeadKind]) -> str:
    """Whose loops attention runs on, for people to read."""
    if kinds and all(step_works(*kind) for kind in kinds):
        return "own (CUDA) for decode steps of up to 8 queries for each KV head (4 beyond 128 dims), MLX for the rest"
    return "MLX, by sequence: it has no step of a whole batch for these layers, or it did not work here (see the log)"


class Counters:
    """What blocks of a launch count themselves with: of one layer, whose launches wait for each other."""

    def __init__(self) -> None:
        self._counters: mx.array | None = None

    def of(self, size: int) -> mx.array:
        if self._counters is None or self._counters.size != size:
            self._counters = mx.zeros((size,), mx.uint32)
        return self._counters


class Step:
    """New tokens that are not written yet. Stands for the keys and for the values, as `Parts` does."""

    def __init__(self, rows: Sequence[Row], keys: mx.array, values: mx.array, counters: Counters) -> None:
        self._rows = rows
        self._keys = keys  # [rows, kv_heads, 1, k_dim]
        self._values = values
        self._counters = counters
        self._reads: cuda_step.Rows | None = None
        self._has_slots = False
        self._is_written = False
        self.launched: list[mx.array] = []  # once these are computed, the new tokens are written

    def takes(self, queries: mx.array) -> bool:
        if not cuda_step.fits(queries, self._keys, self._values):
            return False
        if not self._has_slots:
            self._take_slots()
        return self._reads is not None

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        assert self._reads is not None, "ask `takes` first"
        self._is_written = True
        num_rows, kv_heads, _, k_dim = self._keys.shape
        group, v_dim = queries.shape[1] // kv_heads, self._values.shape[3]
        cuda_step.compile_all(queries.dtype, kv_heads, group, k_dim, v_dim, sinks is not None)
        counters = self._counters.of(num_rows * kv_heads)
        out = cuda_step.attend_step(queries, self._keys, self._values, self._reads, counters, scale, sinks)
        self.launched.append(out)
        return out

    def write(self) -> Sequence[Row]:
        """Write the new tokens; for readers of the rows that take another path."""
        mx.eval(self.launched)
        if not self._is_written:
            if not self._has_slots:
                self._take_slots()
            self._reads = None  # it holds the buffers, and they are written in place
            for i, row in enumerate(self._rows):
                row.put_last(self._keys[i : i + 1], self._values[i : i + 1])
            self._is_written = True
        return self._rows

    def _take_slots(self) -> None:
        """Make room for the new tokens, and find out whether the kernel can read all that the rows read."""
        before = [[part.cuda_range() for part in row.before_slot()] for row in self._rows]
        slots = [row.slot_for_next(self._keys, self._values) for row in self._rows]
        self._has_slots = True
        if all(part.fits for ranges in before for part in ranges):
            rows = cuda_step.rows_of(before, slots)
            self._reads = rows if rows.fits else None
