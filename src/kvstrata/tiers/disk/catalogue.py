"""The catalogue of the folder in SQLite, and the records that keep it in step with the index."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstrata.tiers.block import BASE, BlockId
from kvstrata.tiers.block_file import FORMAT_VERSION
from kvstrata.tiers.disk.errors import Fault
from kvstrata.tiers.disk.filesystem import FILE_MODE, unlink_if_there
from kvstrata.tiers.disk.folder import CacheFolder
from kvstrata.tiers.disk.index import BlockRow, RowIndex, Victims
from kvstrata.tiers.interface import BlockEvent, BlockRemoval, RemovalCause, RemovalLog, TierCounters

SCHEMA_VERSION = 3

# Pages of 4 KiB. Small, because the limit of the tier counts the log too.
PAGES_BEFORE_CHECKPOINT = 64

TIMEOUT_S = 5.0

FORMAT = "format"  # name of the note: the version of the block format for which the rows were checked

PRIMARY_CODE = 0xFF

VOLUME_PROBLEMS = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
    }
)

SCHEMA = """
CREATE TABLE blocks (
    key BLOB NOT NULL, part TEXT NOT NULL, parent BLOB NOT NULL, root BLOB NOT NULL,
    start INTEGER NOT NULL, num_tokens INTEGER NOT NULL, disk_bytes INTEGER NOT NULL,
    last_use REAL NOT NULL, uses INTEGER NOT NULL, created REAL NOT NULL, tally TEXT NOT NULL,
    PRIMARY KEY (key, part)
) WITHOUT ROWID;
CREATE TABLE leaving (key BLOB NOT NULL, part TEXT NOT NULL, PRIMARY KEY (key, part)) WITHOUT ROWID;
CREATE TABLE notes (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

# From an older schema to the next: the rows stay. Version 2 came with block format 1 and did not note it.
MIGRATIONS = {
    2: f"""
DROP INDEX by_parent;
DROP INDEX by_use;
CREATE TABLE leaving (key BLOB NOT NULL, part TEXT NOT NULL, PRIMARY KEY (key, part)) WITHOUT ROWID;
INSERT OR REPLACE INTO notes VALUES ('{FORMAT}', 1);
"""
}

COLUMNS = "key, part, parent, root, start, num_tokens, disk_bytes, last_use, uses, created, tally"


class CatalogueFault(Exception):
    """A fault of the catalogue, inside disk/. `damaged`: it must be rebuilt; otherwise the volume has a problem."""

    def __init__(self, cause: sqlite3.Error) -> None:
        super().__init__(str(cause))
        code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        is_misuse = isinstance(cause, sqlite3.ProgrammingError)  # the connection is closed
        self.damaged = not is_misuse and code & PRIMARY_CODE not in VOLUME_PROBLEMS


@contextmanager
def faults() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise CatalogueFault(error) from error


class Catalogue:
    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        with faults():
            self._connection = _connect(path)
            try:
                self.is_new = self._prepare()
            except sqlite3.Error:
                self._connection.close()
                raise

    def _prepare(self) -> bool:
        """Create or migrate the tables. Return whether they were created."""
        version = self._version()
        if version == 0 and not self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            return True
        while version in MIGRATIONS:
            self._connection.executescript(f"BEGIN; {MIGRATIONS[version]} PRAGMA user_version = {version + 1}; COMMIT;")
            version = self._version()
        if version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"it is of version {version}, and this is {SCHEMA_VERSION}")
        return False

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def newest(self, count: int) -> list[BlockRow]:
        """Return the rows that were used last."""
        return self._rows("ORDER BY last_use DESC LIMIT ?", (count,))

    def after(self, block: BlockId | None, count: int) -> list[BlockRow]:
        """Return the rows that follow a block in key order, to read every row, some at a time."""
        key, part = (b"", "") if block is None else (block.key, block.part)
        return self._rows("WHERE (key, part) > (?, ?) ORDER BY key, part LIMIT ?", (key, part, count))

    def leaving(self) -> list[BlockRow]:
        """Return the rows whose files are to be deleted."""
        return self._rows("NATURAL JOIN leaving", ())

    def _rows(self, which: str, values: tuple[object, ...]) -> list[BlockRow]:
        with self._lock, faults():
            return [_row(fields) for fields in self._ask(f"SELECT {COLUMNS} FROM blocks {which}", values)]

    def add(self, rows: Iterable[BlockRow]) -> None:
        """Add rows in place of those with the same id, and cancel pending deletes of these ids."""
        rows = list(rows)
        with self.changing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (_fields(row) for row in rows)
            )
            self._delete("leaving", (row.id for row in rows))

    def remove(self, blocks: Iterable[BlockId]) -> None:
        blocks = list(blocks)
        with self.changing():
            self._delete("blocks", blocks)
            self._delete("leaving", blocks)

    def add_leaving(self, blocks: Iterable[BlockId]) -> None:
        with self.changing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO leaving VALUES (?, ?)", ((block.key, block.part) for block in blocks)
            )

    def touch(self, uses: Mapping[BlockId, tuple[int, float]]) -> None:
        with self.changing() as connection:
            connection.executemany(
                "UPDATE blocks SET uses = uses + ?, last_use = max(last_use, ?) WHERE key = ? AND part = ?",
                ((count, when, block.key, block.part) for block, (count, when) in uses.items()),
            )

    def note(self, name: str) -> int:
        """Return the number kept under a name; 0 if there is none."""
        with self._lock, faults():
            found = self._ask("SELECT value FROM notes WHERE name = ?", (name,))
            return found[0][0] if found else 0

    def set_note(self, name: str, value: int) -> None:
        with self.changing() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction; changes inside it join it."""
        with self._lock, faults():
            if self._connection.in_transaction:
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                self._undo()
                raise

    def close(self) -> None:
        with self._lock, faults():
            self._connection.close()

    def _undo(self) -> None:
        # SQLite has already rolled back after some faults, a full volume among them.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _delete(self, table: str, blocks: Iterable[BlockId]) -> None:
        self._connection.executemany(
            f"DELETE FROM {table} WHERE key = ? AND part = ?", ((block.key, block.part) for block in blocks)
        )

    def _ask(self, query: str, values: tuple[object, ...] = ()) -> list[tuple]:
        return self._connection.execute(query, values).fetchall()


def _connect(path: Path) -> sqlite3.Connection:
    # SQLite gives its log the mode of the file that it finds.
    path.touch(mode=FILE_MODE)
    connection = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may lose the newest rows: the scan finds them again by their file names.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {PAGES_BEFORE_CHECKPOINT}")
    except BaseException:
        connection.close()
        raise
    return connection


def _fields(row: BlockRow) -> tuple[object, ...]:
    identity = (row.id.key, row.id.part, row.parent, row.root, row.start, row.num_tokens)
    return (*identity, row.disk_bytes, row.last_use, row.uses, row.created, row.tally)


def _row(fields: tuple) -> BlockRow:
    key, part, parent, root, *numbers, tally = fields
    try:
        row = BlockRow(BlockId(key, part), bytes(parent), bytes(root), *numbers, tally=tally)
        sum(numbers)
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"a row that makes no sense: {error}") from error
    return row


log = logging.getLogger(__name__)

NUM_ROWS_AT_ONCE = 512

# Takes some tenths of a second. The tier's thread loads the other rows, while the server answers.
NUM_ROWS_AT_START = 8_192


class Touches:
    """Uses of blocks, written to the catalogue later: a lookup must not wait for the disk."""

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
    def __init__(self, folder: CacheFolder, counters: TierCounters) -> None:
        self._folder = folder
        self._counters = counters
        self.lock = threading.RLock()  # held over file operations by the thread that changes the folder
        self.touches = Touches()
        self.removals = RemovalLog()
        self.needs_rewrite = False
        self.open()

    def open(self) -> None:
        """Open the catalogue and load its newest rows; replace a damaged one. CatalogueFault if the volume fails."""
        try:
            self._open()
        except CatalogueFault as fault:
            if not fault.damaged:
                raise
            self._say_damaged(fault)
            self._remove_catalogue()
            self._open()

    def _say_damaged(self, fault: CatalogueFault) -> None:
        self._counters.add(BlockEvent.FAILED, Fault.CATALOGUE)
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
        """Load the rows that were too many for the start, or were written for another format of the blocks."""
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
                    # These rows count when their files turn out to be readable.
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
        """Write a new catalogue from memory."""
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
        self._counters.add(BlockEvent.FAILED, Fault.CATALOGUE)
        self.needs_rewrite = self.needs_rewrite or fault.damaged

    def write_touches(self) -> None:
        touched = self.touches.take()
        if touched:
            self.index.touch(touched)
            self.catalogue.touch(touched)

    # Files that were found or published, and files that are gone.

    def found(self, rows: Sequence[BlockRow]) -> None:
        """Add rows of files that had none, as a comparison finds them."""
        self.catalogue.add(rows)
        self.index.add_found(rows)
        self.victims.added(rows)

    def finish_comparing(self) -> None:
        """End the comparison: every file has its row, and doubted rows without a readable file are removed."""
        self.catalogue.remove(self.doubted.keys() - {row.id for row in self.index.rows()})
        self.catalogue.set_note(FORMAT, FORMAT_VERSION)
        self.doubted = {}
        self._is_trusted = True
        self.index.finish_comparing()

    def publish(self, row: BlockRow, is_wanted: Callable[[], bool]) -> bool:
        """Add the row of a file that has its name now. False: the block is unwanted, and its delete is pending."""
        is_kept = self.index.add_if(row, is_wanted)
        self.victims.added([row])
        return is_kept

    def restore(self, block: BlockId) -> None:
        """Put back the former row of the catalogue, because the file of the new row could not be renamed."""
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
        """Remove the rows of deleted files from memory, where the removal counts at once."""
        self.index.discard(row.id for row in rows)
        self.victims.removed(rows)
        self.report_removed(rows, cause)

    def report_removed(self, rows: Iterable[BlockRow], cause: RemovalCause) -> None:
        """Report rows that left the index. Loss of a base with children makes the log incomplete."""
        rows = list(rows)
        self.removals.add(BlockRemoval(row.id, row.start, row.start + row.num_tokens, cause) for row in rows)
        if cause is RemovalCause.LOST and any(row.id.part == BASE and self.index.num_after(row.id.key) for row in rows):
            self.removals.set_incomplete()

    def strike(self, rows: Sequence[BlockRow]) -> None:
        """Remove rows from the catalogue. CatalogueFault: it keeps extra rows, which the next start removes."""
        self.catalogue.remove(row.id for row in rows)

    def left(self, rows: Sequence[BlockRow]) -> None:
        """Forget hidden rows whose files are gone."""
        self.index.left(rows)
        self.victims.removed(rows)
        self.strike(rows)

    def note_leaving(self) -> None:
        """Write pending deletes to the catalogue, so that cleared blocks stay cleared whenever the process ends."""
        blocks = self.index.leaving.note()
        if not blocks:
            return
        try:
            self.catalogue.add_leaving(blocks)
        except CatalogueFault:
            self.needs_rewrite = True
            raise
