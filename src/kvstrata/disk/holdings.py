"""The blocks of one folder and what is known of them, kept in step. Knows rows and paths; payloads pass it by.

The files are the truth. A row is written down before its file gets its name and struck after its file is gone: a crash
leaves rows too many, never a file without a row. After a start names are compared with rows all the same, on the
thread that writes and before it writes: a machine that lost power may have lost rows, and no request waits for that.

Lookups never raise and never wait for a disk. What changes the folder raises OSError or CatalogueFault, for the thread
that writes; it has the lock then, which the engine's thread never takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from kvstrata.disk.catalogue import CatalogueFault
from kvstrata.disk.compare import compare
from kvstrata.disk.files import make_folder_if_missing
from kvstrata.disk.folder import CacheFolder, file_name
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.quarantine import Quarantine
from kvstrata.disk.reasons import Damage, DropReason
from kvstrata.disk.records import Records
from kvstrata.disk.row import BlockRow
from kvstrata.disk.row_index import RowIndex
from kvstrata.disk.space import GivenUp, Space
from kvstrata.disk.usage import Counters, Event
from kvstrata.tier.block import BlockId, Tally
from kvstrata.tier.removals import RemovalCause

log = logging.getLogger(__name__)


class Holdings:
    def __init__(
        self,
        folder: CacheFolder,
        options: DiskOptions,
        counters: Counters,
        *,
        is_pinned: Callable[[bytes], bool],
        tally: Tally,
    ) -> None:
        self.folder = folder
        self.tally = tally
        self._counters = counters
        self._is_compared = False
        self.num_losses = 0  # how often blocks were gone that we had not removed
        self.quarantine = Quarantine(folder.quarantine, folder.files, options.limit_bytes)
        self.records = Records(folder, counters)
        self.space = Space(folder, self.records, self.quarantine, counters, options, is_pinned)
        self._account = self.space.account

    @property
    def index(self) -> RowIndex:
        return self.records.index

    # Changes, on the tier's threads.

    def publish(self, temporary: Path, row: BlockRow, is_wanted: Callable[[], bool]) -> None:
        """When this returns the block is on the disk under its name. GivenUp where it is not wanted any more."""
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
        """The row first. What has this name already is counted until the new file has it."""
        self.records.catalogue.add([row])
        try:
            self.folder.files.rename(temporary, path)
        except OSError:
            self.records.restore(row.id)
            raise

    def forget(self, block: BlockId) -> None:
        """A row whose file turned out not to be there, or not to be a file: unless it is by now."""
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
        """A damaged file leaves; never raises, because it is a reader that finds one."""
        self._counters.add(Event.QUARANTINED, reason)
        log.warning("Quarantined a damaged block of the disk cache (%s): %s", reason, file_name(block))
        known = self.index.row(block)
        self.index.hide([block])
        self.records.report_removed([] if known is None else [known], RemovalCause.LOST)
        with self.records.lock:
            if self.index.row(block) is not None:
                return  # it was written again meanwhile
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
        """The folder is another than before."""
        with self.records.lock:
            self.records.close_catalogue()
            self.quarantine.reload()
            self.records.open()
            self._account.look_at_all()
            self._is_compared = False
            self.num_losses += 1
            self.records.removals.set_incomplete()

    def rewrite_if_needed(self) -> None:
        """The catalogue turned out to be damaged."""
        with self.records.lock:
            if self.records.needs_rewrite:
                self.records.rewrite()
                self._account.look_at_catalogue()

    def recheck(self) -> None:
        """Some of the folder was taken away: what is left is compared again."""
        with self.records.lock:
            self.quarantine.reload()
            self._is_compared = False

    def compare_once(self) -> None:
        """Names against rows: what only one side knows is added or removed."""
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
