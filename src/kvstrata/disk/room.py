"""Free bytes: delete what was cleared, what is over the limit, what no request asked for in time. Knows rows and paths.

Runs on the tier's thread. Files first, then rows: what cannot be deleted stays counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

from kvstrata.disk.account import Account, whole_pages
from kvstrata.disk.files import unlink_if_there
from kvstrata.disk.folder import CacheFolder
from kvstrata.disk.reasons import Drop, Eviction, fault_of
from kvstrata.disk.records import NUM_ROWS_AT_ONCE, Records
from kvstrata.disk.row import Row
from kvstrata.disk.usage import Counters, Event
from kvstrata.tier.block import BlockId

log = logging.getLogger(__name__)

# What one publication can add beside the block: pages of the catalogue and its log, a folder's growth.
MARGIN_BYTES = 256 << 10
# In one eviction. More than that is a fault of the volume, and not of some files.
NUM_UNDELETABLE = 16
# Between two blocks: some tens of milliseconds.
NUM_PURGED_AT_ONCE = 64


class GivenUp(Exception):
    """Raised and caught inside tiers/: there is no room for a block."""

    def __init__(self, reason: Drop) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Room:
    """Under the shelf's lock."""

    def __init__(
        self,
        folder: CacheFolder,
        records: Records,
        account: Account,
        counters: Counters,
        *,
        limit_bytes: int,
        reserve_bytes: int,
        is_pinned: Callable[[bytes], bool],
    ) -> None:
        self._folder = folder
        self._records = records
        self._account = account
        self._counters = counters
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._is_pinned = is_pinned
        self._undeletable: set[BlockId] = set()  # those that were said

    def disk_bytes(self) -> int:
        index = self._records.index
        return self._account.disk_bytes(index.totals().disk_bytes + index.leaving.num_bytes)

    def make(self, nbytes: int, kept: frozenset[bytes], *, may_evict: bool) -> None:
        """GivenUp where it cannot be done. `kept`: keys that must stay, besides those that are pinned."""
        self.keep_to_limit(kept)
        needed = whole_pages(nbytes) + MARGIN_BYTES
        while max(self._excess(needed)) > 0 and self.purge():
            pass
        over_limit, over_reserve = self._excess(needed)
        evictable_bytes = self._records.index.totals().disk_bytes if may_evict else 0
        if over_limit > evictable_bytes:
            raise GivenUp(Drop.NO_ROOM)
        if over_reserve > min(needed, evictable_bytes):
            # Others fill the volume. Deleting blocks for new ones would not bring the reserve back.
            raise GivenUp(Drop.RESERVE)
        over_both = max(over_reserve - max(over_limit, 0), 0)
        for excess_bytes, reason in ((over_limit, Eviction.LIMIT), (over_both, Eviction.RESERVE)):
            if excess_bytes > 0 and self._evict(excess_bytes, kept, reason) < excess_bytes:
                raise GivenUp(Drop.NO_ROOM)

    def _excess(self, needed: int) -> tuple[int, int]:
        """By how much so many bytes more would be over the limit, and into the reserve."""
        free_bytes = self._folder.files.free_bytes(self._folder.directory)
        return self.disk_bytes() + needed - self._limit_bytes, self._reserve_bytes + needed - free_bytes

    def keep_to_limit(self, kept: frozenset[bytes] = frozenset()) -> None:
        """A limit that was lowered holds at once, whatever the volume has free."""
        self._records.write_touches()
        self._account.look_at_catalogue()
        # The catalogue may grow while rows leave it.
        while (over_limit := self.disk_bytes() - self._limit_bytes) > 0:
            if not self.purge() and not self._evict(over_limit, kept, Eviction.LIMIT):
                return

    def purge(self) -> bool:
        """Delete some of what was taken away. False: there was nothing left to delete."""
        self._records.note_leaving()
        rows = self._records.index.leaving.next_rows(NUM_PURGED_AT_ONCE)
        if rows:
            self._delete(rows)
        return bool(rows)

    def _delete(self, rows: Sequence[Row]) -> None:
        stuck: dict[BlockId, OSError] = {}
        deleted: list[Row] = []
        for row in rows:
            try:
                unlink_if_there(self._folder.files, self._folder.path(row.id))
                deleted.append(row)
            except OSError as error:
                stuck[row.id] = error
                self._records.index.leaving.set_stuck(row)
        self._count_evicted(deleted, Eviction.CLEARED)
        self._note_undeletable(stuck, "and stays until others are cleared")
        self._records.left(deleted)
        self._account.look_at_catalogue()

    def expire(self, oldest: float, kept: frozenset[bytes]) -> float:
        """Those that no request asked for since `oldest`. Tells when the next was asked for; infinite without a next.
        OSError or CatalogueFault where one cannot be removed."""
        self._records.write_touches()
        with closing(self._records.order.victims(self._is_kept(kept, {}))) as victims:
            for row in victims:
                if row.last_use > oldest:
                    return row.last_use
                unlink_if_there(self._folder.files, self._folder.path(row.id))
                self._records.forget([row])
                self._count_evicted([row], Eviction.EXPIRED)
                self._records.strike([row])
                self._account.look_at_catalogue()
        return math.inf

    def _evict(self, nbytes: int, kept: frozenset[bytes], reason: Eviction) -> int:
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
            self._account.look_at_catalogue()
        if stuck and freed_bytes < nbytes:
            raise next(iter(stuck.values()))
        self._note_undeletable(stuck, "and others go in its place")
        return freed_bytes

    def _unlink_oldest(self, nbytes: int, kept: frozenset[bytes], stuck: dict[BlockId, OSError]) -> list[Row]:
        """Some, until so many bytes are free. They are gone from memory; the catalogue has still to be told."""
        freed: list[Row] = []
        with closing(self._records.order.victims(self._is_kept(kept, stuck))) as victims:
            for row in victims:
                try:
                    unlink_if_there(self._folder.files, self._folder.path(row.id))
                except OSError as error:
                    stuck[row.id] = error
                    if len(stuck) >= NUM_UNDELETABLE:
                        break
                    continue
                self._records.forget([row])
                freed.append(row)
                nbytes -= row.disk_bytes
                if nbytes <= 0 or len(freed) >= NUM_ROWS_AT_ONCE:
                    break
        return freed

    def _is_kept(self, kept: frozenset[bytes], stuck: Mapping[BlockId, OSError]) -> Callable[[bytes], bool]:
        return lambda key: key in kept or self._is_pinned(key) or any(block.key == key for block in stuck)

    def _count_evicted(self, rows: Iterable[Row], reason: Eviction) -> None:
        for row in rows:
            self._counters.add(Event.EVICTED, reason, nbytes=row.disk_bytes)

    def _note_undeletable(self, stuck: Mapping[BlockId, OSError], what_then: str) -> None:
        for block, error in stuck.items():
            self._counters.add(Event.FAILED, fault_of(error))
            if block not in self._undeletable:
                self._undeletable.add(block)
                log.warning("A block of the disk cache cannot be deleted, %s: %s", what_then, error)
