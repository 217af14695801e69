"""Take one block to the disk, or say why not. Runs on the writer's thread; never raises for the disk's sake."""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstrata.disk.catalogue import CatalogueFault
from kvstrata.disk.checksum import fastest
from kvstrata.disk.files import unlink_if_there, write_all
from kvstrata.disk.format import EncodedBlock, encode
from kvstrata.disk.holdings import Holdings
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.reasons import DropReason, Fault, fault_of
from kvstrata.disk.row import BlockRow, write_tally
from kvstrata.disk.space import GivenUp
from kvstrata.disk.strides import Take
from kvstrata.disk.usage import Counters, Event
from kvstrata.errors import ConfigError
from kvstrata.tier.block import Block
from kvstrata.tier.daily_budget import DailyBudget, day_of

log = logging.getLogger(__name__)

REMEMBERED_DROPS = 4096
# Notes in the catalogue: a restart does not give a new day's budget.
DAY = "day"
WRITTEN_BYTES = "written_bytes"


@dataclass(frozen=True, slots=True)
class Written:
    file_bytes: int
    expires_in_s: float = math.inf  # if no request asks for its tokens until then


@dataclass(frozen=True, slots=True)
class Dropped:
    reason: DropReason


@dataclass(frozen=True, slots=True)
class WriteFailed:
    reason: Fault
    what: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """`is_done`: nothing is left to delete. Otherwise it is to be called again, and a block may go between."""

    is_done: bool = True


class Publisher:
    """All that the writer's thread does to the disk."""

    def __init__(
        self, holdings: Holdings, options: DiskOptions, counters: Counters, clock: Callable[[], float]
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
        """Catalogue, folder and limit in step, after a start; and some of what was cleared deleted."""
        try:
            self._get_in_step()
            self._holdings.space.keep_to_limit()
            return CaughtUp(is_done=not self._holdings.space.purge())
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def publish(
        self, block: Block, kept: Callable[[], frozenset[bytes]], is_wanted: Callable[[], bool], take: Take
    ) -> Written | Dropped | WriteFailed:
        """`kept`: keys that must stay on disk, asked for when this makes room. `take` paces what is long."""
        try:
            return self._publish(block, kept, is_wanted, take)
        except GivenUp as given_up:
            if given_up.reason is not DropReason.CLEARED:
                self._remember_drop(block.key)
            return Dropped(given_up.reason)
        except (TypeError, ValueError, IsADirectoryError) as error:
            # In itself, or because a folder has its name: the next one may well be.
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
                # The folder vanished, and another program made it anew before we did.
                return WriteFailed(Fault.VANISHED, str(error))

    def _get_in_step(self) -> None:
        self._require_folder()
        self._holdings.rewrite_if_needed()
        self._holdings.compare_once()

    def _publish(
        self, block: Block, kept: Callable[[], frozenset[bytes]], is_wanted: Callable[[], bool], take: Take
    ) -> Written:
        self._get_in_step()
        encoded = encode(block, self._checksum, take)
        # After a parent that found no room, room for its children would come from the chain that they hang on.
        self._holdings.space.make(encoded.nbytes, kept(), may_evict=block.parent not in self._without_room)
        if not self.budget.take(encoded.nbytes, self._clock()):
            raise GivenUp(DropReason.WRITE_BUDGET)
        temporary = self._holdings.folder.temporaries / f"{next(self._serial)}.tmp"
        try:
            disk_bytes = self._write(temporary, encoded, take)
            row = self._row(block, disk_bytes)
            self._holdings.publish(temporary, row, is_wanted)
        except BaseException:
            self.budget.give_back(encoded.nbytes, self._clock())
            self._clean(temporary)
            raise
        self._without_room.pop(block.key, None)
        self._note_written()
        return Written(encoded.nbytes, row.last_use + self._ttl_s - self._clock())

    def _open_budget(self, limit_bytes: int) -> DailyBudget:
        try:
            day, written_bytes = (self._holdings.records.catalogue.note(name) for name in (DAY, WRITTEN_BYTES))
        except CatalogueFault:
            day, written_bytes = 0, 0
        return DailyBudget(limit_bytes, day=day, written_bytes=written_bytes)

    def _note_written(self) -> None:
        now = self._clock()
        try:
            self._holdings.note({DAY: day_of(now), WRITTEN_BYTES: self.budget.written_bytes(now)})
        except CatalogueFault as fault:
            log.debug("The bytes written today were not noted: %s", fault)

    def expire(self, kept: frozenset[bytes]) -> float:
        """The oldest first, and leaves before what they hang on."""
        if self._ttl_s == math.inf:
            return math.inf
        now = self._clock()
        try:
            return min(self._holdings.space.expire(now - self._ttl_s, kept) - now, 0.0) + self._ttl_s
        except (OSError, CatalogueFault) as error:
            self._counters.add(Event.FAILED, fault_of(error) if isinstance(error, OSError) else Fault.CATALOGUE)
            log.warning("Blocks that expired could not be removed: %s", error)
        return self._ttl_s

    def _require_folder(self) -> None:
        """A folder that vanished is a fault once; the next attempt makes it anew. One in it is made anew at once."""
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

    def _write(self, temporary: Path, encoded: EncodedBlock, take: Take) -> int:
        """Real bytes on disk, known once they are there."""
        files = self._holdings.folder.files
        fd = files.create(temporary)
        try:
            write_all(files, fd, encoded.pieces, take)
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
