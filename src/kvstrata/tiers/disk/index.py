"""The view of the files in memory: records by key and by root, pending deletes, LRU order."""

from __future__ import annotations

import heapq
import itertools
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kvstrata.tiers.block import BASE, BlockId


@dataclass(frozen=True, slots=True)
class BlockRow:
    id: BlockId
    parent: bytes
    root: bytes
    start: int
    num_tokens: int
    disk_bytes: int
    last_use: float
    uses: int
    created: float
    tally: str = "{}"  # JSON: bytes by label. Equal blocks have the same text


@dataclass(frozen=True, slots=True)
class RowTotals:
    num_blocks: int
    num_tokens: int
    disk_bytes: int
    labels: Mapping[str, int]  # bytes by label


class Sums:
    """Running totals of rows that come and go."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._num_tokens = 0
        self.disk_bytes = 0
        self._labels: Counter[str] = Counter()

    def count(self, row: BlockRow, labels: Mapping[str, int], sign: int) -> None:
        if row.id.part == BASE:
            self._num_blocks += sign
            self._num_tokens += sign * row.num_tokens
        self.disk_bytes += sign * row.disk_bytes
        for label, nbytes in labels.items():
            self._labels[label] += sign * nbytes

    def count_all(self, others: Sums, sign: int) -> None:
        self._num_blocks += sign * others._num_blocks
        self._num_tokens += sign * others._num_tokens
        self.disk_bytes += sign * others.disk_bytes
        for label, nbytes in others._labels.items():
            self._labels[label] += sign * nbytes

    def totals(self) -> RowTotals:
        labels = {label: nbytes for label, nbytes in self._labels.items() if nbytes}
        return RowTotals(self._num_blocks, self._num_tokens, self.disk_bytes, labels)


def write_tally(labels: Mapping[str, int]) -> str:
    return json.dumps(labels, sort_keys=True, separators=(",", ":"))


def read_tally(text: str) -> Counter[str]:
    """Parse bytes by label; nothing where the text is invalid: at worst a block is written again."""
    try:
        return Counter({str(label): int(nbytes) for label, nbytes in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        return Counter()


class Section:
    """The rows of one root."""

    def __init__(self) -> None:
        self.rows: dict[BlockId, BlockRow] = {}
        self.lengths: dict[bytes, dict[int, int]] = {}  # by parent: the number of its bases by length in tokens
        self.num_extras: dict[bytes, int] = {}  # parts beside the base (checkpoints), by key
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
        """Whether a part can be removed: a base after its children and its other parts, another part at any time."""
        return block.part != BASE or (block.key not in self.lengths and block.key not in self.num_extras)

    def knows(self, key: bytes) -> bool:
        return BlockId(key) in self.rows or key in self.num_extras or key in self.lengths


class Sections:
    def __init__(self) -> None:
        self._by_root: dict[bytes, Section] = {}
        # By key and by parent. A key is chained from its root, so it never belongs to another root.
        self._root_of: dict[bytes, bytes] = {}
        self._sums = Sums()  # of all rows: each write and each eviction reads them
        self._labels: dict[str, Mapping[str, int]] = {}  # parsed tallies: most rows share a few texts

    def of(self, key: bytes) -> Section | None:
        """Return the section that has a block, or blocks after it."""
        root = self._root_of.get(key)
        return None if root is None else self._by_root.get(root)

    def row(self, block: BlockId) -> BlockRow | None:
        section = self.of(block.key)
        return None if section is None else section.rows.get(block)

    def rows(self, under: bytes) -> list[BlockRow]:
        return [row for root in self.roots(under) for row in self._by_root[root].rows.values()]

    def roots(self, under: bytes) -> list[bytes]:
        """Return the roots with the prefix `under`."""
        if under in self._by_root:
            return [under]
        return [root for root in self._by_root if root.startswith(under)]

    def totals(self, under: bytes) -> RowTotals:
        if under:
            return self._sum(self.roots(under))
        return self._sums.totals()

    def contradicts(self, row: BlockRow) -> bool:
        """Whether another row has one of these keys under another root."""
        return any(self._root_of.get(key, row.root) != row.root for key in (row.id.key, row.parent))

    def add(self, row: BlockRow) -> None:
        """Add a row in place of one with the same id."""
        if row.id.key in self._root_of:
            self.discard(row.id)
        section = self._by_root.get(row.root)
        if section is None:
            section = self._by_root[row.root] = Section()
        section.rows[row.id] = row
        self._count(section, row, 1)
        self._root_of[row.id.key] = self._root_of[row.parent] = row.root

    def set_used(self, row: BlockRow) -> None:
        """Replace the row with the same id, which differs in its uses alone."""
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
        """Remove a root at once, whatever its number of rows; the caller calls `forget_keys` later."""
        section = self._by_root.pop(root)
        self._sums.count_all(section.sums, -1)
        return section

    def forget_keys(self, row: BlockRow) -> None:
        """Forget the root of a row's keys, unless another row still needs it."""
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


class RowIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sections = Sections()
        self._is_complete = False  # every file has its row
        self._hidden: set[bytes] = set()  # prefixes of roots that were cleared before that
        self.leaving = Leaving()

    # Queries.

    def row(self, block: BlockId) -> BlockRow | None:
        with self._lock:
            return self._sections.row(block)

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        """Return the lengths in tokens of the blocks after `parent`, the longest first."""
        with self._lock:
            section = self._sections.of(parent)
            return () if section is None else tuple(sorted(section.lengths.get(parent, ()), reverse=True))

    def num_after(self, parent: bytes) -> int:
        """Return the number of blocks that directly follow `parent`."""
        with self._lock:
            section = self._sections.of(parent)
            return 0 if section is None else sum(section.lengths.get(parent, {}).values())

    def is_leaf(self, block: BlockId) -> bool:
        """Whether a block is there and nothing depends on it."""
        with self._lock:
            section = self._sections.of(block.key)
            return section is not None and block in section.rows and section.is_leaf(block)

    def contradicts(self, row: BlockRow) -> bool:
        """Whether another row has one of these keys under another root: one of the two rows is wrong."""
        with self._lock:
            return self._sections.contradicts(row)

    def rows(self, under: bytes = b"") -> list[BlockRow]:
        """Return the rows under roots with the prefix `under`, in no order."""
        with self._lock:
            return self._sections.rows(under)

    def totals(self, under: bytes = b"") -> RowTotals:
        """Return the totals of rows under roots with the prefix `under`."""
        with self._lock:
            return self._sections.totals(under)

    # Additions. An addition cancels the pending delete of the same id.

    def add_if(self, row: BlockRow, is_wanted: Callable[[], bool]) -> bool:
        """Add a row; hide it and return False if it is unwanted. A thread that removes blocks declares them unwanted
        before it searches the index: it misses none."""
        with self._lock:
            self._add(row)
            if not is_wanted():
                self._hide(row.id)
                return False
            return True

    def add_found(self, rows: Iterable[BlockRow]) -> None:
        """Add rows of files that had none. Hide those of a root that was cleared meanwhile."""
        for row in rows:
            with self._lock:
                self._add(row)
                if row.root.startswith(tuple(self._hidden)):
                    self._hide(row.id)

    def begin_comparing(self) -> None:
        with self._lock:
            self._is_complete = False

    def finish_comparing(self) -> None:
        """Record that all files have their rows."""
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

    # Removals.

    def discard(self, blocks: Iterable[BlockId]) -> None:
        """Remove rows whose files are gone."""
        with self._lock:
            for block in blocks:
                self._sections.discard(block)

    def hide(self, blocks: Iterable[BlockId]) -> RowTotals:
        """Hide rows from now on, until their files are deleted. Return their totals."""
        sums = Sums()
        with self._lock:
            for block in blocks:
                row = self._hide(block)
                if row is not None:
                    sums.count(row, self._sections.labels_of(row), 1)
        return sums.totals()

    def hide_under(self, under: bytes) -> RowTotals:
        """Hide all rows under roots with a prefix. Files that could not be deleted before are tried again."""
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
        """Drop all rows, because they cannot be trusted. Cleared rows stay cleared."""
        with self._lock:
            self._sections = Sections()

    def left(self, rows: Iterable[BlockRow]) -> None:
        """Forget hidden rows whose files are gone."""
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


@dataclass(eq=False, slots=True)
class Group:
    """Rows that were hidden together."""

    rows: dict[BlockId, BlockRow]
    is_noted: bool = False  # the catalogue knows of these pending deletes


class Leaving:
    """Pending deletes: rows whose files are still there. An id is a file's name, so each has at most one row here."""

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
        """Cancel a pending delete: another file has the name now, or none has."""
        with self._lock:
            self._drop(block)

    def set_stuck(self, row: BlockRow) -> None:
        """Keep a row whose file could not be deleted: the bytes stay counted; `retry` queues the file again."""
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
        """Return the blocks that the catalogue does not know to be pending, and count them as noted."""
        with self._lock:
            blocks: list[BlockId] = []
            for group in self._groups:
                blocks += () if group.is_noted else group.rows
                group.is_noted = True
            return blocks

    def next_rows(self, count: int) -> list[BlockRow]:
        """Return some rows whose files are to be deleted, the last first; none if none are left."""
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


# Heap entries for each leaf, and some more, before outdated entries are swept out.
LARGEST_SHARE = 4

LARGEST_REST = 1024

Entry = tuple[float, int, int, BlockRow]


class Leaves(Protocol):
    """The queries of `Victims` about the current rows."""

    def row(self, block: BlockId) -> BlockRow | None: ...

    def is_leaf(self, block: BlockId) -> bool: ...

    def rows(self) -> list[BlockRow]: ...


class Victims:
    """The leaves in LRU order. Used by one thread at a time."""

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
        """Add the parents and bases of removed rows that are leaves now."""
        for row in rows:
            bases = (self._leaves.row(BlockId(key)) for key in (row.parent, row.id.key))
            self.added(base for base in bases if base is not None)

    def oldest(self, is_kept: Callable[[bytes], bool]) -> Generator[BlockRow, None, None]:
        """Yield leaves, least recently used first. The caller calls `removed` for each removed leaf before it asks for
        the next, and closes the generator when done: leaves that stay take their places again."""
        passed: dict[BlockId, BlockRow] = {}
        try:
            while self._heap:
                last_use, _, _, row = heapq.heappop(self._heap)
                current = self._leaves.row(row.id)
                if current is None or row.id in passed or not self._leaves.is_leaf(row.id):
                    continue
                if current.last_use != last_use:
                    heapq.heappush(self._heap, self._entry(current))  # it was used since
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
