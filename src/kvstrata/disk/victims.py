"""Who goes first: the least recently used, leaves before what they hang on. Decides; deletes nothing.

A heap that is kept up as rows come and go, so the next victim costs the same whatever the number of rows. It may hold
rows that are gone, that were used since or that others hang on by now: those are met and sorted out on the way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Protocol

from kvstrata.disk.row import BlockRow
from kvstrata.tier.block import BlockId

# Entries for each row that is there, and some, before those that are out of date are swept out.
LARGEST_SHARE = 4
LARGEST_REST = 1024

Entry = tuple[float, int, int, BlockRow]


class Leaves(Protocol):
    """What this asks of the rows that there are, at every moment."""

    def row(self, block: BlockId) -> BlockRow | None: ...

    def is_leaf(self, block: BlockId) -> bool: ...

    def rows(self) -> list[BlockRow]: ...


class Victims:
    """Used by one thread at a time."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self._serial = itertools.count()
        self._heap = [self._entry(row) for row in leaves.rows() if leaves.is_leaf(row.id)]
        heapq.heapify(self._heap)
        self._sweep_at = self._limit(len(self._heap))

    def added(self, rows: Iterable[BlockRow]) -> None:
        for row in rows:
            if self._leaves.is_leaf(row.id):
                heapq.heappush(self._heap, self._entry(row))
        self._sweep()

    def removed(self, rows: Iterable[BlockRow]) -> None:
        """What they hung on may be a leaf now."""
        for row in rows:
            bases = (self._leaves.row(BlockId(key)) for key in (row.parent, row.id.key))
            self.added(base for base in bases if base is not None)

    def oldest(self, is_kept: Callable[[bytes], bool]) -> Generator[BlockRow, None, None]:
        """The caller says `removed` of each that it removes before it asks for the next. Close this when done: what was
        passed over takes its place again."""
        passed: dict[BlockId, BlockRow] = {}
        try:
            while self._heap:
                last_use, _, _, row = heapq.heappop(self._heap)
                current = self._leaves.row(row.id)
                if current is None or row.id in passed or not self._leaves.is_leaf(row.id):
                    continue
                if current.last_use != last_use:
                    heapq.heappush(self._heap, self._entry(current))  # used since
                    continue
                passed[row.id] = current
                if not is_kept(row.id.key):
                    yield current
        finally:
            self.added(row for row in passed.values() if self._leaves.row(row.id) is not None)

    def _entry(self, row: BlockRow) -> Entry:
        return row.last_use, -row.start, next(self._serial), row

    def _sweep(self) -> None:
        if len(self._heap) > self._sweep_at:
            rows = [self._leaves.row(block) for block in {entry[-1].id for entry in self._heap}]
            self._heap = [self._entry(row) for row in rows if row is not None and self._leaves.is_leaf(row.id)]
            heapq.heapify(self._heap)
            self._sweep_at = self._limit(len(self._heap))

    @staticmethod
    def _limit(num_leaves: int) -> int:
        return LARGEST_SHARE * num_leaves + LARGEST_REST
