"""How much of the volume the cache takes, and how it comes to take less: blocks that were cleared, that are over the
limit, or that no request asked for in time, are deleted. Knows rows and paths.

Runs on the tier's thread. Files first, then rows: what cannot be deleted stays counted.
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
from kvstrata.tiers.interface import Counters, Event
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.removals import RemovalCause

log = logging.getLogger(__name__)

PAGE_BYTES = 4096

# The folder itself, the three in it, the lock.
FIXED_BYTES = 5 * PAGE_BYTES

# What one publication can add beside the block: pages of the catalogue and its log, a folder's growth.
MARGIN_BYTES = 256 << 10

# In one eviction. More than that is a fault of the volume, and not of some files.
NUM_UNDELETABLE = 16

# Between two blocks: some tens of milliseconds.
NUM_PURGED_AT_ONCE = 64


class GivenUp(Exception):
    """Raised and caught inside disk/: there is no room for a block."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Account:
    """How many bytes of the volume the cache takes: blocks by their rows, all else by asking, on the tier's threads.

    Changed under the lock of the records, read from anywhere: no question here asks the disk."""

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
        """A folder grows with the names in it."""
        self._shard_bytes[shard.name] = self._disk_bytes(shard)

    def look_at_catalogue(self) -> None:
        """After every change of it."""
        self._catalogue_bytes = sum(map(self._disk_bytes, self._folder.catalogue_paths()))

    def look_at_strays(self, paths: Iterable[Path]) -> None:
        """Files under the names of blocks that cannot be read, or not be deleted."""
        self._stray_bytes = sum(map(self._disk_bytes, paths))

    def disk_bytes(self, block_bytes: int) -> int:
        """`block_bytes`: of all files that have a row."""
        beside = self._quarantine.disk_bytes + self._catalogue_bytes + self._stray_bytes
        return block_bytes + FIXED_BYTES + beside + sum(list(self._shard_bytes.values()))

    def _disk_bytes(self, path: Path) -> int:
        try:
            return self._folder.files.status(path).disk_bytes
        except OSError:
            return 0


class Space:
    """What deletes runs on the tier's threads, under the lock of the records."""

    def __init__(
        self,
        folder: CacheFolder,
        records: Records,
        quarantine: Quarantine,
        counters: Counters,
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
        self._undeletable: set[BlockId] = set()  # those that were said
        self._look_at_volume()

    @property
    def allowed_bytes(self) -> int:
        """The most that the cache can come to: its limit, or less where the volume has no room for that. As of the
        start or the last write: it asks no disk."""
        return min(self._limit_bytes, self._volume_bytes)

    def _look_at_volume(self) -> int:
        """Tells what the volume has free."""
        free_bytes = self._folder.files.free_bytes(self._folder.directory)
        self._volume_bytes = self.disk_bytes() + max(0, free_bytes - self._reserve_bytes)
        return free_bytes

    def disk_bytes(self) -> int:
        index = self._records.index
        return self.account.disk_bytes(index.totals().disk_bytes + index.leaving.num_bytes)

    def make(self, nbytes: int, kept: frozenset[bytes], *, may_evict: bool) -> None:
        """GivenUp where it cannot be done. `kept`: keys that must stay, besides those that are pinned."""
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
                # Others fill the volume. Deleting blocks for new ones would not bring the reserve back.
                raise GivenUp(DropReason.RESERVE)
            over_both = max(over_reserve - max(over_limit, 0), 0)
            for excess_bytes, reason in ((over_limit, RemovalReason.LIMIT), (over_both, RemovalReason.RESERVE)):
                if excess_bytes > 0 and self._evict(excess_bytes, kept, reason) < excess_bytes:
                    raise GivenUp(DropReason.NO_ROOM)

    def _excess(self, needed: int) -> tuple[int, int]:
        """By how much so many bytes more would be over the limit, and into the reserve."""
        free_bytes = self._look_at_volume()
        return self.disk_bytes() + needed - self._limit_bytes, self._reserve_bytes + needed - free_bytes

    def keep_to_limit(self, kept: frozenset[bytes] = frozenset()) -> None:
        """A limit that was lowered holds at once, whatever the volume has free."""
        with self._records.lock:
            self._records.write_touches()
            self.account.look_at_catalogue()
            # The catalogue may grow while rows leave it.
            while (over_limit := self.disk_bytes() - self._limit_bytes) > 0:
                if not self.purge() and not self._evict(over_limit, kept, RemovalReason.LIMIT):
                    break
            self._look_at_volume()

    def purge(self) -> bool:
        """Delete some of what was taken away. False: there was nothing left to delete."""
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
        """Those that no request asked for since `oldest`. Tells when the next was asked for; infinite without a next.
        OSError or CatalogueFault where one cannot be removed."""
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
        """Bytes that this freed: fewer where no more can go. OSError where files that cannot be deleted are why."""
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
        """Some, until so many bytes are free. They are gone from memory; the catalogue has still to be told."""
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
            self._counters.add(Event.EVICTED, reason, nbytes=row.disk_bytes)

    def _note_undeletable(self, stuck: Mapping[BlockId, OSError], what_then: str) -> None:
        for block, error in stuck.items():
            self._counters.add(Event.FAILED, fault_of(error))
            if block not in self._undeletable:
                self._undeletable.add(block)
                log.warning("A block of the disk cache cannot be deleted, %s: %s", what_then, error)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
