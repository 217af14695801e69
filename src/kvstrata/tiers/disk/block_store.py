"""The block store: publishes blocks and keeps files and rows in step. All changes of the folder go through it."""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.tiers.block import Block, BlockId, Tally
from kvstrata.tiers.block_file import Damage, EncodedBlock, encode_block, fastest
from kvstrata.tiers.disk.catalogue import CatalogueFault, Records
from kvstrata.tiers.disk.errors import DropReason, Fault, fault_of
from kvstrata.tiers.disk.filesystem import make_folder_if_missing, unlink_if_there, write_all
from kvstrata.tiers.disk.folder import CacheFolder, Quarantine, file_name
from kvstrata.tiers.disk.index import BlockRow, RowIndex, write_tally
from kvstrata.tiers.disk.scan import compare
from kvstrata.tiers.disk.space import GivenUp, Space
from kvstrata.tiers.interface import BlockEvent, RemovalCause, TierCounters
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.write_limits import DailyWriteBudget, Pace, day_of

log = logging.getLogger(__name__)

REMEMBERED_DROPS = 4096

# Notes in the catalogue: a restart does not give a new day's budget.
DAY = "day"

WRITTEN_BYTES = "written_bytes"


@dataclass(frozen=True, slots=True)
class Written:
    file_bytes: int
    expires_in_s: float = math.inf  # unless a request uses its tokens before


@dataclass(frozen=True, slots=True)
class Dropped:
    reason: DropReason


