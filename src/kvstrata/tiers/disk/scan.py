"""Reconcile index and folder; read headers of files without a record."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvstrata.tiers.block import BlockId, Tally, no_tally
from kvstrata.tiers.block_file import FORMAT_VERSION, Damage, DamagedBlock
from kvstrata.tiers.disk.catalogue import Records
from kvstrata.tiers.disk.errors import Fault, RemovalReason, fault_of
from kvstrata.tiers.disk.filesystem import Files, unlink_if_there
from kvstrata.tiers.disk.folder import CacheFolder, Quarantine, file_name
from kvstrata.tiers.disk.index import BlockRow, write_tally
from kvstrata.tiers.disk.reader import opened, read_header
from kvstrata.tiers.interface import BlockEvent, RemovalCause, TierCounters

log = logging.getLogger(__name__)

# Files that are read and added under one hold of the lock.
NUM_FILES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Compared:
    has_lost: bool  # files of known blocks were gone
    strays: tuple[Path, ...]  # files that cannot be read, or cannot be deleted


@dataclass
class _Outdated:
    """Files of a format that this version does not read."""

    num_blocks: int = 0
    num_bytes: int = 0
    formats: set[str] = field(default_factory=set)

    def say(self) -> None:
        if self.num_blocks:
            log.warning(
                "Removed %d blocks of the disk cache (%.1f MiB): another version of kvstrata wrote them (%s), "
                "and this one reads format %d",
                self.num_blocks,
                self.num_bytes / 2**20,
                ", ".join(sorted(self.formats)),
                FORMAT_VERSION,
            )


def compare(
    folder: CacheFolder,
    records: Records,
    quarantine: Quarantine,
    counters: TierCounters,
    tally: Tally,
) -> Compared:
    """Reconcile rows and files. The lock of the records is held for some files at a time."""
    with records.lock:
        records.load_rest()
    names = folder.names()
    known = {file_name(row.id): row for row in records.index.rows()}
    leaving = {file_name(row.id) for row in records.index.leaving.rows()}
    gone = [row for name, row in known.items() if name not in names]
    with records.lock:
        records.forget(gone, RemovalCause.LOST)
        records.strike(gone)
    comparison = _Comparison(folder, records, quarantine, counters, tally)
    unknown = folder.stored(names - known.keys() - leaving)
    while some := list(islice(unknown, NUM_FILES_AT_ONCE)):
        with records.lock:
            comparison.add(some)
    comparison.outdated.say()
    with records.lock:
        records.finish_comparing()
    return Compared(bool(gone), tuple(comparison.strays))


class _Comparison:
    def __init__(
        self, folder: CacheFolder, records: Records, quarantine: Quarantine, counters: TierCounters, tally: Tally
    ) -> None:
        self._files = folder.files
        self._path = folder.path
        self._records = records
        self._quarantine = quarantine
        self._counters = counters
        self._tally = tally
        self.outdated = _Outdated()
        self.strays: list[Path] = []

    def add(self, stored: Iterable[tuple[Path, BlockId]]) -> None:
        found: list[BlockRow] = []
        for entry in rows_of(self._files, stored, self._tally):
            match entry:
                case BlockRow() if self._records.index.contradicts(entry):
                    self._isolate(self._path(entry.id), Damage.ROOT, "")
                case BlockRow():
                    found.append(self._records.doubted.get(entry.id, entry))
                case DamagedFile(path, reason, what):
                    self._isolate(path, reason, what)
                case UnreadFile(path, reason):
                    self._counters.add(BlockEvent.FAILED, reason)
                    if reason is not Fault.NOT_A_FILE:
                        self.strays.append(path)
        self._records.found(found)

    def _isolate(self, path: Path, reason: Damage, what: str) -> None:
        """Quarantine a file. A file that can be neither moved nor deleted must not keep others from being found."""
        try:
            if reason is Damage.VERSION:
                self._remove_outdated(path, what)
            else:
                self._quarantine.take(path, reason)
                self._counters.add(BlockEvent.QUARANTINED, reason)
        except OSError as error:
            self._counters.add(BlockEvent.FAILED, fault_of(error))
            self.strays.append(path)
            log.warning("A damaged block of the disk cache (%s) cannot be deleted: %s", reason, error)

    def _remove_outdated(self, path: Path, what: str) -> None:
        disk_bytes = self._files.status(path).disk_bytes
        unlink_if_there(self._files, path)
        self._counters.add(BlockEvent.EVICTED, RemovalReason.OUTDATED, nbytes=disk_bytes)
        self.outdated.num_blocks += 1
        self.outdated.num_bytes += disk_bytes
        self.outdated.formats.add(what)


@dataclass(frozen=True, slots=True)
class DamagedFile:
    path: Path
    reason: Damage
    what: str = field(default="", compare=False)  # for a file in another format: its version


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file that could not be read: counted, and not served until the next start."""

    path: Path
    reason: Fault


def rows_of(
    files: Files, stored: Iterable[tuple[Path, BlockId]], tally: Tally = no_tally
) -> Iterator[BlockRow | DamagedFile | UnreadFile]:
    for path, block in stored:
        try:
            yield _row_of(files, path, block, tally)
        except DamagedBlock as damage:
            yield DamagedFile(path, damage.reason, str(damage))
        except FileNotFoundError:
            continue
        except OSError as error:
            yield UnreadFile(path, fault_of(error))


def _row_of(files: Files, path: Path, block: BlockId, tally: Tally) -> BlockRow:
    with opened(files, path) as fd:
        status = files.status(fd)
        header = read_header(files, fd)
    if header.id != block:
        raise DamagedBlock(Damage.KEY, "the file holds another block than its name says")
    if header.file_bytes != status.size_bytes:
        raise DamagedBlock(Damage.LENGTH, "the file is not as long as its header says")
    return BlockRow(
        id=block,
        parent=header.parent,
        root=header.root,
        start=header.start,
        num_tokens=header.num_tokens,
        disk_bytes=status.disk_bytes,
        last_use=status.modified,
        uses=0,
        created=status.modified,
        tally=write_tally(tally(header.description, {name: place.nbytes for name, place in header.places.items()})),
    )
