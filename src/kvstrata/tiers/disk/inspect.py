"""List, verify and clean a cache folder without a server. Knows files, and the catalogue if it is readable."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstrata.errors import ConfigError
from kvstrata.tiers.block import BASE, BlockId, Chain
from kvstrata.tiers.block_file import DamagedBlock
from kvstrata.tiers.disk.errors import fault_of
from kvstrata.tiers.disk.filesystem import Filesystem, unlink_if_there
from kvstrata.tiers.disk.folder import CacheFolder, list_quarantined
from kvstrata.tiers.disk.index import BlockRecord
from kvstrata.tiers.disk.reader import read_block
from kvstrata.tiers.disk.scan import DamagedFile, UnreadFile, records_of

Progress = Callable[[int, int], None]  # blocks done, blocks in all


def _no_progress(_done: int, _total: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Listing:
    rows: tuple[BlockRecord, ...]  # parents before children
    damaged: tuple[DamagedFile, ...]
    unread: tuple[UnreadFile, ...]

    @property
    def disk_bytes(self) -> int:
        return sum(row.disk_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Verified:
    num_blocks: int  # files that passed every check
    num_bytes: int
    damaged: tuple[DamagedFile, ...]
    unread: tuple[UnreadFile, ...]


@dataclass(frozen=True, slots=True)
class Garbage:
    temporaries: tuple[Path, ...] = ()
    quarantined: tuple[Path, ...] = ()
    damaged: tuple[Path, ...] = ()  # headers that are damaged or of another format version
    orphans: tuple[Path, ...] = ()  # no chain from a root leads to them
    freed_bytes: int = 0

    def paths(self) -> tuple[Path, ...]:
        return (*self.temporaries, *self.quarantined, *self.damaged, *self.orphans)


@dataclass
class _Sorted:
    rows: list[BlockRecord] = field(default_factory=list)
    damaged: list[DamagedFile] = field(default_factory=list)
    unread: list[UnreadFile] = field(default_factory=list)

    def take(self, entries: Iterable[BlockRecord | DamagedFile | UnreadFile], progress: Progress, total: int) -> None:
        for done, entry in enumerate(entries, 1):
            match entry:
                case BlockRecord():
                    self.rows.append(entry)
                case DamagedFile():
                    self.damaged.append(entry)
                case UnreadFile():
                    self.unread.append(entry)
            progress(done, total)


def list_blocks(directory: Path, *, files: Filesystem | None = None, progress: Progress = _no_progress) -> Listing:
    """List blocks by their headers, with last use and uses if the catalogue has them. A server may be running."""
    folder = _existing(directory, files)
    found = _sort(folder, progress)
    uses = _recorded_uses(folder.catalogue)
    rows = [_with_uses(row, uses) for row in found.rows]
    rows.sort(key=lambda row: (row.root, row.start, row.id.key, row.id.part))
    return Listing(tuple(rows), tuple(found.damaged), tuple(found.unread))


def verify(
    directory: Path, *, chain: Chain, files: Filesystem | None = None, progress: Progress = _no_progress
) -> Verified:
    """Verify every checksum. Changes nothing: a server quarantines damage that it reads, and `gc` deletes the rest."""
    folder = _existing(directory, files)
    stored = list(folder.stored(sorted(folder.names())))
    damaged: list[DamagedFile] = []
    unread: list[UnreadFile] = []
    num_blocks = num_bytes = 0
    for done, (path, block) in enumerate(stored, 1):
        try:
            num_bytes += read_block(folder.files, path, block, chain=chain, root=None).nbytes
            num_blocks += 1
        except DamagedBlock as damage:
            damaged.append(DamagedFile(path, damage.reason))
        except FileNotFoundError:
            pass  # a running server evicted it meanwhile
        except OSError as error:
            unread.append(UnreadFile(path, fault_of(error)))
        progress(done, len(stored))
    return Verified(num_blocks, num_bytes, tuple(damaged), tuple(unread))


def find_garbage(directory: Path, *, files: Filesystem | None = None, progress: Progress = _no_progress) -> Garbage:
    folder = _existing(directory, files)
    found = _sort(folder, progress)
    garbage = Garbage(
        temporaries=tuple(folder.left_temporaries()),
        quarantined=tuple(folder.quarantine / held.name for held in list_quarantined(folder.files, folder.quarantine)),
        damaged=tuple(damaged.path for damaged in found.damaged),
        orphans=tuple(folder.path(block) for block in orphans(found.rows)),
    )
    freed_bytes = sum(folder.files.status(path).disk_bytes for path in garbage.paths())
    return replace(garbage, freed_bytes=freed_bytes)


def collect_garbage(directory: Path, *, files: Filesystem | None = None, progress: Progress = _no_progress) -> Garbage:
    """Delete what `find_garbage` finds. CacheDirectoryBusy while a server runs: it may be writing these files.

    The next start removes the rows of deleted blocks from the catalogue.
    """
    folder = _existing(directory, files)
    folder.acquire()
    try:
        garbage = find_garbage(directory, files=folder.files, progress=progress)
        for path in garbage.paths():
            unlink_if_there(folder.files, path)
    finally:
        folder.release()
    return garbage


def orphans(rows: Iterable[BlockRecord]) -> list[BlockId]:
    """Return the blocks that no lookup can reach: an ancestor is missing, or the base of a part."""
    ordered = sorted(rows, key=lambda row: (row.start, row.id.part != BASE))
    reachable: set[bytes] = set()
    left: list[BlockId] = []
    for row in ordered:
        if row.id.part != BASE:
            is_reached = row.id.key in reachable
        else:
            is_reached = row.parent == row.root or row.parent in reachable
            reachable.update([row.id.key] if is_reached else [])
        if not is_reached:
            left.append(row.id)
    return left


def _existing(directory: Path, files: Filesystem | None) -> CacheFolder:
    if not directory.is_dir():
        raise ConfigError(f"There is no disk cache at {directory}. Give the folder that --disk-cache-dir had")
    folder = CacheFolder(directory, files or Filesystem())
    folder.check()
    return folder


def _sort(folder: CacheFolder, progress: Progress) -> _Sorted:
    stored = list(folder.stored(sorted(folder.names())))
    found = _Sorted()
    found.take(records_of(folder.files, stored), progress, len(stored))
    return found


def _recorded_uses(path: Path) -> dict[BlockId, tuple[float, int, float]]:
    """Read uses from the catalogue; nothing where it is missing or unreadable, because uses are only displayed."""
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            found = connection.execute("SELECT key, part, last_use, uses, created FROM blocks").fetchall()
        finally:
            connection.close()
        return {BlockId(key, part): (last_use, uses, created) for key, part, last_use, uses, created in found}
    except (sqlite3.Error, ValueError, TypeError):
        return {}


def _with_uses(row: BlockRecord, uses: dict[BlockId, tuple[float, int, float]]) -> BlockRecord:
    last_use, num_uses, created = uses.get(row.id, (row.last_use, row.uses, row.created))
    return replace(row, last_use=last_use, uses=num_uses, created=created)
