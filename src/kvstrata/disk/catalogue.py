"""The rows of the blocks on disk, in SQLite, so that a start need not open their files. Knows no files but its own.

A record, not where lookups go: `row_index.py` has the same rows in memory. It can be lost: `records.py` writes it again
from there, or at a start `compare.py` does from the headers of the blocks.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvstrata.disk.files import FILE_MODE
from kvstrata.disk.row import BlockRow
from kvstrata.tier.block import BlockId

SCHEMA_VERSION = 3
# Pages of 4 KiB. Small, because the limit of the tier counts the log too.
PAGES_BEFORE_CHECKPOINT = 64
TIMEOUT_S = 5.0
FORMAT = "format"  # the note that says for which version of the blocks' format the rows were checked

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
# From an older version to the next: its rows stay. Version 2 came with format 1 of the blocks and noted none.
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
    """Raised and caught inside disk/. `damaged`: rebuild it; otherwise the volume has a problem."""

    def __init__(self, cause: sqlite3.Error) -> None:
        super().__init__(str(cause))
        code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        is_misuse = isinstance(cause, sqlite3.ProgrammingError)  # closed
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
        """True where there was nothing."""
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
        """Those that were used last."""
        return self._rows("ORDER BY last_use DESC LIMIT ?", (count,))

    def after(self, block: BlockId | None, count: int) -> list[BlockRow]:
        """Every row, some at a time: those that follow the last of those before."""
        key, part = (b"", "") if block is None else (block.key, block.part)
        return self._rows("WHERE (key, part) > (?, ?) ORDER BY key, part LIMIT ?", (key, part, count))

    def leaving(self) -> list[BlockRow]:
        """Those whose files are to be deleted."""
        return self._rows("NATURAL JOIN leaving", ())

    def _rows(self, which: str, values: tuple[object, ...]) -> list[BlockRow]:
        with self._lock, faults():
            return [_row(fields) for fields in self._ask(f"SELECT {COLUMNS} FROM blocks {which}", values)]

    def add(self, rows: Iterable[BlockRow]) -> None:
        """In place of those with the same id, which do not leave any more."""
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
        """A number kept under a name; 0 where there is none."""
        with self._lock, faults():
            found = self._ask("SELECT value FROM notes WHERE name = ?", (name,))
            return found[0][0] if found else 0

    def set_note(self, name: str, value: int) -> None:
        with self.changing() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; changes inside it join it."""
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
        # A crash of the machine may lose the newest rows: they are found again by their files' names.
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
