"""Real bytes of the cache on the volume, and the deletes that bound them.

Deletes are of blocks that were removed, exceed the limit, or were not used in time. They run under
`DiskBlockStore.changes`. A file is deleted before its record, so that a file that cannot be deleted stays counted; a
marker is written before the first delete of a clear, so that a crash does not bring cleared blocks back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from kvstrata.tiers.block import BlockId
from kvstrata.tiers.disk.errors import DropReason, RemovalReason, fault_of
from kvstrata.tiers.disk.filesystem import unlink_if_there
from kvstrata.tiers.disk.folder import CacheFolder, MarkerFiles, Quarantine
from kvstrata.tiers.disk.index import BlockIndex, BlockRecord
from kvstrata.tiers.interface import BlockEvent, RemovalCause, TierCounters
from kvstrata.tiers.options import DiskOptions

log = logging.getLogger(__name__)

PAGE_BYTES = 4096

# The folder itself, its four subfolders, the lock.
FIXED_BYTES = 6 * PAGE_BYTES

# Bytes that a publication can add beside the block: pages of the catalogue and its log, a folder's growth.
MARGIN_BYTES = 256 << 10

# Undeletable files in one eviction. More are a fault of the volume, and not of some files.
NUM_UNDELETABLE = 16

# Files deleted between two writes: some tens of milliseconds.
NUM_DELETED_AT_ONCE = 64


def _nothing_needed(_key: bytes) -> bool:
    return False


class BlockDropped(Exception):
    """A block is not published, for `reason`. Raised and caught inside disk/."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class SpaceAccount:
    """Bytes that the cache takes on the volume: blocks by their records, all else measured on the tier's threads.

    Changed under `DiskBlockStore.changes`, read from any thread: `disk_bytes` does not access the disk."""

    def __init__(self, folder: CacheFolder, quarantine: Quarantine, markers: MarkerFiles) -> None:
        self._folder = folder
        self._quarantine = quarantine
        self._markers = markers
        self._shard_bytes: dict[str, int] = {}
        self._catalogue_bytes = 0
        self._stray_bytes = 0
        self.has_strays = False
        self.measure_all()

    def measure_all(self) -> None:
        self._shard_bytes = {shard.name: self._disk_bytes(shard) for shard in self._folder.shards()}
        self.measure_catalogue()

    def measure_shard(self, shard: Path) -> None:
        """Measure a folder of blocks again: it grows with the names in it."""
        self._shard_bytes[shard.name] = self._disk_bytes(shard)

    def measure_catalogue(self) -> None:
        """Measure the catalogue again, after each change of it."""
        self._catalogue_bytes = sum(map(self._disk_bytes, self._folder.catalogue_paths()))

    def measure_strays(self, paths: Iterable[Path]) -> None:
        """Measure files with names of blocks that cannot be read, or cannot be deleted."""
        paths = list(paths)
        self.has_strays = bool(paths)
        self._stray_bytes = sum(map(self._disk_bytes, paths))

    def disk_bytes(self, block_bytes: int) -> int:
        """Return all bytes on the volume. `block_bytes`: of all files that have a record."""
        beside = self._quarantine.disk_bytes + self._markers.disk_bytes + self._catalogue_bytes + self._stray_bytes
        return block_bytes + FIXED_BYTES + beside + sum(list(self._shard_bytes.values()))

    def _disk_bytes(self, path: Path) -> int:
        try:
            return self._folder.files.status(path).disk_bytes
        except OSError:
            return 0


