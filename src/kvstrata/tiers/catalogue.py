"""What is on disk, in SQLite: found by key, or by parent and length. Knows no files but its own, and no payloads.

It can be lost: `shelf.py` rebuilds it from the headers of the blocks. Two connections, because a lookup on the engine's
thread must not wait for a writer that waits for the disk; in WAL mode it does not.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstrata.tiers.block import BASE, BlockId
from kvstrata.tiers.files import FILE_MODE

SCHEMA_VERSION = 2
# Pages of 4 KiB. Small, because the limit of the tier counts the log too.
PAGES_BEFORE_CHECKPOINT = 64
WRITE_TIMEOUT_S = 5.0
# A lookup may run on the engine's thread: better a miss than a wait.
READ_TIMEOUT_S = 0.05

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
CREATE INDEX by_parent ON blocks (parent, part, num_tokens);
CREATE INDEX by_use ON blocks (last_use, start DESC);
CREATE TABLE notes (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

COLUMNS = "key, part, parent, root, start, num_tokens, disk_bytes, last_use, uses, created, tally"
# A base goes after its children and after its other parts; another part can go at any time, the chain stays usable.
IS_LEAF = f"""
(b.part <> '{BASE}' OR NOT (
    EXISTS (SELECT 1 FROM blocks AS c WHERE c.parent = b.key) OR
    EXISTS (SELECT 1 FROM blocks AS p WHERE p.key = b.key AND p.part <> '{BASE}')))
