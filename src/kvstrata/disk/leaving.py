"""Blocks that were taken away and whose files are still there: not found any more, and counted until they are gone.

A caller that clears is answered at once; the tier's thread deletes the files afterwards. Knows no files.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvstrata.disk.row import BlockRow
from kvstrata.tier.block import BlockId


@dataclass(eq=False, slots=True)
class Group:
    """Rows that were taken away together."""

    rows: dict[BlockId, BlockRow]
    is_noted: bool = False  # the catalogue knows that they leave


class Leaving:
    """Of one id there is at most one: it is a file's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: deque[Group] = deque()
        self._stuck: dict[BlockId, BlockRow] = {}
        self._bytes = 0

    def take(self, rows: dict[BlockId, BlockRow], nbytes: int, *, is_noted: bool = False) -> None:
        with self._lock:
            if len(rows) == 1 and self._groups and self._groups[-1].is_noted == is_noted:
                self._groups[-1].rows.update(rows)
            elif rows:
                self._groups.append(Group(rows, is_noted))
            self._bytes += nbytes

    def stay(self, block: BlockId) -> None:
        """Another file has its name now, or none has."""
        with self._lock:
            self._drop(block)

    def set_stuck(self, row: BlockRow) -> None:
        """Its file could not be deleted: it stays counted, and is tried again when others leave."""
        with self._lock:
            self._drop(row.id)
            self._stuck[row.id] = row
            self._bytes += row.disk_bytes

    def retry(self) -> None:
        with self._lock:
            if self._stuck:
                self._groups.append(Group(self._stuck, is_noted=True))
                self._stuck = {}

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._bytes

    def row(self, block: BlockId) -> BlockRow | None:
        with self._lock:
            found = (rows[block] for rows in self._all() if block in rows)
            return next(found, None)

    def rows(self) -> list[BlockRow]:
        found: list[BlockRow] = []
        with self._lock:
            for rows in self._all():
                found += rows.values()
        return found

    def note(self) -> list[BlockId]:
        """Those that the catalogue is to be told of, now."""
        with self._lock:
            blocks: list[BlockId] = []
            for group in self._groups:
                blocks += () if group.is_noted else group.rows
                group.is_noted = True
            return blocks

    def next_rows(self, count: int) -> list[BlockRow]:
        """Some of those whose files are to be deleted, the last first; none where none are left."""
        with self._lock:
            while self._groups and not self._groups[0].rows:
                self._groups.popleft()
            rows = self._groups[0].rows if self._groups else {}
            return [row for row, _ in zip(reversed(rows.values()), range(count), strict=False)]

    def _all(self) -> Iterable[dict[BlockId, BlockRow]]:
        return (self._stuck, *(group.rows for group in self._groups))

    def _drop(self, block: BlockId) -> None:
        if not self._groups and not self._stuck:
            return
        for rows in self._all():
            row = rows.pop(block, None)
            self._bytes -= 0 if row is None else row.disk_bytes
