"""The catalogue: a copy of the index in SQLite, which makes a start fast.

It is written after the files and read only at a start. The files are the authority: losing the catalogue, damage of it
or another version costs the time to read all headers, and the counts of uses. A single thread uses it at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstrata.tiers.block import BlockId
from kvstrata.tiers.block_file import FORMAT_VERSION
from kvstrata.tiers.disk.filesystem import FILE_MODE
from kvstrata.tiers.disk.index import BlockIndex, BlockRecord

SCHEMA_VERSION = 4

# Pages of 4 KiB. Small, because the limit of the tier counts the log too.
PAGES_BEFORE_CHECKPOINT = 64

TIMEOUT_S = 5.0

BLOCK_FORMAT = "block_format"  # name of the property: the version of the block format of all records

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

SCHEMA = f"""
CREATE TABLE blocks (
    key BLOB NOT NULL, part TEXT NOT NULL, parent BLOB NOT NULL, root BLOB NOT NULL,
    start INTEGER NOT NULL, num_tokens INTEGER NOT NULL, disk_bytes INTEGER NOT NULL,
    last_use REAL NOT NULL, uses INTEGER NOT NULL, created REAL NOT NULL, labels TEXT NOT NULL,
    PRIMARY KEY (key, part)
) WITHOUT ROWID;
CREATE TABLE properties (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO properties VALUES ('{BLOCK_FORMAT}', {FORMAT_VERSION});
PRAGMA user_version = {SCHEMA_VERSION};
"""

COLUMNS = "key, part, parent, root, start, num_tokens, disk_bytes, last_use, uses, created, labels"


class CatalogueFault(Exception):
    """A fault of the catalogue, inside disk/. `damaged`: it must be replaced; otherwise the volume has a problem."""

    def __init__(self, cause: sqlite3.Error) -> None:
        super().__init__(str(cause))
        code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        is_misuse = isinstance(cause, sqlite3.ProgrammingError)  # the connection is closed
        self.damaged = not is_misuse and code & PRIMARY_CODE not in VOLUME_PROBLEMS
        self.is_other_version = isinstance(cause, OtherVersion)


class OtherVersion(sqlite3.DatabaseError):
    """The catalogue has another schema, or records of another block format."""


@contextmanager
def faults() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise CatalogueFault(error) from error


def open_catalogue(path: Path) -> Catalogue:
    """Open a catalogue, or create one where there is none."""
    with faults():
        connection = _connect(path)
        try:
            _require_schema(connection)
        except sqlite3.Error:
            connection.close()
            raise
    return Catalogue(connection)


def add_saved(index: BlockIndex, records: Iterable[BlockRecord]) -> None:
    """Add records of a catalogue to the index. CatalogueFault: a key is under two roots, so some record is wrong."""
    for record in records:
        if index.contradicts(record):
            raise CatalogueFault(sqlite3.DatabaseError("a key of two roots"))
        index.add(record, is_saved=True)


class Catalogue:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def load_newest(self, count: int) -> list[BlockRecord]:
        """Return the records that were used last."""
        return self._load("ORDER BY last_use DESC LIMIT ?", (count,))

    def load_after(self, block: BlockId | None, count: int) -> list[BlockRecord]:
        """Return the records that follow a block in key order, to read every record, some at a time."""
        key, part = (b"", "") if block is None else (block.key, block.part)
        return self._load("WHERE (key, part) > (?, ?) ORDER BY key, part LIMIT ?", (key, part, count))

    def save(
        self, changed: Sequence[BlockRecord], removed: Iterable[BlockId], properties: Mapping[str, int] | None = None
    ) -> None:
        """Write changes of the index in one transaction. CatalogueFault: none of them is written."""
        with faults():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany(
                    "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(_fields, changed)
                )
                self._connection.executemany(
                    "DELETE FROM blocks WHERE key = ? AND part = ?", ((block.key, block.part) for block in removed)
                )
                self._connection.executemany(
                    "INSERT OR REPLACE INTO properties VALUES (?, ?)", (properties or {}).items()
                )
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back after some faults, a full volume among them.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def read_property(self, name: str) -> int:
        """Return a property; 0 if there is none."""
        with faults():
            return _property(self._connection, name)

    def close(self) -> None:
        with faults():
            self._connection.close()

    def _load(self, which: str, values: tuple[object, ...]) -> list[BlockRecord]:
        with faults():
            rows = self._connection.execute(f"SELECT {COLUMNS} FROM blocks {which}", values).fetchall()
            return [_record(fields) for fields in rows]


def _connect(path: Path) -> sqlite3.Connection:
    # SQLite gives its log the mode of the file that it finds.
    path.touch(mode=FILE_MODE)
    # The thread that starts the tier opens it, and the writer's thread uses it.
    connection = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may lose the newest records: the scan finds them again by their file names.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {PAGES_BEFORE_CHECKPOINT}")
    except BaseException:
        connection.close()
        raise
    return connection


def _require_schema(connection: sqlite3.Connection) -> None:
    """Create the tables of an empty database. Raises OtherVersion for any other than ours."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        return
    if version != SCHEMA_VERSION:
        raise OtherVersion(f"its schema is {version}, and this version of kvstrata has {SCHEMA_VERSION}")
    block_format = _property(connection, BLOCK_FORMAT)
    if block_format != FORMAT_VERSION:
        raise OtherVersion(f"its blocks have format {block_format}, and this version of kvstrata has {FORMAT_VERSION}")


def _property(connection: sqlite3.Connection, name: str) -> int:
    found = connection.execute("SELECT value FROM properties WHERE name = ?", (name,)).fetchall()
    value = found[0][0] if found else 0
    if not isinstance(value, int):
        raise sqlite3.DatabaseError(f"a property that makes no sense: {value!r}")
    return value


def _fields(record: BlockRecord) -> tuple[object, ...]:
    identity = (record.id.key, record.id.part, record.parent, record.root, record.start, record.num_tokens)
    return (*identity, record.disk_bytes, record.last_use, record.uses, record.created, record.labels)


def _record(fields: tuple) -> BlockRecord:
    key, part, parent, root, *numbers, labels = fields
    try:
        record = BlockRecord(BlockId(key, part), bytes(parent), bytes(root), *numbers, labels=labels)
        sum(numbers)
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"a record that makes no sense: {error}") from error
    return record
