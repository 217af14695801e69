"""Every row in memory: found by id or by parent, counted, and taken away at once. Knows no SQL and no files.

The engine's thread looks here and never at a disk. The lock is held for a few dictionary operations, whatever the
number of rows: clearing a root takes its section away whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from kvstrata.disk.leaving import Leaving
from kvstrata.disk.row import Row, Sums, Totals, read_tally
from kvstrata.tier.block import BASE, BlockId


class Section:
    """The rows of one root."""

    def __init__(self) -> None:
        self.rows: dict[BlockId, Row] = {}
        self.lengths: dict[bytes, dict[int, int]] = {}  # of the bases after a parent: how many have so many tokens
        self.num_extras: dict[bytes, int] = {}  # parts beside the base, by key
        self.sums = Sums()

    def count(self, row: Row, labels: Mapping[str, int], sign: int) -> None:
        self.sums.count(row, labels, sign)
        if row.id.part != BASE:
            _count(self.num_extras, row.id.key, sign)
            return
        lengths = self.lengths.setdefault(row.parent, {})
        _count(lengths, row.num_tokens, sign)
        if not lengths:
            del self.lengths[row.parent]

    def is_leaf(self, block: BlockId) -> bool:
        """A base goes after its children and its other parts; another part can go at any time."""
        return block.part != BASE or (block.key not in self.lengths and block.key not in self.num_extras)

    def knows(self, key: bytes) -> bool:
        return BlockId(key) in self.rows or key in self.num_extras or key in self.lengths


class RowIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections: dict[bytes, Section] = {}
        # Of keys and of parents. A key is chained from its root, so it never belongs to another.
        self._root_of: dict[bytes, bytes] = {}
        self._totals: Totals | None = None  # None: to be summed up again
        self._labels: dict[str, Mapping[str, int]] = {}  # what tallies say: most rows have one of a few
        self._is_complete = False  # every file has its row
        self._hidden: set[bytes] = set()  # cleared before that: what begins so
        self.leaving = Leaving()

    # Looking.

    def row(self, block: BlockId) -> Row | None:
        with self._lock:
            return self._row(block)

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        """How many tokens the blocks after `parent` have, the longest first."""
        with self._lock:
            section = self._section_of(parent)
            return () if section is None else tuple(sorted(section.lengths.get(parent, ()), reverse=True))

    def is_leaf(self, block: BlockId) -> bool:
        """Whether it is there, and nothing hangs on it."""
        with self._lock:
            section = self._section_of(block.key)
            return section is not None and block in section.rows and section.is_leaf(block)

    def contradicts(self, row: Row) -> bool:
        """Whether another row says that one of its keys is of another root: one of them is wrong."""
        with self._lock:
            return any(self._root_of.get(key, row.root) != row.root for key in (row.id.key, row.parent))

    def rows(self, under: bytes = b"") -> list[Row]:
        """In no order."""
        rows: list[Row] = []
        with self._lock:
            for root in self._roots(under):
                rows += self._sections[root].rows.values()
        return rows

    def totals(self, under: bytes = b"") -> Totals:
        """Of those whose roots begin so."""
        with self._lock:
            if under:
                return self._sum(self._roots(under))
            if self._totals is None:
                self._totals = self._sum(self._sections)
            return self._totals

    # Coming.

    def add(self, rows: Iterable[Row]) -> None:
        """In place of those with the same id. What was about to leave under that id does not any more."""
        for row in rows:
            with self._lock:
                self._add(row)

    def add_if(self, row: Row, is_wanted: Callable[[], bool]) -> bool:
        """A thread that takes blocks away says first that they are not wanted, then looks here: it misses none."""
        with self._lock:
            self._add(row)
            if not is_wanted():
                self._hide(row.id)
                return False
            return True

    def add_found(self, rows: Iterable[Row]) -> None:
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
                row = self._row(block)
                if row is not None:
                    used = replace(row, uses=row.uses + count, last_use=max(row.last_use, when))
                    self._sections[row.root].rows[block] = used

    # Going.

    def discard(self, blocks: Iterable[BlockId]) -> list[Row]:
        """Their files are gone."""
        with self._lock:
            return [row for block in blocks if (row := self._discard(block)) is not None]

    def hide(self, blocks: Iterable[BlockId]) -> Totals:
        """Not here any more from now on. Tells what leaves."""
        sums = Sums()
        with self._lock:
            for block in blocks:
                row = self._hide(block)
                if row is not None:
                    sums.count(row, self._labels_of(row), 1)
        return sums.totals()

    def hide_under(self, under: bytes) -> Totals:
        """All whose roots begin so. What could not be deleted before is tried again."""
        sums = Sums()
        self.leaving.retry()
        with self._lock:
            if not self._is_complete:
                self._hidden.add(under)
            for root in self._roots(under):
                section = self._sections.pop(root)
                self._totals = None
                self.leaving.take(section.rows, section.sums.disk_bytes)
                sums.count_all(section.sums, 1)
        return sums.totals()

    def forget_all(self) -> None:
        """They cannot be believed. What was cleared stays so."""
        with self._lock:
            self._sections.clear()
            self._root_of.clear()
            self._totals = None

    def left(self, rows: Iterable[Row]) -> None:
        """The files of rows that were hidden are gone."""
        for row in rows:
            self.leaving.stay(row.id)
            with self._lock:
                self._forget_keys(row)

    # Under the lock.

    def _roots(self, under: bytes) -> list[bytes]:
        """With the lock held."""
        if under in self._sections:
            return [under]
        return [root for root in self._sections if root.startswith(under)]

    def _sum(self, roots: Iterable[bytes]) -> Totals:
        sums = Sums()
        for root in roots:
            sums.count_all(self._sections[root].sums, 1)
        return sums.totals()

    def _section_of(self, key: bytes) -> Section | None:
        root = self._root_of.get(key)
        return None if root is None else self._sections.get(root)

    def _row(self, block: BlockId) -> Row | None:
        section = self._section_of(block.key)
        return None if section is None else section.rows.get(block)

    def _add(self, row: Row) -> None:
        if row.id.key in self._root_of:
            self._discard(row.id)
        self.leaving.stay(row.id)
        section = self._sections.get(row.root)
        if section is None:
            section = self._sections[row.root] = Section()
        section.rows[row.id] = row
        self._count(section, row, 1)
        self._root_of[row.id.key] = self._root_of[row.parent] = row.root

    def _hide(self, block: BlockId) -> Row | None:
        row = self._discard(block)
        if row is not None:
            self.leaving.take({block: row}, row.disk_bytes)
        return row

    def _discard(self, block: BlockId) -> Row | None:
        row = self._row(block)
        if row is not None:
            section = self._sections[row.root]
            del section.rows[block]
            self._count(section, row, -1)
            if not section.rows:
                del self._sections[row.root]
            self._forget_keys(row)
        return row

    def _count(self, section: Section, row: Row, sign: int) -> None:
        self._totals = None
        section.count(row, self._labels_of(row), sign)

    def _labels_of(self, row: Row) -> Mapping[str, int]:
        labels = self._labels.get(row.tally)
        if labels is None:
            labels = self._labels[row.tally] = read_tally(row.tally)
        return labels

    def _forget_keys(self, row: Row) -> None:
        """Whose they are, unless a row still needs it."""
        section = self._sections.get(row.root)
        for key in (row.id.key, row.parent):
            if section is None or not section.knows(key):
                self._root_of.pop(key, None)


T = TypeVar("T")


def _count(counts: dict[T, int], name: T, number: int) -> None:
    counts[name] = counts.get(name, 0) + number
    if not counts[name]:
        del counts[name]
