"""Reconcile the index with the folder; read the headers of files that have no record.

The writer's thread reconciles once, before it writes. It holds `changes` for some files at a time, and each slice is
visible to lookups at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import RLock

from kvstrata.tiers.block import BlockId, Tally, no_tally
from kvstrata.tiers.block_file import FORMAT_VERSION, Damage, DamagedBlock
from kvstrata.tiers.disk.catalogue import add_saved
from kvstrata.tiers.disk.errors import DiskFault, RemovalReason, fault_of
from kvstrata.tiers.disk.filesystem import Filesystem, unlink_if_there
from kvstrata.tiers.disk.folder import CacheFolder, Quarantine, file_name
from kvstrata.tiers.disk.index import BlockIndex, BlockRecord, write_labels
from kvstrata.tiers.disk.reader import opened, read_header
from kvstrata.tiers.interface import BlockEvent, RemovalCause, TierCounters

log = logging.getLogger(__name__)

# Files that are read and added under one hold of `changes`.
NUM_FILES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Reconciled:
    has_lost: bool  # files of known blocks were gone
    strays: tuple[Path, ...]  # files that cannot be read, or cannot be deleted


class Reconciler:
    def __init__(
        self,
        folder: CacheFolder,
        index: BlockIndex,
        quarantine: Quarantine,
        counters: TierCounters,
        count_labels: Tally,
        changes: RLock,
    ) -> None:
        self._folder = folder
        self._index = index
        self._quarantine = quarantine
        self._counters = counters
        self._count_labels = count_labels
        self._changes = changes

    def reconcile(self, saved: Iterable[list[BlockRecord]]) -> Reconciled:
        """Make the index complete. `saved`: records of the catalogue, in slices; CatalogueFault passes through."""
        self._index.set_incomplete()
        names = self._folder.names()
        known = {file_name(record.id): record for record in self._index.records()}
        gone = [record for name, record in known.items() if name not in names]
        with self._changes:
            self._index.forget(gone, RemovalCause.LOST)
        unknown = names - known.keys() - {file_name(record.id) for record in self._index.pending.records()}
        has_lost = bool(gone)
        for records in saved:
            there = {name: record for record in records if (name := file_name(record.id)) in unknown}
            missing = [record.id for record in records if file_name(record.id) not in names and self._is_new(record)]
            self._index.mark_unsaved(missing)  # for the next save to delete
            has_lost |= bool(missing)
            with self._changes:
                add_saved(self._index, there.values())
            unknown.difference_update(there)
        strays = self._add_files(self._folder.stored(unknown))
        self._index.set_complete()
        return Reconciled(has_lost, tuple(strays))

    def _is_new(self, record: BlockRecord) -> bool:
        return self._index.get(record.id) is None and self._index.pending.get(record.id) is None

    def _add_files(self, files: Iterator[tuple[Path, BlockId]]) -> list[Path]:
        """Add the records of files by their headers. Return the files that cannot be read, or cannot be deleted."""
        strays: list[Path] = []
        outdated = OutdatedFiles()
        while some := list(islice(files, NUM_FILES_AT_ONCE)):
            with self._changes:
                for entry in records_of(self._folder.files, some, self._count_labels):
                    strays += self._add_entry(entry, outdated)
        outdated.log()
        return strays

    def _add_entry(self, entry: BlockRecord | DamagedFile | UnreadFile, outdated: OutdatedFiles) -> list[Path]:
        match entry:
            case BlockRecord() if self._index.contradicts(entry):
                return self._quarantine_file(self._folder.path(entry.id), Damage.ROOT)
            case BlockRecord():
                self._index.add(entry)
            case DamagedFile(path, Damage.VERSION, found_format):
                return self._delete_outdated(path, found_format, outdated)
            case DamagedFile(path, damage):
                return self._quarantine_file(path, damage)
            case UnreadFile(path, fault):
                self._counters.add(BlockEvent.FAILED, fault)
                return [] if fault is DiskFault.NOT_A_FILE else [path]
        return []

    def _quarantine_file(self, path: Path, damage: Damage) -> list[Path]:
        """Quarantine a file. A file that can be neither moved nor deleted must not keep others from being found."""
        try:
            self._quarantine.take(path, damage)
        except OSError as error:
            return self._undeletable(path, damage, error)
        self._counters.add(BlockEvent.QUARANTINED, damage)
        return []

    def _delete_outdated(self, path: Path, found_format: str, outdated: OutdatedFiles) -> list[Path]:
        try:
            disk_bytes = self._folder.files.status(path).disk_bytes
            unlink_if_there(self._folder.files, path)
        except OSError as error:
            return self._undeletable(path, Damage.VERSION, error)
        self._counters.add(BlockEvent.EVICTED, RemovalReason.OUTDATED, nbytes=disk_bytes)
        outdated.count(disk_bytes, found_format)
        return []

    def _undeletable(self, path: Path, damage: Damage, error: OSError) -> list[Path]:
        self._counters.add(BlockEvent.FAILED, fault_of(error))
        log.warning("A damaged block of the disk cache (%s) cannot be deleted: %s", damage, error)
        return [path]


@dataclass
class OutdatedFiles:
    """Files of a format that this version does not read."""

    num_blocks: int = 0
    num_bytes: int = 0
    formats: set[str] = field(default_factory=set)

    def count(self, nbytes: int, found_format: str) -> None:
        self.num_blocks += 1
        self.num_bytes += nbytes
        self.formats.add(found_format)

    def log(self) -> None:
        if self.num_blocks:
            log.warning(
                "Removed %d blocks of the disk cache (%.1f MiB): another version of kvstrata wrote them (%s), "
                "and this one reads format %d",
                self.num_blocks,
                self.num_bytes / 2**20,
                ", ".join(sorted(self.formats)),
                FORMAT_VERSION,
            )


@dataclass(frozen=True, slots=True)
class DamagedFile:
    path: Path
    reason: Damage
    what: str = field(default="", compare=False)  # for a file in another format: its version


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file that could not be read: counted, and not served until the next start."""

    path: Path
    reason: DiskFault


def records_of(
    files: Filesystem, stored: Iterable[tuple[Path, BlockId]], count_labels: Tally = no_tally
) -> Iterator[BlockRecord | DamagedFile | UnreadFile]:
    """Yield the records of files by their headers; files that have vanished are left out."""
    for path, block in stored:
        try:
            yield _record_of(files, path, block, count_labels)
        except DamagedBlock as damage:
            yield DamagedFile(path, damage.reason, str(damage))
        except FileNotFoundError:
            continue
        except OSError as error:
            yield UnreadFile(path, fault_of(error))


def _record_of(files: Filesystem, path: Path, block: BlockId, count_labels: Tally) -> BlockRecord:
    with opened(files, path) as fd:
        status = files.status(fd)
        header = read_header(files, fd)
    if header.id != block:
        raise DamagedBlock(Damage.KEY, "the file holds another block than its name says")
    if header.file_bytes != status.size_bytes:
        raise DamagedBlock(Damage.LENGTH, "the file is not as long as its header says")
    labels = count_labels(header.description, {name: range_.nbytes for name, range_ in header.ranges.items()})
    return BlockRecord(
        id=block,
        parent=header.parent,
        root=header.root,
        start=header.start,
        num_tokens=header.num_tokens,
        disk_bytes=status.disk_bytes,
        last_use=status.modified,
        uses=0,
        created=status.modified,
        labels=write_labels(labels),
    )
