"""The view of the files in memory: records by key and by root, pending deletes, LRU order.

The files are the authority. `DiskBlockStore` changes a file first and the view after it; the catalogue is a copy of the
view. Queries and removals run on any thread and take the index's lock for dictionary operations only. `add`, `forget`,
`files_deleted` and the LRU order belong to the thread that holds `DiskBlockStore.changes`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kvstrata.tiers.block import BASE, BlockId
from kvstrata.tiers.interface import BlockRemoval, RemovalCause, RemovalLog

# Seconds between a clear and the next record. Times of files keep at least microseconds.
TIME_STEP_S = 1e-6


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block's file, as its header and the volume describe it."""

    id: BlockId
    parent: bytes
    root: bytes
    start: int
    num_tokens: int
    disk_bytes: int
    last_use: float
    uses: int
    created: float
    labels: str = "{}"  # JSON: bytes by label. Equal blocks have the same text


@dataclass(frozen=True, slots=True)
class ClearMarker:
    """A removal that a caller was promised: blocks under roots with a prefix, or some blocks by id.

    It holds for files of `before` or older; a block that is put again later is another one.
    """

    before: float
    root_prefix: bytes | None = None
    blocks: frozenset[BlockId] = frozenset()

    def covers(self, record: BlockRecord) -> bool:
        if record.created > self.before:
            return False
        has_prefix = self.root_prefix is not None and record.root.startswith(self.root_prefix)
        return has_prefix or record.id in self.blocks


@dataclass(frozen=True, slots=True)
class IndexTotals:
    num_blocks: int
    num_tokens: int
    disk_bytes: int
    labels: Mapping[str, int]  # bytes by label