@dataclass(frozen=True, slots=True)
class WriteFailed:
    reason: Fault
    what: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The result of `catch_up`. `is_done`: nothing is left to delete. Otherwise it must be called again."""

    is_done: bool = True


class Publisher:
    """The disk operations of the writer thread."""

    def __init__(
        self, holdings: Holdings, options: DiskOptions, counters: TierCounters, clock: Callable[[], float]
    ) -> None:
        self._holdings = holdings
        self._counters = counters
        self._checksum = options.checksum or fastest()
        self._ttl_s = math.inf if options.ttl_s is None else options.ttl_s
        self._clock = clock
        self.budget = self._open_budget(options.daily_write_bytes)
        self._serial = itertools.count()
        self._has_vanished = False
        self._without_room: OrderedDict[bytes, None] = OrderedDict()

    def catch_up(self) -> CaughtUp | WriteFailed:
        """Bring catalogue, folder and limit in step after a start, and delete some of the cleared blocks."""
        try:
            self._get_in_step()
            self._holdings.space.keep_to_limit()
            return CaughtUp(is_done=not self._holdings.space.purge())
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def publish(
        self, block: Block, kept: Callable[[], frozenset[bytes]], is_wanted: Callable[[], bool], pace: Pace
    ) -> Written | Dropped | WriteFailed:
        """Write a block. `kept` returns the keys that evictions must keep. `pace` throttles long work."""
        try:
            return self._publish(block, kept, is_wanted, pace)
        except GivenUp as given_up:
            if given_up.reason is not DropReason.CLEARED:
                self._remember_drop(block.key)
            return Dropped(given_up.reason)
        except (TypeError, ValueError, IsADirectoryError) as error:
            # The block itself is unfit, or a folder has its name: the next block may well be writable.
            log.warning("A block cannot be written: %s", error)
            return Dropped(DropReason.UNWRITABLE)
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def _failed(self, error: OSError | CatalogueFault | ConfigError) -> WriteFailed:
        match error:
            case CatalogueFault():
                self._holdings.records.needs_rewrite |= error.damaged
                return WriteFailed(Fault.CATALOGUE, str(error))
            case OSError():
                return WriteFailed(fault_of(error), str(error))
            case _:
                # The folder vanished, and another program recreated it before this tier did.
                return WriteFailed(Fault.VANISHED, str(error))

    def _get_in_step(self) -> None:
        self._require_folder()
        self._holdings.rewrite_if_needed()
        self._holdings.compare_once()

    def _publish(
        self, block: Block, kept: Callable[[], frozenset[bytes]], is_wanted: Callable[[], bool], pace: Pace
    ) -> Written:
        self._get_in_step()
        encoded = encode_block(block, self._checksum, pace)
        # After a parent that did not fit, space for its children would come from evicting their own chain.
        self._holdings.space.make(encoded.nbytes, kept(), may_evict=block.parent not in self._without_room)
        if not self.budget.take(encoded.nbytes, self._clock()):
            raise GivenUp(DropReason.WRITE_BUDGET)
        temporary = self._holdings.folder.temporaries / f"{next(self._serial)}.tmp"
        try:
            disk_bytes = self._write(temporary, encoded, pace)
            row = self._row(block, disk_bytes)
            self._holdings.publish(temporary, row, is_wanted)
        except BaseException:
            self.budget.give_back(encoded.nbytes, self._clock())
            self._clean(temporary)
            raise
        self._without_room.pop(block.key, None)
        self._note_written()
        return Written(encoded.nbytes, row.last_use + self._ttl_s - self._clock())

    def _open_budget(self, limit_bytes: int) -> DailyWriteBudget:
        try:
            day, written_bytes = (self._holdings.records.catalogue.note(name) for name in (DAY, WRITTEN_BYTES))
        except CatalogueFault:
            day, written_bytes = 0, 0
        return DailyWriteBudget(limit_bytes, day=day, written_bytes=written_bytes)

    def _note_written(self) -> None:
        now = self._clock()
        try:
            self._holdings.note({DAY: day_of(now), WRITTEN_BYTES: self.budget.written_bytes(now)})
        except CatalogueFault as fault:
            log.debug("The bytes written today were not noted: %s", fault)

    def expire(self, kept: frozenset[bytes]) -> float:
        """Delete expired blocks, oldest first, children before parents. Return the seconds until the next expires."""
        if self._ttl_s == math.inf:
            return math.inf
        now = self._clock()
        try:
            return min(self._holdings.space.expire(now - self._ttl_s, kept) - now, 0.0) + self._ttl_s
        except (OSError, CatalogueFault) as error:
            self._counters.add(BlockEvent.FAILED, fault_of(error) if isinstance(error, OSError) else Fault.CATALOGUE)
            log.warning("Blocks that expired could not be removed: %s", error)
        return self._ttl_s

    def _require_folder(self) -> None:
        """Raise once if the folder vanished; the next attempt recreates it. Recreate a missing subfolder at once."""
        folder = self._holdings.folder
        if folder.is_intact():
            self._has_vanished = False
            if folder.make_missing():
                self._holdings.recheck()
            return
        if not self._has_vanished:
            self._has_vanished = True
            raise FileNotFoundError(2, "The folder of the disk cache is gone", str(folder.directory))
        folder.acquire()
        folder.remove_temporaries()
        self._holdings.reopen()
        self._has_vanished = False

    def _write(self, temporary: Path, encoded: EncodedBlock, pace: Pace) -> int:
        """Write and sync a file. Return the bytes that it takes on the volume, which are known only afterwards."""
        files = self._holdings.folder.files
        fd = files.create(temporary)
        try:
            write_all(files, fd, encoded.pieces, pace)
            files.sync(fd)
            return files.status(fd).disk_bytes
        finally:
            files.close(fd)

    def _row(self, block: Block, disk_bytes: int) -> BlockRow:
        now = self._clock()
        labels = self._holdings.tally(block.description, block.tensor_bytes)
        where = (block.id, block.parent, block.root, block.start, block.num_tokens)
        return BlockRow(*where, disk_bytes, min(block.last_use, now), 0, now, write_tally(labels))

    def _clean(self, temporary: Path) -> None:
        try:
            unlink_if_there(self._holdings.folder.files, temporary)
        except OSError as error:
            log.warning("A temporary file stays until the next start: %s", error)

    def _remember_drop(self, key: bytes) -> None:
        self._without_room[key] = None
        if len(self._without_room) > REMEMBERED_DROPS:
            self._without_room.popitem(last=False)


class Holdings:
    def __init__(
        self,
        folder: CacheFolder,
        options: DiskOptions,
        counters: TierCounters,
        *,
        is_pinned: Callable[[bytes], bool],
        tally: Tally,
    ) -> None:
        self.folder = folder
        self.tally = tally
        self._counters = counters
        self._is_compared = False
        self.num_losses = 0  # how often blocks were gone that the tier had not removed
        self.quarantine = Quarantine(folder.quarantine, folder.files, options.limit_bytes)
        self.records = Records(folder, counters)
        self.space = Space(folder, self.records, self.quarantine, counters, options, is_pinned)
        self._account = self.space.account

    @property
    def index(self) -> RowIndex:
        return self.records.index

    # Changes, on the tier's threads.

    def publish(self, temporary: Path, row: BlockRow, is_wanted: Callable[[], bool]) -> None:
        """Publish a file: when this returns, it has its name on the disk. GivenUp if the block is unwanted by now."""
        path = self.folder.path(row.id)
        files = self.folder.files
        with self.records.lock:
            if not is_wanted():
                raise GivenUp(DropReason.CLEARED)
            try:
                if make_folder_if_missing(files, path.parent):
                    files.sync_folder(self.folder.blocks)
                self._rename(temporary, path, row)
                # The file is there from here on, whatever the sync says.
                is_kept = self.records.publish(row, is_wanted)
                files.sync_folder(path.parent)
            finally:
                self._account.look_at_shard(path.parent)
                self._account.look_at_catalogue()
        if not is_kept:
            raise GivenUp(DropReason.CLEARED)

    def _rename(self, temporary: Path, path: Path, row: BlockRow) -> None:
        """Add the row, then rename the file. An older file of this name is counted until the new one replaces it."""
        self.records.catalogue.add([row])
        try:
            self.folder.files.rename(temporary, path)
        except OSError:
            self.records.restore(row.id)
            raise

    def forget(self, block: BlockId) -> None:
        """Remove the row of a block whose file is missing or not a plain file, unless the file is there by now."""
        with self.records.lock:
            try:
                is_there = self.folder.files.status(self.folder.path(block)).is_plain
            except FileNotFoundError:
                is_there = False
            except OSError:
                return
            row = self.index.row(block)
            if row is not None and not is_there:
                self.records.forget([row], RemovalCause.LOST)
                self._strike([row])

    def isolate(self, block: BlockId, reason: Damage) -> None:
        """Quarantine a damaged file. Never raises, because readers call it."""
        self._counters.add(BlockEvent.QUARANTINED, reason)
        log.warning("Quarantined a damaged block of the disk cache (%s): %s", reason, file_name(block))
        known = self.index.row(block)
        self.index.hide([block])
        self.records.report_removed([] if known is None else [known], RemovalCause.LOST)
        with self.records.lock:
            if self.index.row(block) is not None:
                return  # the block was written again meanwhile
            try:
                self.quarantine.take(self.folder.path(block), reason)
            except OSError as error:
                log.warning("It could not be moved or deleted: %s", error)
                return
            row = self.index.leaving.row(block)
            if row is not None:
                self.index.left([row])
                self.records.victims.removed([row])
                self._strike([row])

    def note(self, notes: Mapping[str, int]) -> None:
        with self.records.lock, self.records.catalogue.changing():
            for name, value in notes.items():
                self.records.catalogue.set_note(name, value)
        self._account.look_at_catalogue()

    def reopen(self) -> None:
        """Read catalogue and quarantine again, because the folder is another than before."""
        with self.records.lock:
            self.records.close_catalogue()
            self.quarantine.reload()
            self.records.open()
            self._account.look_at_all()
            self._is_compared = False
            self.num_losses += 1
            self.records.removals.set_incomplete()

    def rewrite_if_needed(self) -> None:
        """Rewrite the catalogue if it turned out to be damaged."""
        with self.records.lock:
            if self.records.needs_rewrite:
                self.records.rewrite()
                self._account.look_at_catalogue()

    def recheck(self) -> None:
        """Require another comparison, because a part of the folder was removed."""
        with self.records.lock:
            self.quarantine.reload()
            self._is_compared = False

    def compare_once(self) -> None:
        """Compare file names with rows: add rows for unknown files, remove rows without a file."""
        if self._is_compared:
            return
        compared = compare(self.folder, self.records, self.quarantine, self._counters, self.tally)
        with self.records.lock:
            self.num_losses += compared.has_lost
            self._account.look_at_all()
            self._account.look_at_strays(compared.strays)
            self._is_compared = True

    def close(self) -> None:
        with self.records.lock:
            self.records.close()

    def _strike(self, rows: list[BlockRow]) -> None:
        try:
            self.records.strike(rows)
            self._account.look_at_catalogue()
        except CatalogueFault as fault:
            self.records.fail(fault)