"""


class CatalogueFault(Exception):
    """Raised and caught inside tiers/. `damaged`: rebuild it; otherwise the volume has a problem."""

    def __init__(self, cause: sqlite3.Error) -> None:
        super().__init__(str(cause))
        code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        is_misuse = isinstance(cause, sqlite3.ProgrammingError)  # closed
        self.damaged = not is_misuse and code & PRIMARY_CODE not in VOLUME_PROBLEMS


@dataclass(frozen=True, slots=True)
class Row:
    id: BlockId
    parent: bytes
    root: bytes
    start: int
    num_tokens: int
    disk_bytes: int
    last_use: float
    uses: int
    created: float
    tally: str = "{}"  # JSON: bytes by label. Equal blocks have the same text


@dataclass(frozen=True, slots=True)
class Totals:
    num_blocks: int
    num_tokens: int
    disk_bytes: int
    labels: Mapping[str, int]  # bytes by label


def write_tally(labels: Mapping[str, int]) -> str:
    return json.dumps(labels, sort_keys=True, separators=(",", ":"))


def read_tally(text: str) -> Counter[str]:
    """Nothing where it makes no sense: at worst a block is written again."""
    try:
        return Counter({str(label): int(nbytes) for label, nbytes in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        return Counter()


@contextmanager
def faults() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise CatalogueFault(error) from error


class Catalogue:
    def __init__(self, path: Path) -> None:
        with faults():
            self._writing = _connect(path, WRITE_TIMEOUT_S)
            try:
                self.is_new = self._prepare()
                self._reading = _connect(path, READ_TIMEOUT_S)
            except sqlite3.Error:
                self._writing.close()
                raise
        self._write_lock = threading.RLock()
        self._read_lock = threading.Lock()

    def _prepare(self) -> bool:
        """True where there was nothing, or a catalogue of another version."""
        version = self._writing.execute("PRAGMA user_version").fetchone()[0]
        if version == SCHEMA_VERSION:
            problem = self._writing.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            return False
        if self._writing.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise sqlite3.DatabaseError(f"a catalogue of version {version}")
        self._writing.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        return True

    def has(self, block: BlockId) -> bool:
        query = "SELECT 1 FROM blocks WHERE key = ? AND part = ?"
        return bool(self._ask(query, (block.key, block.part)))

    def size(self, block: BlockId) -> int:
        """Bytes on the disk; 0 where it is not there."""
        found = self._ask("SELECT disk_bytes FROM blocks WHERE key = ? AND part = ?", (block.key, block.part))
        return int(found[0][0]) if found else 0

    def contents(self, block: BlockId) -> Counter[str]:
        """Bytes by label; nothing where it is not there."""
        found = self._ask("SELECT tally FROM blocks WHERE key = ? AND part = ?", (block.key, block.part))
        return read_tally(found[0][0]) if found else Counter()

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        """How many tokens the blocks after `parent` have, the longest first."""
        query = f"SELECT DISTINCT num_tokens FROM blocks WHERE parent = ? AND part = '{BASE}' ORDER BY num_tokens DESC"
        return tuple(length for (length,) in self._ask(query, (parent,)))

    def rows(self, root: bytes | None = None) -> list[Row]:
        """Every block, or those of one root; parents before children."""
        query = f"SELECT {COLUMNS} FROM blocks WHERE root = ifnull(?, root) ORDER BY start, key, part"
        return self._ask_rows(query, (root,))

    def parts(self, key: bytes) -> list[Row]:
        return self._ask_rows(f"SELECT {COLUMNS} FROM blocks WHERE key = ? ORDER BY part", (key,))

    def names(self, suffix: str) -> set[str]:
        """`<key in hex>.<part><suffix>` of every block."""
        query = "SELECT lower(hex(key)) || '.' || part || ? FROM blocks"
        return {name for (name,) in self._ask_at_length(query, (suffix,))}

    def totals(self) -> Totals:
        query = f"""SELECT count(*) FILTER (WHERE part = '{BASE}'),
            coalesce(sum(num_tokens) FILTER (WHERE part = '{BASE}'), 0), coalesce(sum(disk_bytes), 0) FROM blocks"""
        num_blocks, num_tokens, disk_bytes = self._ask_at_length(query, ())[0]
        labels: Counter[str] = Counter()
        # Most blocks are alike: few texts, whatever the number of rows.
        for text, count in self._ask_at_length("SELECT tally, count(*) FROM blocks GROUP BY tally", ()):
            for label, nbytes in read_tally(text).items():
                labels[label] += count * nbytes
        return Totals(num_blocks, num_tokens, disk_bytes, dict(labels))

    def oldest_leaves(self, count: int) -> list[Row]:
        """What can go without breaking a chain. Sees changes that are not committed yet."""
        query = f"SELECT {COLUMNS} FROM blocks AS b WHERE {IS_LEAF} ORDER BY last_use, start DESC LIMIT ?"
        return self._ask_rows(query, (count,))

    def leaves_at(self, key: bytes) -> list[Row]:
        return self._ask_rows(f"SELECT {COLUMNS} FROM blocks AS b WHERE key = ? AND {IS_LEAF}", (key,))

    def add(self, rows: Iterable[Row]) -> None:
        with self.changing() as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (_fields(row) for row in rows)
            )

    def remove(self, blocks: Iterable[BlockId]) -> None:
        with self.changing() as connection:
            connection.executemany(
                "DELETE FROM blocks WHERE key = ? AND part = ?", ((block.key, block.part) for block in blocks)
            )

    def touch(self, uses: Mapping[BlockId, tuple[int, float]]) -> None:
        with self.changing() as connection:
            connection.executemany(
                "UPDATE blocks SET uses = uses + ?, last_use = max(last_use, ?) WHERE key = ? AND part = ?",
                ((count, when, block.key, block.part) for block, (count, when) in uses.items()),
            )

    def note(self, name: str) -> int:
        """A number kept under a name; 0 where there is none."""
        found = self._ask("SELECT value FROM notes WHERE name = ?", (name,))
        return found[0][0] if found else 0

    def set_note(self, name: str, value: int) -> None:
        with self.changing() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, value))

    @contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; changes inside it join it."""
        with self._write_lock, faults():
            if self._writing.in_transaction:
                yield self._writing
                return
            self._writing.execute("BEGIN IMMEDIATE")
            try:
                yield self._writing
            except BaseException:
                self._undo()
                raise
            self._writing.execute("COMMIT")

    def close(self) -> None:
        with self._write_lock, self._read_lock, faults():
            self._reading.close()
            self._writing.close()

    def _undo(self) -> None:
        # SQLite has already rolled back after some faults, a full volume among them.
        if self._writing.in_transaction:
            self._writing.execute("ROLLBACK")

    def _ask_rows(self, query: str, values: tuple[object, ...]) -> list[Row]:
        found = self._ask_at_length(query, values)
        with faults():
            return [_row(fields) for fields in found]

    def _ask_at_length(self, query: str, values: tuple[object, ...]) -> list[tuple]:
        """Where lookups do not wait for it."""
        with self._write_lock, faults():
            return self._writing.execute(query, values).fetchall()

    def _ask(self, query: str, values: tuple[object, ...]) -> list[tuple]:
        with self._read_lock, faults():
            return self._reading.execute(query, values).fetchall()


def _connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    # SQLite gives its log the mode of the file that it finds.
    path.touch(mode=FILE_MODE)
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A crash of the machine may lose the newest rows: they are found again by their files' names.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {PAGES_BEFORE_CHECKPOINT}")
    except BaseException:
        connection.close()
        raise
    return connection


def _fields(row: Row) -> tuple[object, ...]:
    identity = (row.id.key, row.id.part, row.parent, row.root, row.start, row.num_tokens)
    return (*identity, row.disk_bytes, row.last_use, row.uses, row.created, row.tally)


def _row(fields: tuple) -> Row:
    key, part, parent, root, *numbers, tally = fields
    try:
        row = Row(BlockId(key, part), bytes(parent), bytes(root), *numbers, tally=tally)
        sum(numbers)
    except (TypeError, ValueError) as error:
        raise sqlite3.DatabaseError(f"a row that makes no sense: {error}") from error
    return row