class RunningTotals:
    """Totals of records that come and go."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._num_tokens = 0
        self.disk_bytes = 0
        self._labels: Counter[str] = Counter()

    def count(self, record: BlockRecord, labels: Mapping[str, int], sign: int) -> None:
        if record.id.part == BASE:
            self._num_blocks += sign
            self._num_tokens += sign * record.num_tokens
        self.disk_bytes += sign * record.disk_bytes
        for label, nbytes in labels.items():
            self._labels[label] += sign * nbytes

    def count_all(self, others: RunningTotals, sign: int) -> None:
        self._num_blocks += sign * others._num_blocks
        self._num_tokens += sign * others._num_tokens
        self.disk_bytes += sign * others.disk_bytes
        for label, nbytes in others._labels.items():
            self._labels[label] += sign * nbytes

    def totals(self) -> IndexTotals:
        labels = {label: nbytes for label, nbytes in self._labels.items() if nbytes}
        return IndexTotals(self._num_blocks, self._num_tokens, self.disk_bytes, labels)


def write_labels(labels: Mapping[str, int]) -> str:
    return json.dumps(labels, sort_keys=True, separators=(",", ":"))


def read_labels(text: str) -> Counter[str]:
    """Parse bytes by label; nothing where the text is invalid: at worst a block is written again."""
    try:
        return Counter({str(label): int(nbytes) for label, nbytes in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        return Counter()


class RootRecords:
    """The records of one root."""

    def __init__(self) -> None:
        self.records: dict[BlockId, BlockRecord] = {}
        self.lengths: dict[bytes, dict[int, int]] = {}  # by parent: the number of its bases by length in tokens
        self.num_extras: dict[bytes, int] = {}  # parts beside the base (checkpoints), by key
        self.totals = RunningTotals()

    def count(self, record: BlockRecord, labels: Mapping[str, int], sign: int) -> None:
        self.totals.count(record, labels, sign)
        if record.id.part != BASE:
            _count(self.num_extras, record.id.key, sign)
            return
        lengths = self.lengths.setdefault(record.parent, {})
        _count(lengths, record.num_tokens, sign)
        if not lengths:
            del self.lengths[record.parent]

    def is_leaf(self, block: BlockId) -> bool:
        """Whether a part can be removed: a base after its children and its other parts, another part at any time."""
        return block.part != BASE or (block.key not in self.lengths and block.key not in self.num_extras)

    def knows(self, key: bytes) -> bool:
        return BlockId(key) in self.records or key in self.num_extras or key in self.lengths


class RootTable:
    """The records by root, and the root of each key."""

    def __init__(self) -> None:
        self._by_root: dict[bytes, RootRecords] = {}
        # By key and by parent. A key is chained from its root, so it never belongs to another root.
        self._root_of: dict[bytes, bytes] = {}
        self._totals = RunningTotals()  # of all records: each write and each eviction reads them
        self._labels: dict[str, Mapping[str, int]] = {}  # parsed labels: most records share a few texts

    @property
    def num_keys(self) -> int:
        return len(self._root_of)

    def root_with(self, key: bytes) -> RootRecords | None:
        """Return the root that has a block, or blocks after it."""
        root = self._root_of.get(key)
        return None if root is None else self._by_root.get(root)

    def get(self, block: BlockId) -> BlockRecord | None:
        root = self.root_with(block.key)
        return None if root is None else root.records.get(block)

    def records(self, prefix: bytes) -> list[BlockRecord]:
        return [record for root in self.roots(prefix) for record in self._by_root[root].records.values()]

    def roots(self, prefix: bytes) -> list[bytes]:
        if prefix in self._by_root:
            return [prefix]
        return [root for root in self._by_root if root.startswith(prefix)]

    def totals(self, prefix: bytes) -> IndexTotals:
        if not prefix:
            return self._totals.totals()
        totals = RunningTotals()
        for root in self.roots(prefix):
            totals.count_all(self._by_root[root].totals, 1)
        return totals.totals()

    def contradicts(self, record: BlockRecord) -> bool:
        return any(self._root_of.get(key, record.root) != record.root for key in (record.id.key, record.parent))

    def add(self, record: BlockRecord) -> None:
        """Add a record in place of one with the same id."""
        if record.id.key in self._root_of:
            self.discard(record.id)
        root = self._by_root.get(record.root)
        if root is None:
            root = self._by_root[record.root] = RootRecords()
        root.records[record.id] = record
        self._count(root, record, 1)
        self._root_of[record.id.key] = self._root_of[record.parent] = record.root

    def set_used(self, record: BlockRecord) -> None:
        """Replace the record with the same id, which differs in its uses alone."""
        self._by_root[record.root].records[record.id] = record

    def discard(self, block: BlockId) -> BlockRecord | None:
        record = self.get(block)
        if record is not None:
            root = self._by_root[record.root]
            del root.records[block]
            self._count(root, record, -1)
            if not root.records:
                del self._by_root[record.root]
            self.forget_keys(record)
        return record

    def pop(self, root: bytes) -> RootRecords:
        """Remove a root at once, whatever its number of records; the caller calls `forget_keys` later."""
        popped = self._by_root.pop(root)
        self._totals.count_all(popped.totals, -1)
        return popped

    def forget_keys(self, record: BlockRecord) -> None:
        """Forget the root of a record's keys, unless another record still needs it."""
        root = self._by_root.get(record.root)
        for key in (record.id.key, record.parent):
            if root is None or not root.knows(key):
                self._root_of.pop(key, None)

    def labels_of(self, record: BlockRecord) -> Mapping[str, int]:
        labels = self._labels.get(record.labels)
        if labels is None:
            labels = self._labels[record.labels] = read_labels(record.labels)
        return labels

    def _count(self, root: RootRecords, record: BlockRecord, sign: int) -> None:
        labels = self.labels_of(record)
        root.count(record, labels, sign)
        self._totals.count(record, labels, sign)


T = TypeVar("T")


def _count(counts: dict[T, int], name: T, number: int) -> None:
    counts[name] = counts.get(name, 0) + number
    if not counts[name]:
        del counts[name]


def _always() -> bool:
    return True


class BlockIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = RootTable()
        self._is_complete = False  # every file has its record
        self._markers: list[ClearMarker] = []  # of removals that hold for files without a record
        self._new_markers: list[ClearMarker] = []  # that are not in the folder yet
        self._last_clear = -math.inf
        self._newest_record = -math.inf
        self._unsaved: set[BlockId] = set()  # records that differ from their copy in the catalogue
        self.pending = PendingDeletes()
        self.leaves = LruLeaves(self)
        self.removals = RemovalLog()

    # Queries.

    def get(self, block: BlockId) -> BlockRecord | None:
        with self._lock:
            return self._table.get(block)

    def lengths_after(self, parent: bytes) -> tuple[int, ...]:
        """Return the lengths in tokens of the blocks after `parent`, the longest first."""
        with self._lock:
            root = self._table.root_with(parent)
            return () if root is None else tuple(sorted(root.lengths.get(parent, ()), reverse=True))

    def num_children(self, parent: bytes) -> int:
        with self._lock:
            root = self._table.root_with(parent)
            return 0 if root is None else sum(root.lengths.get(parent, {}).values())

    def is_leaf(self, block: BlockId) -> bool:
        """Whether a block is there and nothing depends on it."""
        with self._lock:
            root = self._table.root_with(block.key)
            return root is not None and block in root.records and root.is_leaf(block)

    def contradicts(self, record: BlockRecord) -> bool:
        """Whether another record has one of these keys under another root: one of the two is wrong."""
        with self._lock:
            return self._table.contradicts(record)

    def records(self, root_prefix: bytes = b"") -> list[BlockRecord]:
        """Return the records under roots with a prefix, in no order."""
        with self._lock:
            return self._table.records(root_prefix)

    def totals(self, root_prefix: bytes = b"") -> IndexTotals:
        with self._lock:
            return self._table.totals(root_prefix)

    @property
    def num_known_keys(self) -> int:
        """Keys and parents of records and of pending deletes: what a test of leaks counts."""
        with self._lock:
            return self._table.num_keys

    @property
    def is_complete(self) -> bool:
        """Whether every file has its record."""
        return self._is_complete

    # Additions. An addition cancels the pending delete of the same id.

    def time_of_record(self, now: float) -> float:
        """Return the time of a file that is written now: later than every clear, whatever the clock does."""
        with self._lock:
            created = max(now, self._last_clear + TIME_STEP_S)
            self._newest_record = max(self._newest_record, created)
            return created

    def add(self, record: BlockRecord, is_wanted: Callable[[], bool] = _always, *, is_saved: bool = False) -> bool:
        """Add the record of a file. False: the block was removed meanwhile, and the delete of its file is pending.

        A thread that removes blocks declares them unwanted before it searches the index, so it misses none.
        `is_saved`: the catalogue has this record.
        """
        with self._lock:
            self._table.add(record)
            self.pending.cancel(record.id)
            self._newest_record = max(self._newest_record, record.created)
            if not is_saved:
                self._unsaved.add(record.id)
            is_kept = is_wanted() and not any(marker.covers(record) for marker in self._markers)
            if not is_kept:
                self._hide(record.id)
        self.leaves.added([record])
        return is_kept

    def record_uses(self, blocks: Iterable[BlockId], now: float) -> None:
        """Count blocks as used. Absent blocks are ignored."""
        for block in blocks:
            with self._lock:
                record = self._table.get(block)
                if record is not None:
                    used = replace(record, uses=record.uses + 1, last_use=max(record.last_use, now))
                    self._table.set_used(used)
                    self._unsaved.add(block)

    def set_complete(self) -> None:
        """Record that every file has its record, so that no marker has blocks to hold back any more."""
        with self._lock:
            self._is_complete = True
            self._markers.clear()

    def set_incomplete(self) -> None:
        with self._lock:
            self._is_complete = False

    # Removals.

    def hide(self, blocks: Iterable[BlockId]) -> IndexTotals:
        """Hide records from now on, until their files are deleted. Return their totals."""
        with self._lock:
            return self._hide_all(blocks)

    def hide_durably(self, blocks: Iterable[BlockId], now: float) -> IndexTotals:
        """Hide records as `hide` does; a marker keeps the blocks away even if the process dies before their deletes."""
        blocks = frozenset(blocks)
        with self._lock:
            self._mark_cleared(now, blocks=blocks)
            return self._hide_all(blocks)

    def hide_roots(self, prefix: bytes, now: float) -> IndexTotals:
        """Hide all records under roots with a prefix, durably. Try files again that could not be deleted before."""
        totals = RunningTotals()
        self.pending.retry()
        with self._lock:
            self._mark_cleared(now, root_prefix=prefix)
            for root in self._table.roots(prefix):
                popped = self._table.pop(root)
                self.pending.add(popped.records, popped.totals.disk_bytes)
                totals.count_all(popped.totals, 1)
        return totals.totals()

    def forget(self, records: Iterable[BlockRecord], cause: RemovalCause) -> None:
        """Remove the records of files that are gone, and report the removals."""
        records = list(records)
        with self._lock:
            for record in records:
                self._table.discard(record.id)
                self._unsaved.add(record.id)
        self.leaves.removed(records)
        self.report_removed(records, cause)

    def files_deleted(self, records: Iterable[BlockRecord]) -> None:
        """Forget hidden records whose files are gone."""
        records = list(records)
        for record in records:
            self.pending.cancel(record.id)
            with self._lock:
                self._table.forget_keys(record)
                self._unsaved.add(record.id)
        self.leaves.removed(records)

    def report_removed(self, records: Iterable[BlockRecord], cause: RemovalCause) -> None:
        """Report records that left. Loss of a base with children makes the log incomplete."""
        records = list(records)
        self.removals.add(
            BlockRemoval(record.id, record.start, record.start + record.num_tokens, cause) for record in records
        )
        lost_bases = [record for record in records if cause is RemovalCause.LOST and record.id.part == BASE]
        if any(self.num_children(record.id.key) for record in lost_bases):
            self.removals.set_incomplete()

    def forget_all(self) -> None:
        """Drop all records, because they cannot be trusted. Removed blocks stay removed."""
        with self._lock:
            self._table = RootTable()
            self._is_complete = False
            self._unsaved.clear()
        self.leaves = LruLeaves(self)

    def forget_folder(self) -> None:
        """Drop all records and pending deletes, because the folder is another than before."""
        self.forget_all()
        with self._lock:
            self._markers.clear()
            self._new_markers = []
            self.pending = PendingDeletes()

    # Markers and the catalogue.

    def apply_markers(self, markers: Iterable[ClearMarker]) -> None:
        """Apply markers of the folder to records that are added later."""
        with self._lock:
            for marker in markers:
                self._markers.append(marker)
                self._last_clear = max(self._last_clear, marker.before)

    @property
    def has_new_markers(self) -> bool:
        """Whether a removal could still be undone by a crash. Takes no lock."""
        return bool(self._new_markers)

    def new_markers(self) -> list[ClearMarker]:
        """Return the markers to write. None are needed once every file that they cover is deleted."""
        with self._lock:
            if not len(self.pending) and self._is_complete:
                self._new_markers = []
            return list(self._new_markers)

    def markers_written(self, markers: Sequence[ClearMarker]) -> None:
        """Record that markers are in the folder."""
        with self._lock:
            self._new_markers = [marker for marker in self._new_markers if marker not in markers]

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    def take_unsaved(self, count: int) -> tuple[list[BlockRecord], list[BlockId]]:
        """Take some changes that the catalogue lacks: records to write, and ids to delete."""
        with self._lock:
            blocks = [self._unsaved.pop() for _ in range(min(count, len(self._unsaved)))]
            found = {block: self._table.get(block) for block in blocks}
        changed = [record for record in found.values() if record is not None]
        return changed, [block for block, record in found.items() if record is None]

    def mark_unsaved(self, blocks: Iterable[BlockId]) -> None:
        with self._lock:
            self._unsaved.update(blocks)

    def mark_all_unsaved(self) -> None:
        """Let the next save write every record: the catalogue is a new one."""
        self.mark_unsaved(record.id for record in self.records())

    def _mark_cleared(
        self, now: float, *, root_prefix: bytes | None = None, blocks: frozenset[BlockId] = frozenset()
    ) -> None:
        marker = ClearMarker(max(now, self._newest_record), root_prefix, blocks)
        self._last_clear = max(self._last_clear, marker.before)
        self._new_markers.append(marker)
        if not self._is_complete:
            self._markers.append(marker)

    def _hide_all(self, blocks: Iterable[BlockId]) -> IndexTotals:
        totals = RunningTotals()
        for block in blocks:
            record = self._hide(block)
            if record is not None:
                totals.count(record, self._table.labels_of(record), 1)
        return totals.totals()

    def _hide(self, block: BlockId) -> BlockRecord | None:
        record = self._table.discard(block)
        if record is not None:
            self.pending.add({block: record}, record.disk_bytes)
        return record


