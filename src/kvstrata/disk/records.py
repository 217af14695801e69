"""What is known of the blocks on disk: rows in memory, their order, and the catalogue that remembers them.

What is in memory is true, and the catalogue follows. So a catalogue that turns out to be damaged is written anew from
memory, and nothing that is asked for while the server runs waits for SQLite. The tier's threads change things here,
with the lock, which the engine's thread never takes; lookups come from anywhere.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence

from kvstrata.disk.catalogue import FORMAT, Catalogue, CatalogueFault
from kvstrata.disk.files import unlink_if_there
from kvstrata.disk.folder import CacheFolder
from kvstrata.disk.format import FORMAT_VERSION
from kvstrata.disk.reasons import Fault
from kvstrata.disk.row import BlockRow
from kvstrata.disk.row_index import RowIndex
from kvstrata.disk.usage import Counters, Event
from kvstrata.disk.victims import Victims
from kvstrata.tier.block import BASE, BlockId
from kvstrata.tier.removals import BlockRemoval, RemovalCause, RemovalLog

log = logging.getLogger(__name__)

NUM_ROWS_AT_ONCE = 512
# Some tenths of a second. The rest follow on the tier's thread, while the server answers.
NUM_ROWS_AT_START = 8_192


class Touches:
    """Uses of blocks, written down later: a lookup must not wait for the disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[BlockId, tuple[int, float]] = {}

    def add(self, blocks: Iterable[BlockId], now: float) -> None:
        with self._lock:
            for block in blocks:
                count, _ = self._touched.get(block, (0, 0.0))
                self._touched[block] = (count + 1, now)

    def take(self) -> dict[BlockId, tuple[int, float]]:
        with self._lock:
            touched, self._touched = self._touched, {}
            return touched


