"""Space that the cache takes on the volume, and the deletes that bound it: of blocks that were cleared, exceed the
limit, or were not used in time. Knows rows and paths.

Runs on the tier's thread. A file is deleted before its row, so that a file that cannot be deleted stays counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from kvstrata.tiers.block import BlockId
from kvstrata.tiers.disk.catalogue import NUM_ROWS_AT_ONCE, Records
from kvstrata.tiers.disk.errors import DropReason, RemovalReason, fault_of
from kvstrata.tiers.disk.filesystem import unlink_if_there
from kvstrata.tiers.disk.folder import CacheFolder, Quarantine
from kvstrata.tiers.disk.index import BlockRow
from kvstrata.tiers.interface import BlockEvent, RemovalCause, TierCounters
from kvstrata.tiers.options import DiskOptions

log = logging.getLogger(__name__)

PAGE_BYTES = 4096

# The folder itself, its three subfolders, the lock.
FIXED_BYTES = 5 * PAGE_BYTES

# Bytes that a publication can add beside the block: pages of the catalogue and its log, a folder's growth.
MARGIN_BYTES = 256 << 10

# Undeletable files in one eviction. More are a fault of the volume, and not of some files.
NUM_UNDELETABLE = 16

# Files deleted between two writes: some tens of milliseconds.
NUM_PURGED_AT_ONCE = 64


class GivenUp(Exception):
    """A block is not published, for `reason`. Raised and caught inside disk/."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Account:
    """Bytes that the cache takes on the volume: blocks by their rows, all else measured on the tier's threads.

    Changed under the lock of the records, read from any thread: `disk_bytes` does not access the disk."""

    def __init__(self, folder: CacheFolder, quarantine: Quarantine) -> None:
        self._folder = folder
        self._quarantine = quarantine
        self._shard_bytes: dict[str, int] = {}
        self._catalogue_bytes = 0
        self._stray_bytes = 0
        self.look_at_all()

    def look_at_all(self) -> None:
        self._shard_bytes = {shard.name: self._disk_bytes(shard) for shard in self._folder.shards()}
        self.look_at_catalogue()

    def look_at_shard(self, shard: Path) -> None:
        """Measure a folder of blocks again: it grows with the names in it."""
        self._shard_bytes[shard.name] = self._disk_bytes(shard)

    def look_at_catalogue(self) -> None:
        """Measure the catalogue again, after each change of it."""
        self._catalogue_bytes = sum(map(self._disk_bytes, self._folder.catalogue_paths()))

    def look_at_strays(self, paths: Iterable[Path]) -> None:
        """Measure files with names of blocks that cannot be read, or cannot be deleted."""
        self._stray_bytes = sum(map(self._disk_bytes, paths))

    def disk_bytes(self, block_bytes: int) -> int:
        """Return all bytes on the volume. `block_bytes`: of all files that have a row."""
        beside = self._quarantine.disk_bytes + self._catalogue_bytes + self._stray_bytes
        return block_bytes + FIXED_BYTES + beside + sum(list(self._shard_bytes.values()))

    def _disk_bytes(self, path: Path) -> int:
        try:
            return self._folder.files.status(path).disk_bytes
        except OSError:
            return 0


