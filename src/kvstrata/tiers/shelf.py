"""The blocks of one folder and its catalogue, kept in step. Knows rows and paths; payloads pass it by.

The files are the truth. A row is added before its file gets its name and removed after its file is gone: a crash
leaves rows too many, never a file that nobody counts. After a start names are compared with rows all the same, on the
thread that writes and before it writes: a machine that lost power may have lost rows, and nobody need wait for that.

Lookups never raise: a catalogue that cannot answer has nothing. What changes the folder raises OSError or
CatalogueFault, for the thread that writes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from kvstrata.tiers.account import Account, whole_pages
from kvstrata.tiers.block import BlockId, Tally
from kvstrata.tiers.catalogue import Catalogue, CatalogueFault, Row, Totals
from kvstrata.tiers.eviction import victims
from kvstrata.tiers.files import make_folder_if_missing, unlink_if_there
from kvstrata.tiers.folder import SUFFIX, CacheFolder, file_name, parse_file_name
from kvstrata.tiers.quarantine import Quarantine
from kvstrata.tiers.reasons import Damage, Drop, Eviction, Fault, fault_of
from kvstrata.tiers.rebuild import DamagedFile, UnreadFile, rows_of
from kvstrata.tiers.usage import Counters, Event

log = logging.getLogger(__name__)

# What one publication can add beside the block: pages of the catalogue and its log, a folder's growth.
MARGIN_BYTES = 256 << 10
NUM_ROWS_AT_ONCE = 512
# In one eviction. More than that is a fault of the volume, and not of some files.
NUM_UNDELETABLE = 16


class GivenUp(Exception):
    """Raised and caught inside tiers/: there is no room for a block."""

    def __init__(self, reason: Drop) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Shelf:
    def __init__(
        self,
        folder: CacheFolder,
        *,
        limit_bytes: int,
        reserve_bytes: int,
        quarantine_bytes: int,
        quarantine_files: int,
        counters: Counters,
        is_pinned: Callable[[bytes], bool],
        tally: Tally,
    ) -> None:
        self.folder = folder
        self.tally = tally
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._counters = counters
        self._is_pinned = is_pinned
        self._lock = threading.RLock()
        self._touched: dict[BlockId, tuple[int, float]] = {}
        self._touch_lock = threading.Lock()
        self._undeletable: set[BlockId] = set()  # those that were said
        self.needs_rebuild = False
        self.num_losses = 0  # how often blocks were gone that nobody here removed
        self.quarantine = Quarantine(
            folder.quarantine, folder.files, limit_files=quarantine_files, limit_bytes=quarantine_bytes
        )
        self._account = Account(folder, self.quarantine)
        self._open()

    # Lookups.

    def has(self, block: BlockId) -> bool:
        try:
            return self.catalogue.has(block)
        except CatalogueFault as fault:
            self._note(fault)
            return False

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        try:
            return self.catalogue.lengths(parent)
        except CatalogueFault as fault:
            self._note(fault)
            return ()

    def size(self, block: BlockId) -> int:
        """On the disk; 0 where that is not known."""
        try:
            return self.catalogue.size(block)
        except CatalogueFault as fault:
            self._note(fault)
            return 0

    def contents(self, block: BlockId) -> Mapping[str, int]:
        """Bytes by label; nothing where that is not known."""
        try:
            return self.catalogue.contents(block)
        except CatalogueFault as fault:
            self._note(fault)
            return {}

    def rows(self, root: bytes | None = None) -> list[Row]:
        """Waits for a publication that is under way."""
        try:
            with self._lock:
                return self.catalogue.rows(root)
        except CatalogueFault as fault:
            self._note(fault)
            return []

    @property
    def totals(self) -> Totals:
        return self._account.totals

    def disk_bytes(self) -> int:
        return self._account.disk_bytes()

    def touch(self, blocks: Iterable[BlockId], now: float) -> None:
        """Written down later: a lookup must not wait for the disk."""
        with self._touch_lock:
            for block in blocks:
                count, _ = self._touched.get(block, (0, 0.0))
                self._touched[block] = (count + 1, now)

    # Changes.

    def make_room(self, nbytes: int, kept: frozenset[bytes], *, may_evict: bool) -> None:
        """GivenUp where it cannot be done. `kept`: keys that must stay, besides those that are pinned."""
        with self._lock:
            self.keep_to_limit(kept)
            needed = whole_pages(nbytes) + MARGIN_BYTES
            free_bytes = self.folder.files.free_bytes(self.folder.directory)
            over_limit = self.disk_bytes() + needed - self._limit_bytes
            over_reserve = self._reserve_bytes + needed - free_bytes
            evictable_bytes = self._account.totals.disk_bytes if may_evict else 0
            if over_limit > evictable_bytes:
                raise GivenUp(Drop.NO_ROOM)
            if free_bytes < self._reserve_bytes or over_reserve > evictable_bytes:
                # Others fill the volume. Deleting blocks for new ones would not bring the reserve back.
                raise GivenUp(Drop.RESERVE)
            over_both = max(over_reserve - max(over_limit, 0), 0)
            for nbytes, reason in ((over_limit, Eviction.LIMIT), (over_both, Eviction.RESERVE)):
                if nbytes > 0 and self._evict(nbytes, kept, reason) < nbytes:
                    raise GivenUp(Drop.NO_ROOM)

    def keep_to_limit(self, kept: frozenset[bytes] = frozenset()) -> None:
        """A limit that was lowered holds at once, whatever the volume has free."""
        with self._lock:
            self.write_touches()
            # The catalogue may grow while rows leave it.
            while (over_limit := self.disk_bytes() - self._limit_bytes) > 0:
                if not self._evict(over_limit, kept, Eviction.LIMIT):
                    return

    def publish(self, temporary: Path, row: Row, is_wanted: Callable[[], bool]) -> None:
        """When this returns the block is on the disk under its name.

        Whoever clears takes it out of the queue first and then, under this lock, off the disk: it is met either here or
        there. GivenUp where it was met here.
        """
        path = self.folder.path(row.id)
        files = self.folder.files
        with self._lock:
            if not is_wanted():
                raise GivenUp(Drop.CLEARED)
            if make_folder_if_missing(files, path.parent):
                self._account.look_at(path.parent)
                files.sync_folder(self.folder.blocks)
            self._add_row(row)
            try:
                files.rename(temporary, path)
            except OSError:
                self._remove_rows([row])
                raise
            # The row is right from here on, whatever the sync says.
            files.sync_folder(path.parent)
            self._account.look_at(path.parent)

    def remove(self, blocks: Sequence[BlockId], reason: Eviction) -> list[Row]:
        """Files first, then rows; what cannot be deleted stays counted."""
        with self._lock:
            rows = [row for block in blocks for row in self.catalogue.parts(block.key) if row.id == block]
            for row in rows:
                unlink_if_there(self.folder.files, self.folder.path(row.id))
            self._remove_rows(rows)
            self._count_evicted(rows, reason)
        return rows

    def forget(self, block: BlockId) -> None:
        """A row whose file turned out not to be there: unless it is there by now."""
        with self._lock:
            try:
                self.folder.files.status(self.folder.path(block))
            except FileNotFoundError:
                self._remove_row_of(block)
            except OSError:
                return

    def put_away(self, block: BlockId, reason: Damage) -> None:
        """A damaged file leaves; never raises, because it is a reader that finds one."""
        self._counters.add(Event.QUARANTINED, reason)
        log.warning("Quarantined a damaged block of the disk cache (%s): %s", reason, file_name(block))
        with self._lock:
            try:
                self.quarantine.take(self.folder.path(block), reason)
            except OSError as error:
                log.warning("It could not be moved or deleted: %s", error)
            self._remove_row_of(block)

    def write_touches(self) -> None:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        if touched:
            self.catalogue.touch(touched)

    def reopen(self) -> None:
        """The folder is another than before."""
        with self._lock:
            self._close_catalogue()
            self.quarantine.reload()
            self._open()
            self.needs_rebuild = False
            self.num_losses += 1

    def rebuild(self) -> None:
        """The catalogue turned out to be damaged: a new one, from the headers of the blocks."""
        with self._lock:
            self._close_catalogue()
            for path in self.folder.catalogue_paths():
                unlink_if_there(self.folder.files, path)
            self._open()
            self.needs_rebuild = False

    def close(self) -> None:
        with self._lock:
            try:
                self.write_touches()
            except CatalogueFault as fault:
                self._note(fault)
            self._close_catalogue()

    # Inside.

    def _open(self) -> None:
        try:
            self._open_catalogue()
        except CatalogueFault as fault:
            if not fault.damaged:
                raise
            self._counters.add(Event.FAILED, Fault.CATALOGUE)
            log.warning("The disk cache's catalogue is damaged (%s); it is rebuilt from the blocks", fault)
            for path in self.folder.catalogue_paths():
                unlink_if_there(self.folder.files, path)
            self._open_catalogue()

    def _open_catalogue(self) -> None:
        self.catalogue = Catalogue(self.folder.catalogue)
        self._is_compared = False
        try:
            if self.catalogue.is_new:
                self.compare_once()
            self._account.begin(self.catalogue.totals())
        except BaseException:
            self._close_catalogue()
            raise

    def recheck(self) -> None:
        """Some of the folder was taken away: what is left is compared again."""
        with self._lock:
            self.quarantine.reload()
            self._is_compared = False

    def compare_once(self) -> None:
        """Names against rows: what only one side knows is added or removed. Opens only files that have no row."""
        with self._lock:
            if self._is_compared:
                return
            known, names = self.catalogue.names(SUFFIX), self.folder.names()
            gone = [block for name in known - names for block in parse_file_name(name)]
            self.catalogue.remove(gone)
            self.num_losses += bool(gone)
            self._add_unknown(self.folder.stored(names - known))
            self._account.begin(self.catalogue.totals())
            self._is_compared = True

    def _add_unknown(self, unknown: Iterable[tuple[Path, BlockId]]) -> None:
        found: list[Row] = []
        for entry in rows_of(self.folder.files, unknown, self.tally):
            match entry:
                case Row():
                    found.append(entry)
                case DamagedFile(path, reason):
                    self._counters.add(Event.QUARANTINED, reason)
                    self.quarantine.take(path, reason)
                case UnreadFile(path, reason):
                    self._counters.add(Event.FAILED, reason)
        for first in range(0, len(found), NUM_ROWS_AT_ONCE):
            self.catalogue.add(found[first : first + NUM_ROWS_AT_ONCE])

    def _evict(self, nbytes: int, kept: frozenset[bytes], reason: Eviction) -> int:
        """Bytes that this freed: fewer where no more can go. OSError where files that cannot be deleted are why."""
        freed_bytes = 0
        stuck: dict[BlockId, OSError] = {}
        while freed_bytes < nbytes and len(stuck) < NUM_UNDELETABLE:
            rows = self._evict_some(nbytes - freed_bytes, kept, stuck)
            self._count_evicted(rows, reason)
            freed_bytes += sum(row.disk_bytes for row in rows)
            if not rows:
                break
        if stuck and freed_bytes < nbytes:
            raise next(iter(stuck.values()))
        self._note_undeletable(stuck)
        return freed_bytes

    def _evict_some(self, nbytes: int, kept: frozenset[bytes], stuck: dict[BlockId, OSError]) -> list[Row]:
        """One transaction. Only when it is committed are its rows gone, and their bytes free."""
        freed: list[Row] = []
        stuck_keys = {block.key for block in stuck}
        with self.catalogue.changing():
            for row in victims(self.catalogue, lambda key: key in kept or key in stuck_keys or self._is_pinned(key)):
                try:
                    unlink_if_there(self.folder.files, self.folder.path(row.id))
                except OSError as error:
                    stuck[row.id] = error
                    stuck_keys.add(row.id.key)
                    if len(stuck) >= NUM_UNDELETABLE:
                        break
                    continue
                self.catalogue.remove([row.id])
                freed.append(row)
                nbytes -= row.disk_bytes
                if nbytes <= 0 or len(freed) >= NUM_ROWS_AT_ONCE:
                    break
        self._account.subtract(freed)
        return freed

    def _count_evicted(self, rows: Iterable[Row], reason: Eviction) -> None:
        for row in rows:
            self._counters.add(Event.EVICTED, reason, nbytes=row.disk_bytes)

    def _note_undeletable(self, stuck: Mapping[BlockId, OSError]) -> None:
        for block, error in stuck.items():
            self._counters.add(Event.FAILED, fault_of(error))
            if block not in self._undeletable:
                self._undeletable.add(block)
                log.warning("A block of the disk cache cannot be deleted, and others go in its place: %s", error)

    def _remove_row_of(self, block: BlockId) -> None:
        try:
            self._remove_rows([row for row in self.catalogue.parts(block.key) if row.id == block])
        except CatalogueFault as fault:
            self._note(fault)

    def _add_row(self, row: Row) -> None:
        replaced = [old for old in self.catalogue.parts(row.id.key) if old.id == row.id]
        self.catalogue.add([row])
        self._account.subtract(replaced)
        self._account.add([row])

    def _remove_rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self.catalogue.remove([row.id for row in rows])
        self._account.subtract(rows)

    def _close_catalogue(self) -> None:
        try:
            self.catalogue.close()
        except CatalogueFault as fault:
            log.warning("The disk cache's catalogue did not close: %s", fault)

    def _note(self, fault: CatalogueFault) -> None:
        self._counters.add(Event.FAILED, Fault.CATALOGUE)
        self.needs_rebuild = self.needs_rebuild or fault.damaged