class Space:
    """Frees space on the volume. All methods but the properties run under `DiskBlockStore.changes`."""

    def __init__(
        self,
        folder: CacheFolder,
        index: BlockIndex,
        quarantine: Quarantine,
        markers: MarkerFiles,
        counters: TierCounters,
        options: DiskOptions,
        is_pinned: Callable[[bytes], bool],
        save: Callable[[], None],
    ) -> None:
        """`save` copies changes of the index to the catalogue, whose size the limit counts."""
        self.account = SpaceAccount(folder, quarantine, markers)
        self._folder = folder
        self._index = index
        self._markers = markers
        self._counters = counters
        self._limit_bytes = options.limit_bytes
        self._reserve_bytes = options.reserve_bytes
        self._is_pinned = is_pinned
        self._save = save
        self._undeletable: set[BlockId] = set()  # blocks that were logged
        self._shards_to_sync: set[Path] = set()  # of files that were deleted since the markers were written
        self._has_logged_markers = False
        self._measure_volume()

    @property
    def allowed_bytes(self) -> int:
        """The most that the cache can grow to: its limit, or less where the volume is too full. As of the start or the
        last write: the disk is not accessed."""
        return min(self._limit_bytes, self._volume_bytes)

    @property
    def disk_bytes(self) -> int:
        return self.account.disk_bytes(self._index.totals().disk_bytes + self._index.pending.num_bytes)

    def free_space(self, nbytes: int, is_needed: Callable[[bytes], bool], *, may_evict: bool) -> None:
        """Free space for a file, or raise BlockDropped. Keys that `is_needed` names must stay; so must pinned ones."""
        self.enforce_limit(is_needed)
        needed = _whole_pages(nbytes) + MARGIN_BYTES
        while max(self._excess(needed)) > 0 and self.delete_pending():
            pass
        over_limit, over_reserve = self._excess(needed)
        evictable_bytes = self._index.totals().disk_bytes if may_evict else 0
        if over_limit > evictable_bytes:
            raise BlockDropped(DropReason.NO_ROOM)
        if over_reserve > min(needed, evictable_bytes):
            # Other programs fill the volume. Deleting blocks for new ones would not bring the reserve back.
            raise BlockDropped(DropReason.RESERVE)
        over_both = max(over_reserve - max(over_limit, 0), 0)
        for excess_bytes, reason in ((over_limit, RemovalReason.LIMIT), (over_both, RemovalReason.RESERVE)):
            if excess_bytes > 0 and self.evict(excess_bytes, is_needed, reason) < excess_bytes:
                raise BlockDropped(DropReason.NO_ROOM)

    def enforce_limit(self, is_needed: Callable[[bytes], bool] = _nothing_needed) -> None:
        """Delete until the limit holds, also after it was lowered and whatever the volume has free."""
        while (over_limit := self.disk_bytes - self._limit_bytes) > 0:
            if not self.delete_pending() and not self.evict(over_limit, is_needed, RemovalReason.LIMIT):
                break
            self._save()  # the catalogue may grow while records leave it
        self._measure_volume()

    def delete_pending(self) -> bool:
        """Delete some files of removed blocks. False: there was nothing left to delete."""
        self.write_markers()
        records = self._index.pending.next_records(NUM_DELETED_AT_ONCE)
        if records:
            self._delete(records)
        elif self._index.is_complete and not len(self._index.pending) and not self.account.has_strays:
            self._delete_markers()
        return bool(records)

    def write_markers(self) -> None:
        """Write markers of new clears. A fault does not keep the files: their deletes may be what a full volume needs,
        and the next call tries again."""
        markers = self._index.new_markers()
        try:
            self._markers.save(markers)
            self._index.markers_written(markers)
        except OSError as error:
            self._counters.add(BlockEvent.FAILED, fault_of(error))
            if not self._has_logged_markers:
                self._has_logged_markers = True
                log.warning("Cleared blocks may come back if this process is killed before it deletes them: %s", error)

    def _delete_markers(self) -> None:
        """Delete the markers once the deletes that they stand for are on the disk."""
        if not len(self._markers):
            self._shards_to_sync.clear()
            return
        for shard in self._shards_to_sync:
            try:
                self._folder.files.sync_folder(shard)
            except FileNotFoundError:
                continue
        self._shards_to_sync.clear()
        self._markers.delete_all()

    def _delete(self, records: Sequence[BlockRecord]) -> None:
        stuck: dict[BlockId, OSError] = {}
        deleted: list[BlockRecord] = []
        for record in records:
            try:
                self._unlink(record)
                deleted.append(record)
            except OSError as error:
                stuck[record.id] = error
                self._index.pending.set_stuck(record)
        self._count_evicted(deleted, RemovalReason.CLEARED)
        self._report_undeletable(stuck, "and stays until others are cleared")
        self._index.files_deleted(deleted)

    def delete_expired(self, oldest: float, is_needed: Callable[[bytes], bool]) -> float:
        """Delete blocks that no request used since `oldest`. Return when the next one was last used; infinite without a
        next. Raises OSError if a block cannot be deleted."""
        with closing(self._index.leaves.oldest(self._is_kept(is_needed, {}))) as leaves:
            for record in leaves:
                if record.last_use > oldest:
                    return record.last_use
                self._unlink(record)
                self._index.forget([record], RemovalCause.EVICTED)
                self._count_evicted([record], RemovalReason.EXPIRED)
        return math.inf

    def evict(self, nbytes: int, is_needed: Callable[[bytes], bool], reason: RemovalReason) -> int:
        """Evict the least recently used leaves and return the bytes freed: fewer if no more can go. OSError if
        undeletable files are why."""
        freed_bytes = 0
        stuck: dict[BlockId, OSError] = {}
        with closing(self._index.leaves.oldest(self._is_kept(is_needed, stuck))) as leaves:
            for record in leaves:
                try:
                    self._unlink(record)
                except OSError as error:
                    stuck[record.id] = error
                    if len(stuck) >= NUM_UNDELETABLE:
                        break
                    continue
                self._index.forget([record], RemovalCause.EVICTED)
                self._count_evicted([record], reason)
                freed_bytes += record.disk_bytes
                if freed_bytes >= nbytes:
                    break
        if stuck and freed_bytes < nbytes:
            raise next(iter(stuck.values()))
        self._report_undeletable(stuck, "and others go in its place")
        return freed_bytes

    def _unlink(self, record: BlockRecord) -> None:
        path = self._folder.path(record.id)
        unlink_if_there(self._folder.files, path)
        self._shards_to_sync.add(path.parent)

    def _measure_volume(self) -> int:
        """Measure the volume. Return its free bytes."""
        free_bytes = self._folder.files.free_bytes(self._folder.directory)
        self._volume_bytes = self.disk_bytes + max(0, free_bytes - self._reserve_bytes)
        return free_bytes

    def _excess(self, needed: int) -> tuple[int, int]:
        """Return by how much `needed` more bytes would exceed the limit, and cut into the reserve."""
        free_bytes = self._measure_volume()
        return self.disk_bytes + needed - self._limit_bytes, self._reserve_bytes + needed - free_bytes

    def _is_kept(self, is_needed: Callable[[bytes], bool], stuck: Mapping[BlockId, OSError]) -> Callable[[bytes], bool]:
        return lambda key: is_needed(key) or self._is_pinned(key) or any(block.key == key for block in stuck)

    def _count_evicted(self, records: Iterable[BlockRecord], reason: RemovalReason) -> None:
        for record in records:
            self._counters.add(BlockEvent.EVICTED, reason, nbytes=record.disk_bytes)

    def _report_undeletable(self, stuck: Mapping[BlockId, OSError], what_then: str) -> None:
        for block, error in stuck.items():
            self._counters.add(BlockEvent.FAILED, fault_of(error))
            if block not in self._undeletable:
                self._undeletable.add(block)
                log.warning("A block of the disk cache cannot be deleted, %s: %s", what_then, error)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