class Space:
    """Frees space on the volume. Deletes run on the tier's threads, under the lock of the records."""

    def __init__(
        self,
        folder: CacheFolder,
        records: Records,
        quarantine: Quarantine,
        counters: TierCounters,
        options: DiskOptions,
        is_pinned: Callable[[bytes], bool],
    ) -> None:
        self.account = Account(folder, quarantine)
        self._folder = folder
        self._records = records
        self._counters = counters
        self._limit_bytes = options.limit_bytes
        self._reserve_bytes = options.reserve_bytes
        self._is_pinned = is_pinned
        self._undeletable: set[BlockId] = set()  # blocks that were logged
        self._look_at_volume()

    @property
    def allowed_bytes(self) -> int:
        """The most that the cache can grow to: its limit, or less where the volume is too full. As of the start or the
        last write: the disk is not accessed."""
        return min(self._limit_bytes, self._volume_bytes)

    def _look_at_volume(self) -> int:
        """Measure the volume. Return its free bytes."""
        free_bytes = self._folder.files.free_bytes(self._folder.directory)
        self._volume_bytes = self.disk_bytes() + max(0, free_bytes - self._reserve_bytes)
        return free_bytes

    def disk_bytes(self) -> int:
        index = self._records.index
        return self.account.disk_bytes(index.totals().disk_bytes + index.leaving.num_bytes)

    def make(self, nbytes: int, kept: frozenset[bytes], *, may_evict: bool) -> None:
        """Free space for a file, or raise GivenUp. `kept`: keys that must stay; pinned keys stay, too."""
        with self._records.lock:
            self.keep_to_limit(kept)
            needed = _whole_pages(nbytes) + MARGIN_BYTES
            while max(self._excess(needed)) > 0 and self.purge():
                pass
            over_limit, over_reserve = self._excess(needed)
            evictable_bytes = self._records.index.totals().disk_bytes if may_evict else 0
            if over_limit > evictable_bytes:
                raise GivenUp(DropReason.NO_ROOM)
            if over_reserve > min(needed, evictable_bytes):
                # Other programs fill the volume. Deleting blocks for new ones would not bring the reserve back.
                raise GivenUp(DropReason.RESERVE)
            over_both = max(over_reserve - max(over_limit, 0), 0)
            for excess_bytes, reason in ((over_limit, RemovalReason.LIMIT), (over_both, RemovalReason.RESERVE)):
                if excess_bytes > 0 and self._evict(excess_bytes, kept, reason) < excess_bytes:
                    raise GivenUp(DropReason.NO_ROOM)

    def _excess(self, needed: int) -> tuple[int, int]:
        """Return by how much `needed` more bytes would exceed the limit, and cut into the reserve."""
        free_bytes = self._look_at_volume()
        return self.disk_bytes() + needed - self._limit_bytes, self._reserve_bytes + needed - free_bytes

    def keep_to_limit(self, kept: frozenset[bytes] = frozenset()) -> None:
        """Delete until the limit holds, also after it was lowered and whatever the volume has free."""
        with self._records.lock:
            self._records.write_touches()
            self.account.look_at_catalogue()
            # The catalogue may grow while rows leave it.
            while (over_limit := self.disk_bytes() - self._limit_bytes) > 0:
                if not self.purge() and not self._evict(over_limit, kept, RemovalReason.LIMIT):
                    break
            self._look_at_volume()

    def purge(self) -> bool:
        """Delete some files of cleared blocks. False: there was nothing left to delete."""
        with self._records.lock:
            self._records.note_leaving()
            rows = self._records.index.leaving.next_rows(NUM_PURGED_AT_ONCE)
            if rows:
                self._delete(rows)
            return bool(rows)

    def _delete(self, rows: Sequence[BlockRow]) -> None:
        stuck: dict[BlockId, OSError] = {}
        deleted: list[BlockRow] = []
        for row in rows:
            try:
                unlink_if_there(self._folder.files, self._folder.path(row.id))
                deleted.append(row)
            except OSError as error:
                stuck[row.id] = error
                self._records.index.leaving.set_stuck(row)
        self._count_evicted(deleted, RemovalReason.CLEARED)
        self._note_undeletable(stuck, "and stays until others are cleared")
        self._records.left(deleted)
        self.account.look_at_catalogue()

    def expire(self, oldest: float, kept: frozenset[bytes]) -> float:
        """Delete blocks that no request used since `oldest`. Return when the next one was last used; infinite without a
        next. Raises OSError or CatalogueFault if a block cannot be removed."""
        with self._records.lock:
            self._records.write_touches()
            with closing(self._records.victims.oldest(self._is_kept(kept, {}))) as victims:
                for row in victims:
                    if row.last_use > oldest:
                        return row.last_use
                    unlink_if_there(self._folder.files, self._folder.path(row.id))
                    self._records.forget([row], RemovalCause.EVICTED)
                    self._count_evicted([row], RemovalReason.EXPIRED)
                    self._records.strike([row])
                    self.account.look_at_catalogue()
            return math.inf

    def _evict(self, nbytes: int, kept: frozenset[bytes], reason: RemovalReason) -> int:
        """Evict blocks and return the bytes freed: fewer if no more can go. OSError if undeletable files are why."""
        freed_bytes = 0
        stuck: dict[BlockId, OSError] = {}
        while freed_bytes < nbytes and len(stuck) < NUM_UNDELETABLE:
            rows = self._unlink_oldest(nbytes - freed_bytes, kept, stuck)
            self._count_evicted(rows, reason)
            freed_bytes += sum(row.disk_bytes for row in rows)
            if not rows:
                break
            self._records.strike(rows)
            self.account.look_at_catalogue()
        if stuck and freed_bytes < nbytes:
            raise next(iter(stuck.values()))
        self._note_undeletable(stuck, "and others go in its place")
        return freed_bytes

    def _unlink_oldest(self, nbytes: int, kept: frozenset[bytes], stuck: dict[BlockId, OSError]) -> list[BlockRow]:
        """Delete the oldest leaves, up to `nbytes` or a full batch. The caller removes the rows from the catalogue."""
        freed: list[BlockRow] = []
        with closing(self._records.victims.oldest(self._is_kept(kept, stuck))) as victims:
            for row in victims:
                try:
                    unlink_if_there(self._folder.files, self._folder.path(row.id))
                except OSError as error:
                    stuck[row.id] = error
                    if len(stuck) >= NUM_UNDELETABLE:
                        break
                    continue
                self._records.forget([row], RemovalCause.EVICTED)
                freed.append(row)
                nbytes -= row.disk_bytes
                if nbytes <= 0 or len(freed) >= NUM_ROWS_AT_ONCE:
                    break
        return freed

    def _is_kept(self, kept: frozenset[bytes], stuck: Mapping[BlockId, OSError]) -> Callable[[bytes], bool]:
        return lambda key: key in kept or self._is_pinned(key) or any(block.key == key for block in stuck)

    def _count_evicted(self, rows: Iterable[BlockRow], reason: RemovalReason) -> None:
        for row in rows:
            self._counters.add(BlockEvent.EVICTED, reason, nbytes=row.disk_bytes)

    def _note_undeletable(self, stuck: Mapping[BlockId, OSError], what_then: str) -> None:
        for block, error in stuck.items():
            self._counters.add(BlockEvent.FAILED, fault_of(error))
            if block not in self._undeletable:
                self._undeletable.add(block)
                log.warning("A block of the disk cache cannot be deleted, %s: %s", what_then, error)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