class Records:
    def __init__(self, folder: CacheFolder, counters: Counters) -> None:
        self._folder = folder
        self._counters = counters
        self.lock = threading.RLock()  # held over file operations by the thread that changes the folder
        self.touches = Touches()
        self.removals = RemovalLog()
        self.needs_rewrite = False
        self.open()

    def open(self) -> None:
        """The rows of the catalogue that is there. CatalogueFault where the volume is why there is none."""
        try:
            self._open()
        except CatalogueFault as fault:
            if not fault.damaged:
                raise
            self._say_damaged(fault)
            self._remove_catalogue()
            self._open()

    def _say_damaged(self, fault: CatalogueFault) -> None:
        self._counters.add(Event.FAILED, Fault.CATALOGUE)
        log.warning("The disk cache's catalogue is damaged (%s); it is rebuilt from the blocks", fault)

    def _open(self) -> None:
        self.catalogue = Catalogue(self._folder.catalogue)
        self.index = RowIndex()
        self.doubted: dict[BlockId, BlockRow] = {}
        self.needs_rewrite = False
        try:
            leaving = {row.id: row for row in self.catalogue.leaving()}
            self.index.leaving.take(leaving, sum(row.disk_bytes for row in leaving.values()), is_noted=True)
            self._is_trusted = self.catalogue.note(FORMAT) == FORMAT_VERSION
            if self._is_trusted:
                self._load([row for row in self.catalogue.newest(NUM_ROWS_AT_START) if row.id not in leaving])
        except CatalogueFault:
            self.close_catalogue()
            raise
        self.victims = Victims(self.index)

    def load_rest(self) -> None:
        """What was too much for the start, or was written for another format of the blocks."""
        last: BlockId | None = None
        self.index.begin_comparing()
        try:
            while rows := self.catalogue.after(last, NUM_ROWS_AT_ONCE):
                last = rows[-1].id
                new = [row for row in rows if self.index.row(row.id) is None and not self.index.leaving.row(row.id)]
                if self._is_trusted:
                    self._load(new)
                    self.victims.added(new)
                else:
                    # They count when their files turn out to be readable.
                    self.doubted.update({row.id: row for row in new})
        except CatalogueFault as fault:
            if not fault.damaged:
                raise
            self._say_damaged(fault)
            self.index.forget_all()
            self.victims = Victims(self.index)
            self.rewrite()

    def _load(self, rows: Sequence[BlockRow]) -> None:
        for row in rows:
            if self.index.contradicts(row):
                raise CatalogueFault(sqlite3.DatabaseError("a key of two roots"))
            self.index.add_found([row])

    def rewrite(self) -> None:
        """A new catalogue, from what is in memory."""
        self.close_catalogue()
        self._remove_catalogue()
        self.catalogue = Catalogue(self._folder.catalogue)
        leaving = self.index.leaving.rows()
        rows = [*self.index.rows(), *leaving]
        for first in range(0, len(rows), NUM_ROWS_AT_ONCE):
            self.catalogue.add(rows[first : first + NUM_ROWS_AT_ONCE])
        self.catalogue.add_leaving(row.id for row in leaving)
        self.catalogue.set_note(FORMAT, FORMAT_VERSION)
        self.needs_rewrite = False

    def close(self) -> None:
        try:
            self.write_touches()
            self.note_leaving()
        except CatalogueFault as fault:
            self.fail(fault)
        self.close_catalogue()

    def close_catalogue(self) -> None:
        try:
            self.catalogue.close()
        except CatalogueFault as fault:
            log.warning("The disk cache's catalogue did not close: %s", fault)

    def _remove_catalogue(self) -> None:
        for path in self._folder.catalogue_paths():
            unlink_if_there(self._folder.files, path)

    def fail(self, fault: CatalogueFault) -> None:
        self._counters.add(Event.FAILED, Fault.CATALOGUE)
        self.needs_rewrite = self.needs_rewrite or fault.damaged

    def write_touches(self) -> None:
        touched = self.touches.take()
        if touched:
            self.index.touch(touched)
            self.catalogue.touch(touched)

    # Files that are there, and files that are gone.

    def found(self, rows: Sequence[BlockRow]) -> None:
        """Files without a row, as a comparison meets them."""
        self.catalogue.add(rows)
        self.index.add_found(rows)
        self.victims.added(rows)

    def finish_comparing(self) -> None:
        """Every file has its row."""
        self.catalogue.remove(self.doubted.keys() - {row.id for row in self.index.rows()})
        self.catalogue.set_note(FORMAT, FORMAT_VERSION)
        self.doubted = {}
        self._is_trusted = True
        self.index.finish_comparing()

    def publish(self, row: BlockRow, is_wanted: Callable[[], bool]) -> bool:
        """A file that has its name now. False: it is not wanted any more, and leaves."""
        is_kept = self.index.add_if(row, is_wanted)
        self.victims.added([row])
        return is_kept

    def restore(self, block: BlockId) -> None:
        """The catalogue has a row for a file that did not come: put back what it had."""
        try:
            with self.catalogue.changing():
                leaving = self.index.leaving.row(block)
                self.catalogue.remove([block])
                self.catalogue.add(row for row in (self.index.row(block), leaving) if row is not None)
                self.catalogue.add_leaving([] if leaving is None else [block])
        except CatalogueFault as fault:
            self.fail(fault)
            self.needs_rewrite = True

    def forget(self, rows: Sequence[BlockRow], cause: RemovalCause) -> None:
        """Their files are gone: in memory, where it counts at once."""
        self.index.discard(row.id for row in rows)
        self.victims.removed(rows)
        self.report_removed(rows, cause)

    def report_removed(self, rows: Iterable[BlockRow], cause: RemovalCause) -> None:
        """Rows that the index has no longer. What follows a lost block cannot be reached without it."""
        rows = list(rows)
        self.removals.add(BlockRemoval(row.id, row.start, row.start + row.num_tokens, cause) for row in rows)
        if cause is RemovalCause.LOST and any(row.id.part == BASE and self.index.num_after(row.id.key) for row in rows):
            self.removals.set_incomplete()

    def strike(self, rows: Sequence[BlockRow]) -> None:
        """And in the catalogue. CatalogueFault: it has rows too many, which the next start takes out."""
        self.catalogue.remove(row.id for row in rows)

    def left(self, rows: Sequence[BlockRow]) -> None:
        """Files of rows that were taken away before are gone."""
        self.index.left(rows)
        self.victims.removed(rows)
        self.strike(rows)

    def note_leaving(self) -> None:
        """So that what was cleared stays so, whenever the process ends."""
        blocks = self.index.leaving.note()
        if not blocks:
            return
        try:
            self.catalogue.add_leaving(blocks)
        except CatalogueFault:
            self.needs_rewrite = True
            raise
