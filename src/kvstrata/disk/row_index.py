"""Every row in memory: found, counted, and taken away at once. Knows no SQL and no files.

The engine's thread looks here and never at a disk. The lock is held for a few dictionary operations, whatever the
number of rows: clearing a root takes its section away whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvstrata.disk.leaving import Leaving
from kvstrata.disk.row import BlockRow, RowTotals, Sums
from kvstrata.disk.sections import Sections
from kvstrata.tier.block import BlockId


class RowIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections = Sections()
        self._is_complete = False  # every file has its row
        self._hidden: set[bytes] = set()  # cleared before that: what begins so
        self.leaving = Leaving()

    # Looking.

    def row(self, block: BlockId) -> BlockRow | None:
        with self._lock:
            return self._sections.row(block)

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        """How many tokens the blocks after `parent` have, the longest first."""
        with self._lock:
            section = self._sections.of(parent)
            return () if section is None else tuple(sorted(section.lengths.get(parent, ()), reverse=True))

    def num_after(self, parent: bytes) -> int:
        """How many blocks come right after it."""
        with self._lock:
            section = self._sections.of(parent)
            return 0 if section is None else sum(section.lengths.get(parent, {}).values())

    def is_leaf(self, block: BlockId) -> bool:
        """Whether it is there, and nothing hangs on it."""
        with self._lock:
            section = self._sections.of(block.key)
            return section is not None and block in section.rows and section.is_leaf(block)

    def contradicts(self, row: BlockRow) -> bool:
        """Whether another row says that one of its keys is of another root: one of them is wrong."""
        with self._lock:
            return self._sections.contradicts(row)

    def rows(self, under: bytes = b"") -> list[BlockRow]:
        """In no order."""
        with self._lock:
            return self._sections.rows(under)

    def totals(self, under: bytes = b"") -> RowTotals:
        """Of those whose roots begin so."""
        with self._lock:
            return self._sections.totals(under)

    # Coming. What was about to leave under the same id does not any more.

    def add_if(self, row: BlockRow, is_wanted: Callable[[], bool]) -> bool:
        """A thread that takes blocks away says first that they are not wanted, then looks here: it misses none."""
        with self._lock:
            self._add(row)
            if not is_wanted():
                self._hide(row.id)
                return False
            return True

    def add_found(self, rows: Iterable[BlockRow]) -> None:
        """Files that had no row. Those of a root that was cleared meanwhile leave."""
        for row in rows:
            with self._lock:
                self._add(row)
                if row.root.startswith(tuple(self._hidden)):
                    self._hide(row.id)

    def begin_comparing(self) -> None:
        with self._lock:
            self._is_complete = False

    def finish_comparing(self) -> None:
        """No more will be found."""
        with self._lock:
            self._is_complete = True
            self._hidden.clear()

    def touch(self, uses: Mapping[BlockId, tuple[int, float]]) -> None:
        for block, (count, when) in uses.items():
            with self._lock:
                row = self._sections.row(block)
                if row is not None:
                    used = replace(row, uses=row.uses + count, last_use=max(row.last_use, when))
                    self._sections.set_used(used)

    # Going.

    def discard(self, blocks: Iterable[BlockId]) -> None:
        """Their files are gone."""
        with self._lock:
            for block in blocks:
                self._sections.discard(block)

    def hide(self, blocks: Iterable[BlockId]) -> RowTotals:
        """Not here any more from now on. Tells what leaves."""
        sums = Sums()
        with self._lock:
            for block in blocks:
                row = self._hide(block)
                if row is not None:
                    sums.count(row, self._sections.labels_of(row), 1)
        return sums.totals()

    def hide_under(self, under: bytes) -> RowTotals:
        """All whose roots begin so. What could not be deleted before is tried again."""
        sums = Sums()
        self.leaving.retry()
        with self._lock:
            if not self._is_complete:
                self._hidden.add(under)
            for root in self._sections.roots(under):
                section = self._sections.pop(root)
                self.leaving.take(section.rows, section.sums.disk_bytes)
                sums.count_all(section.sums, 1)
        return sums.totals()

    def forget_all(self) -> None:
        """They cannot be believed. What was cleared stays so."""
        with self._lock:
            self._sections = Sections()

    def left(self, rows: Iterable[BlockRow]) -> None:
        """The files of rows that were hidden are gone."""
        for row in rows:
            self.leaving.stay(row.id)
            with self._lock:
                self._sections.forget_keys(row)

    def _add(self, row: BlockRow) -> None:
        self._sections.add(row)
        self.leaving.stay(row.id)

    def _hide(self, block: BlockId) -> BlockRow | None:
        row = self._sections.discard(block)
        if row is not None:
            self.leaving.take({block: row}, row.disk_bytes)
        return row
