"""One new token for each row on CUDA: written and attended to in one launch for each layer.

The launch writes into the rows' buffers without MLX's knowledge. Whatever reads them later is issued after it on the
same stream, and what a step reads of another sequence's buffer was written before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

from kvstrata.codecs import cuda_step
from kvstrata.codecs.cuda_check import step_works
from kvstrata.layers.buffers import Buffer
from kvstrata.layers.kinds import Layout
from kvstrata.layers.parts import Part


class Slot(NamedTuple):
    """Where a row's new token goes, and what the row reads beside that buffer."""

    buffer: Buffer
    at: int
    num_tokens: int  # of the buffer, with the new one
    before: tuple[Part, ...]


class Row(Protocol):
    """One layer of one sequence."""

    def slot_for_next(self, k: mx.array, v: mx.array) -> Slot: ...

    def parts(self) -> tuple[Part, ...]: ...


def fits(keys: mx.array, values: mx.array) -> bool:
    return keys.shape[2] == 1 and keys.dtype == values.dtype and step_works(keys.dtype, keys.shape[3], values.shape[3])


def kernels(layout: Layout) -> str:
    """Whose loops attention runs on, for people to read."""
    kinds = {(spec.dtype, spec.k_dim, spec.v_dim) for spec in layout.flat() if spec.kind in ("full", "window")}
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
        self._slots: list[Slot] = []
        self._reads: cuda_step.Rows | None = None
        self._is_written = False

    def takes(self, queries: mx.array) -> bool:
        if not cuda_step.fits(queries, self._keys, self._values):
            return False
        if self._reads is None:
            self._reads = _rows(self._taken())
        return self._reads is not None

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        assert self._reads is not None, "ask `takes` first"
        self._is_written = True
        counters = self._counters.of(self._keys.shape[0] * self._keys.shape[1])
        return cuda_step.attend_step(queries, self._keys, self._values, self._reads, counters, scale, sinks)

    def settle(self) -> Sequence[Row]:
        """Write the new tokens; for whoever reads the rows in another way."""
        if not self._is_written:
            for row, slot in enumerate(self._taken()):
                slot.buffer.put(slot.at, self._keys[row : row + 1], self._values[row : row + 1])
            self._is_written = True
        return self._rows

    def _taken(self) -> list[Slot]:
        if not self._slots:
            self._slots = [row.slot_for_next(self._keys, self._values) for row in self._rows]
        return self._slots


def _rows(slots: Sequence[Slot]) -> cuda_step.Rows | None:
    """None: the kernel cannot read all of it."""
    before = [[part.fused() for part in slot.before] for slot in slots]
    if not all(part.fits for ranges in before for part in ranges):
        return None
    rows = cuda_step.rows_of(before, [_placed(slot) for slot in slots])
    return rows if rows.fits else None


def _placed(slot: Slot) -> cuda_step.Slot:
    k, v = slot.buffer.k, slot.buffer.v
    assert k is not None
    assert v is not None
    return cuda_step.Slot(k, v, slot.at, slot.num_tokens)
