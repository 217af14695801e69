"""The block store: the one object that changes the cache folder.

A block exists if a file of its name is under `blocks/`. The index is the view of the files; this object changes both
under `changes`, the file first. The catalogue is a copy of the view, written last. Publishing a block is: write a
temporary file, sync it, rename it, add its record, sync the folder. A block counts as written after the last step; a
process that is killed before leaves no file, or a whole file that the next start finds by its name.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.tiers.block import Block, BlockId, Tally
from kvstrata.tiers.block_file import Damage, EncodedBlock, encode_block, fastest
from kvstrata.tiers.disk.catalogue import Catalogue, CatalogueFault, add_saved, open_catalogue
from kvstrata.tiers.disk.errors import DiskFault, DropReason, fault_of
from kvstrata.tiers.disk.filesystem import make_folder_if_missing, unlink_if_there, write_all
from kvstrata.tiers.disk.folder import CacheFolder, MarkerFiles, Quarantine, file_name
from kvstrata.tiers.disk.index import BlockIndex, BlockRecord, write_labels
from kvstrata.tiers.disk.scan import Reconciler
from kvstrata.tiers.disk.space import BlockDropped, Space
from kvstrata.tiers.interface import BlockEvent, RemovalCause, TierCounters
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.write_limits import DailyWriteBudget, Pace, day_of

log = logging.getLogger(__name__)

# Records loaded before the tier answers, in some tenths of a second. The writer's thread loads the others afterwards.
NUM_RECORDS_AT_START = 8_192

NUM_RECORDS_AT_ONCE = 512

# Unsaved records that make the writer save between two blocks; their headers are read after a crash.
NUM_UNSAVED = 64

REMEMBERED_DROPS = 4096

# Properties of the catalogue: a restart does not give a new day's budget.
DAY = "day"

WRITTEN_BYTES = "written_bytes"


@dataclass(frozen=True, slots=True)
class Published:
    file_bytes: int
    expires_in_s: float = math.inf  # unless a request uses its tokens before


@dataclass(frozen=True, slots=True)
class DroppedBlock:
    reason: DropReason


@dataclass(frozen=True, slots=True)
class WriteFailed:
    reason: DiskFault
    what: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The result of `catch_up`. `is_done`: nothing is left to delete. Otherwise it must be called again."""

    is_done: bool = True