class PendingDeletes:
    """Hidden records whose files are still there. An id is a file's name, so each has at most one record here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: deque[dict[BlockId, BlockRecord]] = deque()  # records that were hidden together
        self._stuck: dict[BlockId, BlockRecord] = {}
        self._bytes = 0

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._all()))

    def add(self, records: dict[BlockId, BlockRecord], nbytes: int) -> None:
        """Add records that were hidden together, without a copy: a clear costs the same whatever their number."""
        with self._lock:
            if len(records) == 1 and self._groups:
                self._groups[-1].update(records)
            elif records:
                self._groups.append(records)
            self._bytes += nbytes

    def cancel(self, block: BlockId) -> None:
        """Cancel a pending delete: another file has the name now, or none has."""
        with self._lock:
            self._drop(block)

    def set_stuck(self, record: BlockRecord) -> None:
        """Keep a record whose file could not be deleted: the bytes stay counted; `retry` queues the file again."""
        with self._lock:
            self._drop(record.id)
            self._stuck[record.id] = record
            self._bytes += record.disk_bytes

    def retry(self) -> None:
        with self._lock:
            if self._stuck:
                self._groups.append(self._stuck)
                self._stuck = {}

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._bytes

    def get(self, block: BlockId) -> BlockRecord | None:
        with self._lock:
            found = (records[block] for records in self._all() if block in records)
            return next(found, None)

    def records(self) -> list[BlockRecord]:
        found: list[BlockRecord] = []
        with self._lock:
            for records in self._all():
                found += records.values()
        return found

    def next_records(self, count: int) -> list[BlockRecord]:
        """Return some records whose files are to be deleted, the last first; none if none are left."""
        with self._lock:
            while self._groups and not self._groups[0]:
                self._groups.popleft()
            records = self._groups[0] if self._groups else {}
            return [record for record, _ in zip(reversed(records.values()), range(count), strict=False)]

    def _all(self) -> Iterable[dict[BlockId, BlockRecord]]:
        return (self._stuck, *self._groups)

    def _drop(self, block: BlockId) -> None:
        if not self._groups and not self._stuck:
            return
        for records in self._all():
            record = records.pop(block, None)
            self._bytes -= 0 if record is None else record.disk_bytes


# Heap entries for each leaf, and some more, before outdated entries are swept out.
LARGEST_SHARE = 4

LARGEST_REST = 1024

HeapEntry = tuple[float, int, int, BlockRecord]


class LeafQueries(Protocol):
    """The queries of `LruLeaves` about the current records."""

    def get(self, block: BlockId) -> BlockRecord | None: ...

    def is_leaf(self, block: BlockId) -> bool: ...

    def records(self) -> list[BlockRecord]: ...


class LruLeaves:
    """The leaves in LRU order. Used by one thread at a time."""

    def __init__(self, index: LeafQueries) -> None:
        self._index = index
        self._serial = itertools.count()
        self._heap = [self._entry(record) for record in index.records() if index.is_leaf(record.id)]
        heapq.heapify(self._heap)
        self._sweep_at = self._limit(len(self._heap))

    def __len__(self) -> int:
        """The heap entries, outdated ones included."""
        return len(self._heap)

    def added(self, records: Iterable[BlockRecord]) -> None:
        for record in records:
            if self._index.is_leaf(record.id):
                heapq.heappush(self._heap, self._entry(record))
        self._sweep()

    def removed(self, records: Iterable[BlockRecord]) -> None:
        """Add the parents and bases of removed records that are leaves now."""
        for record in records:
            bases = (self._index.get(BlockId(key)) for key in (record.parent, record.id.key))
            self.added(base for base in bases if base is not None)

    def oldest(self, is_kept: Callable[[bytes], bool]) -> Generator[BlockRecord, None, None]:
        """Yield leaves, least recently used first. The caller calls `removed` for each removed leaf before it asks for
        the next, and closes the generator when done: leaves that stay take their places again."""
        passed: dict[BlockId, BlockRecord] = {}
        try:
            while self._heap:
                last_use, _, _, record = heapq.heappop(self._heap)
                current = self._index.get(record.id)
                if current is None or record.id in passed or not self._index.is_leaf(record.id):
                    continue
                if current.last_use != last_use:
                    heapq.heappush(self._heap, self._entry(current))  # it was used since
                    continue
                passed[record.id] = current
                if not is_kept(record.id.key):
                    yield current
        finally:
            self.added(record for record in passed.values() if self._index.get(record.id) is not None)

    def _entry(self, record: BlockRecord) -> HeapEntry:
        return record.last_use, -record.start, next(self._serial), record

    def _sweep(self) -> None:
        if len(self._heap) > self._sweep_at:
            records = [self._index.get(block) for block in {entry[-1].id for entry in self._heap}]
            self._heap = [
                self._entry(record) for record in records if record is not None and self._index.is_leaf(record.id)
            ]
            heapq.heapify(self._heap)
            self._sweep_at = self._limit(len(self._heap))

    @staticmethod
    def _limit(num_leaves: int) -> int:
        return LARGEST_SHARE * num_leaves + LARGEST_REST
