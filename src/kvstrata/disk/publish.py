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
from kvstrata.disk.checksum import Checksum
from kvstrata.disk.daily_budget import DailyBudget
from kvstrata.disk.files import unlink_if_there, write_all
from kvstrata.disk.format import EncodedBlock, encode
from kvstrata.disk.reasons import Drop, Fault, fault_of
from kvstrata.disk.room import GivenUp
from kvstrata.disk.row import Row, write_tally
from kvstrata.disk.shelf import Shelf
from kvstrata.disk.strides import Take
from kvstrata.errors import ConfigError
from kvstrata.tier.block import Block

log = logging.getLogger(__name__)

REMEMBERED_DROPS = 4096


@dataclass(frozen=True, slots=True)
class Written:
    file_bytes: int
    last_use: float = math.inf  # of its tokens


@dataclass(frozen=True, slots=True)
class Dropped:
    reason: Drop


@dataclass(frozen=True, slots=True)
class Failed:
    reason: Fault
    what: str


@dataclass(frozen=True, slots=True)
class SettledIn:
    """`is_done`: nothing is left to delete. Otherwise it is to be called again, and a block may go between."""

    is_done: bool = True


class Publisher:
    def __init__(self, shelf: Shelf, checksum: Checksum, clock: Callable[[], float], budget: DailyBudget) -> None:
        self._shelf = shelf
        self._budget = budget
        self._checksum = checksum
        self._clock = clock
        self._serial = itertools.count()
        self._has_vanished = False
        self._without_room: OrderedDict[bytes, None] = OrderedDict()

    def settle_in(self) -> SettledIn | Failed:
        """Catalogue, folder and limit in step, after a start; and some of what was cleared deleted."""
        try:
            self._put_in_step()
            self._shelf.keep_to_limit()
            return SettledIn(is_done=not self._shelf.purge())
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def publish(
        self, block: Block, kept: Callable[[], frozenset[bytes]], is_wanted: Callable[[], bool], take: Take
    ) -> Written | Dropped | Failed:
        """`kept`: keys that must stay on disk, asked for when this makes room. `take` paces what is long."""
        try:
            return self._publish(block, kept, is_wanted, take)
        except GivenUp as given_up:
            if given_up.reason is not Drop.CLEARED:
                self._remember_drop(block.key)
            return Dropped(given_up.reason)
        except (TypeError, ValueError, IsADirectoryError) as error:
            # In itself, or because a folder has its name: the next one may well be.
            log.warning("A block cannot be written: %s", error)
            return Dropped(Drop.UNWRITABLE)
        except (OSError, CatalogueFault, ConfigError) as error:
            return self._failed(error)

    def _failed(self, error: OSError | CatalogueFault | ConfigError) -> Failed:
        match error:
            case CatalogueFault():
                self._shelf.records.needs_rewrite |= error.damaged
                return Failed(Fault.CATALOGUE, str(error))
            case OSError():
                return Failed(fault_of(error), str(error))
            case _:
                # The folder vanished, and another program made it anew before we did.
                return Failed(Fault.VANISHED, str(error))

    def _put_in_step(self) -> None:
        self._require_folder()
        self._shelf.rewrite_if_needed()
        self._shelf.compare_once()

    def _publish(
        self, block: Block, kept: Callable[[], frozenset[bytes]], is_wanted: Callable[[], bool], take: Take
    ) -> Written:
        self._put_in_step()
        encoded = encode(block, self._checksum, take)
        # After a parent that found no room, room for its children would come from the chain that they hang on.
        self._shelf.make_room(encoded.nbytes, kept(), may_evict=block.parent not in self._without_room)
        if not self._budget.take(encoded.nbytes, self._clock()):
            raise GivenUp(Drop.WRITE_BUDGET)
        temporary = self._shelf.folder.temporaries / f"{next(self._serial)}.tmp"
        try:
            disk_bytes = self._write(temporary, encoded, take)
            row = self._row(block, disk_bytes)
            self._shelf.publish(temporary, row, is_wanted)
        except BaseException:
            self._budget.give_back(encoded.nbytes, self._clock())
            self._clean(temporary)
            raise
        self._without_room.pop(block.key, None)
        return Written(encoded.nbytes, row.last_use)

    def _require_folder(self) -> None:
        """A folder that vanished is a fault once; the next attempt makes it anew. One in it is made anew at once."""
        folder = self._shelf.folder
        if folder.is_intact():
            self._has_vanished = False
            if folder.make_missing():
                self._shelf.recheck()
            return
        if not self._has_vanished:
            self._has_vanished = True
            raise FileNotFoundError(2, "The folder of the disk cache is gone", str(folder.directory))
        folder.acquire()
        folder.remove_temporaries()
        self._shelf.reopen()
        self._has_vanished = False

    def _write(self, temporary: Path, encoded: EncodedBlock, take: Take) -> int:
        """Real bytes on disk, known once they are there."""
        files = self._shelf.folder.files
        fd = files.create(temporary)
        try:
            write_all(files, fd, encoded.pieces, take)
            files.sync(fd)
            return files.status(fd).disk_bytes
        finally:
            files.close(fd)

    def _row(self, block: Block, disk_bytes: int) -> Row:
        now = self._clock()
        labels = self._shelf.tally(block.description, {name: tensor.nbytes for name, tensor in block.tensors.items()})
        where = (block.id, block.parent, block.root, block.start, block.num_tokens)
        return Row(*where, disk_bytes, min(block.last_use, now), 0, now, write_tally(labels))

    def _clean(self, temporary: Path) -> None:
        try:
            unlink_if_there(self._shelf.folder.files, temporary)
        except OSError as error:
            log.warning("A temporary file stays until the next start: %s", error)

    def _remember_drop(self, key: bytes) -> None:
        self._without_room[key] = None
        if len(self._without_room) > REMEMBERED_DROPS:
            self._without_room.popitem(last=False)
