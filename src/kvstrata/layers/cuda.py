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
from kvstrata.layers.parts import Part, RawPart


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
        return "own (CUDA) for decode steps, MLX for prefill"
    return "MLX, by sequence: it has no step of a whole batch for these layers, or it did not work here (see the log)"


class Tables:
    """What the launches of some rows have in common, kept until a row reads or writes something else."""

    def __init__(self) -> None:
        self._slots: Sequence[Slot] = ()
        self._rows: cuda_step.Rows | None = None

    def of(self, slots: Sequence[Slot]) -> cuda_step.Rows | None:
        """None: the kernel cannot read all of it."""
        if len(slots) != len(self._slots) or not all(map(_is_same, slots, self._slots)):
            self._slots, self._rows = slots, _rows(slots)
        return self._rows


class Step:
    """New tokens that are not written yet. Stands for the keys and for the values, as `Parts` does."""

    def __init__(self, rows: Sequence[Row], keys: mx.array, values: mx.array, tables: Tables) -> None:
        self._rows = rows
        self._keys = keys  # [rows, kv_heads, 1, k_dim]
        self._values = values
        self._tables = tables
        self._slots: list[Slot] = []
        self._is_written = False

    def takes(self, queries: mx.array) -> bool:
        return cuda_step.fits(queries, self._keys, self._values) and self._tables.of(self._taken()) is not None

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        slots = self._taken()
        rows = self._tables.of(slots)
        assert rows is not None, "ask `takes` first"
        self._is_written = True
        return cuda_step.attend_step(
            queries, self._keys, self._values, rows, [_placed(slot) for slot in slots], scale, sinks
        )

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


def _is_same(a: Slot, b: Slot) -> bool:
    return a.buffer is b.buffer and len(a.before) == len(b.before) and all(map(_is_same_part, a.before, b.before))


def _is_same_part(a: Part, b: Part) -> bool:
    if isinstance(a, RawPart) and isinstance(b, RawPart):
        return a.k_buffer is b.k_buffer and (a.start, a.num_tokens) == (b.start, b.num_tokens)
    return a is b


def _rows(slots: Sequence[Slot]) -> cuda_step.Rows | None:
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
