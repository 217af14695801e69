"""Rows by root: found by id or by parent, and counted. A data structure; knows no threads, SQL or files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvstrata.disk.row import BlockRow, RowTotals, Sums, read_tally
from kvstrata.tier.block import BASE, BlockId


class Section:
    """The rows of one root."""

    def __init__(self) -> None:
        self.rows: dict[BlockId, BlockRow] = {}
        self.lengths: dict[bytes, dict[int, int]] = {}  # of the bases after a parent: how many have so many tokens
        self.num_extras: dict[bytes, int] = {}  # parts beside the base (marks), by key
        self.sums = Sums()

    def count(self, row: BlockRow, labels: Mapping[str, int], sign: int) -> None:
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


class Sections:
    def __init__(self) -> None:
        self._by_root: dict[bytes, Section] = {}
        # Of keys and of parents. A key is chained from its root, so it never belongs to another.
        self._root_of: dict[bytes, bytes] = {}
        self._sums = Sums()  # of all rows: each write and each eviction asks for them
        self._labels: dict[str, Mapping[str, int]] = {}  # what tallies say: most rows have one of a few

    def of(self, key: bytes) -> Section | None:
        """The one that has a block, or blocks after it."""
        root = self._root_of.get(key)
        return None if root is None else self._by_root.get(root)

    def row(self, block: BlockId) -> BlockRow | None:
        section = self.of(block.key)
        return None if section is None else section.rows.get(block)

    def rows(self, under: bytes) -> list[BlockRow]:
        return [row for root in self.roots(under) for row in self._by_root[root].rows.values()]

    def roots(self, under: bytes) -> list[bytes]:
        """Those that begin so."""
        if under in self._by_root:
            return [under]
        return [root for root in self._by_root if root.startswith(under)]

    def totals(self, under: bytes) -> RowTotals:
        if under:
            return self._sum(self.roots(under))
        return self._sums.totals()

    def contradicts(self, row: BlockRow) -> bool:
        """Whether another row says that one of its keys is of another root."""
        return any(self._root_of.get(key, row.root) != row.root for key in (row.id.key, row.parent))

    def add(self, row: BlockRow) -> None:
        """In place of the one with the same id."""
        if row.id.key in self._root_of:
            self.discard(row.id)
        section = self._by_root.get(row.root)
        if section is None:
            section = self._by_root[row.root] = Section()
        section.rows[row.id] = row
        self._count(section, row, 1)
        self._root_of[row.id.key] = self._root_of[row.parent] = row.root

    def set_used(self, row: BlockRow) -> None:
        """In place of the one with the same id, which differs in its uses alone."""
        self._by_root[row.root].rows[row.id] = row

    def discard(self, block: BlockId) -> BlockRow | None:
        row = self.row(block)
        if row is not None:
            section = self._by_root[row.root]
            del section.rows[block]
            self._count(section, row, -1)
            if not section.rows:
                del self._by_root[row.root]
            self.forget_keys(row)
        return row

    def pop(self, root: bytes) -> Section:
        """All of a root, whatever the number of rows; `forget_keys` is for later."""
        section = self._by_root.pop(root)
        self._sums.count_all(section.sums, -1)
        return section

    def forget_keys(self, row: BlockRow) -> None:
        """Whose they are, unless a row still needs it."""
        section = self._by_root.get(row.root)
        for key in (row.id.key, row.parent):
            if section is None or not section.knows(key):
                self._root_of.pop(key, None)

    def labels_of(self, row: BlockRow) -> Mapping[str, int]:
        labels = self._labels.get(row.tally)
        if labels is None:
            labels = self._labels[row.tally] = read_tally(row.tally)
        return labels

    def _sum(self, roots: Iterable[bytes]) -> RowTotals:
        sums = Sums()
        for root in roots:
            sums.count_all(self._by_root[root].sums, 1)
        return sums.totals()

    def _count(self, section: Section, row: BlockRow, sign: int) -> None:
        labels = self.labels_of(row)
        section.count(row, labels, sign)
        self._sums.count(row, labels, sign)


T = TypeVar("T")


def _count(counts: dict[T, int], name: T, number: int) -> None:
    counts[name] = counts.get(name, 0) + number
    if not counts[name]:
        del counts[name]