class DiskBlockStore:
    def __init__(
        self,
        folder: CacheFolder,
        options: DiskOptions,
        counters: TierCounters,
        *,
        is_pinned: Callable[[bytes], bool],
        count_labels: Tally,
        clock: Callable[[], float],
    ) -> None:
        """Open the folder's index. OSError or CatalogueFault: the folder cannot be used."""
        self.folder = folder
        self.index = BlockIndex()
        self.count_labels = count_labels
        self.changes = threading.RLock()  # held over file operations; the engine thread never takes it
        self.num_losses = 0  # events in which blocks vanished without a removal by the tier
        self._counters = counters
        self._clock = clock
        self._checksum = options.checksum or fastest()
        self._ttl_s = math.inf if options.ttl_s is None else options.ttl_s
        self._serial = itertools.count()
        self._is_reconciled = False
        self._has_vanished = False
        self._has_logged_fault = False
        self._without_space: OrderedDict[bytes, None] = OrderedDict()
        self.quarantine = Quarantine(folder.quarantine, folder.files, options.limit_bytes)
        self._markers = MarkerFiles(folder)
        self._reconciler = Reconciler(folder, self.index, self.quarantine, counters, count_labels, self.changes)
        self._catalogue: Catalogue | None = None
        self._load_newest()
        self.budget = self._open_budget(options.daily_write_bytes)
        self.space = Space(folder, self.index, self.quarantine, self._markers, counters, options, is_pinned, self.save)

    # On the writer's thread.

    def publish(
        self, block: Block, is_needed: Callable[[bytes], bool], is_wanted: Callable[[], bool], pace: Pace
    ) -> Published | DroppedBlock | WriteFailed:
        """Write a block. Evictions must keep the keys that `is_needed` names. `is_wanted` is asked at the moment of
        publication. `pace` throttles long work."""
        try:
            return self._publish(block, is_needed, is_wanted, pace)
        except BlockDropped as dropped:
            if dropped.reason is not DropReason.CLEARED:
                self._remember_drop(block.key)
            return DroppedBlock(dropped.reason)
        except (TypeError, ValueError, IsADirectoryError) as error:
            # The block itself is unfit, or a folder has its name: the next block may well be writable.
            log.warning("A block cannot be written: %s", error)
            return DroppedBlock(DropReason.UNWRITABLE)
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def catch_up(self) -> CaughtUp | WriteFailed:
        """Reconcile index, folder and limit after a start, and delete some files of removed blocks."""
        try:
            self._require_folder()
            self._reconcile_once()
            with self.changes:
                self.space.enforce_limit()
                has_deleted = self.space.delete_pending()
            self.save()
            return CaughtUp(is_done=not has_deleted)
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def expire(self, is_needed: Callable[[bytes], bool]) -> float:
        """Delete expired blocks, oldest first, children before parents. Return the seconds until the next expires."""
        if self._ttl_s == math.inf:
            return math.inf
        now = self._clock()
        try:
            with self.changes:
                oldest = self.space.delete_expired(now - self._ttl_s, is_needed)
            return min(oldest - now, 0.0) + self._ttl_s
        except OSError as error:
            self._counters.add(BlockEvent.FAILED, fault_of(error))
            log.warning("Blocks that expired could not be removed: %s", error)
        return self._ttl_s

    def save(self, at_least: int = 1) -> None:
        """Copy changes of the index to the catalogue, if there are enough of them. A fault does not raise: the files
        are there, and the changes are saved later."""
        if self.index.num_unsaved < at_least:
            return
        try:
            if self._catalogue is None:
                self._catalogue = self._new_catalogue()
            while self.index.num_unsaved:
                self._save_some(self._catalogue)
            self._has_logged_fault = False
        except (CatalogueFault, OSError) as error:
            self._catalogue_failed(error)
        with self.changes:
            self.space.account.measure_catalogue()

    # On the threads of readers.

    def forget(self, block: BlockId) -> None:
        """Remove the record of a block whose file is missing or not a plain file, unless the file is there by now."""
        with self.changes:
            try:
                is_there = self.folder.files.status(self.folder.path(block)).is_plain
            except FileNotFoundError:
                is_there = False
            except OSError:
                return
            record = self.index.get(block)
            if record is not None and not is_there:
                self.index.forget([record], RemovalCause.LOST)

    def quarantine_block(self, block: BlockId, damage: Damage) -> None:
        """Quarantine a damaged file. Never raises, because readers call it."""
        self._counters.add(BlockEvent.QUARANTINED, damage)
        log.warning("Quarantined a damaged block of the disk cache (%s): %s", damage, file_name(block))
        record = self.index.get(block)
        self.index.hide([block])
        self.index.report_removed([] if record is None else [record], RemovalCause.LOST)
        with self.changes:
            if self.index.get(block) is not None:
                return  # the block was written again meanwhile
            try:
                self.quarantine.take(self.folder.path(block), damage)
            except OSError as error:
                log.warning("It could not be moved or deleted: %s", error)
                return
            record = self.index.pending.get(block)
            if record is not None:
                self.index.files_deleted([record])

    # After the threads have ended.

    def close(self) -> None:
        """Write what the next start needs: markers of clears whose deletes had to wait, and the catalogue."""
        with self.changes:
            self.space.write_markers()
        self.save()
        self._close_catalogue()

    # Publishing.

    def _publish(
        self, block: Block, is_needed: Callable[[bytes], bool], is_wanted: Callable[[], bool], pace: Pace
    ) -> Published:
        self._require_folder()
        self._reconcile_once()
        encoded = encode_block(block, self._checksum, pace)
        with self.changes:
            # After a parent that did not fit, space for its children would come from evicting their own chain.
            may_evict = block.parent not in self._without_space
            self.space.free_space(encoded.nbytes, is_needed, may_evict=may_evict)
        if not self.budget.take(encoded.nbytes, self._clock()):
            raise BlockDropped(DropReason.WRITE_BUDGET)
        temporary = self.folder.temporaries / f"{next(self._serial)}.tmp"
        created = self.index.time_of_record(self._clock())
        try:
            disk_bytes = self._write(temporary, encoded, created, pace)
            record = self._record(block, disk_bytes, created)
            self._publish_file(temporary, record, is_wanted)
        except BaseException:
            self.budget.give_back(encoded.nbytes, self._clock())
            self._remove_temporary(temporary)
            raise
        self._without_space.pop(block.key, None)
        self.save(NUM_UNSAVED)
        return Published(encoded.nbytes, record.last_use + self._ttl_s - self._clock())

    def _write(self, temporary: Path, encoded: EncodedBlock, created: float, pace: Pace) -> int:
        """Write and sync a file. Return the bytes that it takes on the volume, which are known only afterwards."""
        files = self.folder.files
        fd = files.create(temporary)
        try:
            write_all(files, fd, encoded.pieces, pace)
            files.set_modified(fd, created)
            files.sync(fd)
            return files.status(fd).disk_bytes
        finally:
            files.close(fd)

    def _publish_file(self, temporary: Path, record: BlockRecord, is_wanted: Callable[[], bool]) -> None:
        """Give a file its name. When this returns, the name is on the disk. BlockDropped: a caller removed the block
        meanwhile."""
        path, files = self.folder.path(record.id), self.folder.files
        with self.changes:
            if not is_wanted():
                raise BlockDropped(DropReason.CLEARED)
            try:
                if make_folder_if_missing(files, path.parent):
                    files.sync_folder(self.folder.blocks)
                files.rename(temporary, path)
                # The file counts from here on, whatever the sync of its folder says.
                is_kept = self.index.add(record, is_wanted)
                files.sync_folder(path.parent)
            finally:
                self.space.account.measure_shard(path.parent)
        if not is_kept:
            raise BlockDropped(DropReason.CLEARED)

    def _record(self, block: Block, disk_bytes: int, created: float) -> BlockRecord:
        labels = write_labels(self.count_labels(block.description, block.tensor_bytes))
        identity = (block.id, block.parent, block.root, block.start, block.num_tokens)
        return BlockRecord(*identity, disk_bytes, min(block.last_use, created), 0, created, labels)

    def _remove_temporary(self, temporary: Path) -> None:
        try:
            unlink_if_there(self.folder.files, temporary)
        except OSError as error:
            log.warning("A temporary file stays until the next start: %s", error)

    def _remember_drop(self, key: bytes) -> None:
        self._without_space[key] = None
        if len(self._without_space) > REMEMBERED_DROPS:
            self._without_space.popitem(last=False)

    def _failed(self, error: OSError | CatalogueFault | ConfigError) -> WriteFailed:
        match error:
            case CatalogueFault():
                return WriteFailed(DiskFault.CATALOGUE, str(error))
            case OSError():
                return WriteFailed(fault_of(error), str(error))
            case _:
                # The folder vanished, and another program recreated it before this tier did.
                return WriteFailed(DiskFault.VANISHED, str(error))

    # The folder and the index.

    def _require_folder(self) -> None:
        """Raise once if the folder vanished; the next attempt recreates it. Recreate a missing subfolder at once."""
        if self.folder.is_intact():
            self._has_vanished = False
            if self.folder.make_missing():
                with self.changes:
                    self.quarantine.reload()
                    self._is_reconciled = False
            return
        if not self._has_vanished:
            self._has_vanished = True
            raise FileNotFoundError(2, "The folder of the disk cache is gone", str(self.folder.directory))
        self.folder.acquire()
        self.folder.remove_temporaries()
        self._reopen()
        self._has_vanished = False

    def _reopen(self) -> None:
        """Load the state of another folder, which has taken the place of the first."""
        with self.changes:
            self._close_catalogue()
            self.index.forget_folder()
            self.quarantine.reload()
            self._load_newest()
            self.space.account.measure_all()
            self._is_reconciled = False
            self.num_losses += 1
            self.index.removals.set_incomplete()

    def _reconcile_once(self) -> None:
        if self._is_reconciled:
            return
        try:
            reconciled = self._reconciler.reconcile(self._saved_records())
        except CatalogueFault as fault:
            self._catalogue_failed(fault)
            if fault.damaged:
                # Records that were loaded before the damage showed may be wrong, too.
                self.index.forget_all()
            reconciled = self._reconciler.reconcile(())
        with self.changes:
            self.num_losses += reconciled.has_lost
            self.space.account.measure_all()
            self.space.account.measure_strays(reconciled.strays)
            self._is_reconciled = True

    # The catalogue.

    def _load_newest(self) -> None:
        """Read the markers, and the newest records of the catalogue. CatalogueFault if the volume fails."""
        self.index.apply_markers(self._markers.load())
        try:
            self._catalogue = open_catalogue(self.folder.catalogue)
            add_saved(self.index, self._catalogue.load_newest(NUM_RECORDS_AT_START))
        except CatalogueFault as fault:
            if not fault.damaged:
                self._close_catalogue()
                raise
            self._catalogue_failed(fault)
            self.index.forget_all()
            self._catalogue = self._new_catalogue()

    def _saved_records(self) -> Iterator[list[BlockRecord]]:
        """Yield the records that were too many for the start."""
        last: BlockId | None = None
        while self._catalogue is not None and (records := self._catalogue.load_after(last, NUM_RECORDS_AT_ONCE)):
            last = records[-1].id
            yield records

    def _open_budget(self, limit_bytes: int) -> DailyWriteBudget:
        try:
            properties = (DAY, WRITTEN_BYTES)
            day, written_bytes = (self._catalogue.read_property(name) if self._catalogue else 0 for name in properties)
        except CatalogueFault:
            day, written_bytes = 0, 0
        return DailyWriteBudget(limit_bytes, day=day, written_bytes=written_bytes)

    def _save_some(self, catalogue: Catalogue) -> None:
        now = self._clock()
        changed, removed = self.index.take_unsaved(NUM_RECORDS_AT_ONCE)
        try:
            catalogue.save(changed, removed, {DAY: day_of(now), WRITTEN_BYTES: self.budget.written_bytes(now)})
        except CatalogueFault:
            self.index.mark_unsaved([*(record.id for record in changed), *removed])
            raise

    def _new_catalogue(self) -> Catalogue:
        for path in self.folder.catalogue_paths():
            unlink_if_there(self.folder.files, path)
        return open_catalogue(self.folder.catalogue)

    def _catalogue_failed(self, error: CatalogueFault | OSError) -> None:
        """Count a fault. A damaged catalogue is closed; the next save replaces it and writes all records."""
        is_damaged = isinstance(error, CatalogueFault) and error.damaged
        if isinstance(error, CatalogueFault) and error.is_other_version:
            log.info("The disk cache's catalogue is rebuilt from the blocks: %s", error)
        else:
            self._counters.add(BlockEvent.FAILED, DiskFault.CATALOGUE)
            self._log_fault(error, is_damaged=is_damaged)
        if is_damaged:
            self._close_catalogue()
            self.index.mark_all_unsaved()

    def _log_fault(self, error: CatalogueFault | OSError, *, is_damaged: bool) -> None:
        if is_damaged:
            log.warning("The disk cache's catalogue is damaged (%s); it is rebuilt from the blocks", error)
        elif not self._has_logged_fault:
            self._has_logged_fault = True
            log.warning("The disk cache's catalogue cannot be used (%s); the next start reads headers instead", error)

    def _close_catalogue(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        try:
            if catalogue is not None:
                catalogue.close()
        except CatalogueFault as fault:
            log.warning("The disk cache's catalogue did not close: %s", fault)
