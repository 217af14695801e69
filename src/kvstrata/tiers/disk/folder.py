"""Names, lock and permissions of the folder; quarantine; markers of clears."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import CacheDirectoryBusy, ConfigError
from kvstrata.tiers.block import KEY_BYTES, PART_NAME, BlockId
from kvstrata.tiers.block_file import Damage
from kvstrata.tiers.disk.filesystem import (
    FILE_MODE,
    FOLDER_MODE,
    Filesystem,
    make_folder_if_missing,
    plain_files,
    read_all,
    unlink_if_there,
    write_all,
)
from kvstrata.tiers.disk.index import ClearMarker

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"

TEMPORARY_NAME = re.compile(r"[0-9]+(\.marker)?\.tmp")

OF_THE_SYSTEM = {"lost+found", ".DS_Store"}  # in folders that look empty to users

OF_OTHERS = 0o077  # permission bits of group and others

ROOT = 0

# Empty where the process ended before it wrote its id.
LOCK_TEXT = re.compile(rb"([0-9]+\n)?")

LONGEST_LOCK_TEXT = 32


def file_name(block: BlockId) -> str:
    return f"{block.key.hex()}.{block.part}{SUFFIX}"


def parse_file_name(name: str) -> list[BlockId]:
    """Return the block that a file of this name holds; none if the name is not a block's."""
    key, _, part = name.removesuffix(SUFFIX).partition(".")
    if not name.endswith(SUFFIX) or len(key) != 2 * KEY_BYTES or not PART_NAME.fullmatch(part):
        return []
    try:
        block = BlockId(bytes.fromhex(key), part)
    except ValueError:
        return []
    return [block] if file_name(block) == name else []


class CacheFolder:
    def __init__(self, directory: Path, files: Filesystem) -> None:
        self.directory = directory
        self.files = files
        self.blocks = directory / "blocks"
        self.temporaries = directory / "tmp"
        self.quarantine = directory / "quarantine"
        self.cleared = directory / "cleared"
        self.catalogue = directory / "catalogue.sqlite"
        self.lock_path = directory / "lock"
        self._first_folders = (self.blocks, self.temporaries, self.quarantine)  # that every version has made
        self._folders = (*self._first_folders, self.cleared)
        self._lock_fds: list[int] = []

    def path(self, block: BlockId) -> Path:
        return self.blocks / block.key[:1].hex() / file_name(block)

    def catalogue_paths(self) -> tuple[Path, Path, Path]:
        return self.catalogue, Path(f"{self.catalogue}-wal"), Path(f"{self.catalogue}-shm")

    def acquire(self) -> None:
        """Take the lock and create what is missing. The parent of the folder must exist.

        Raises ConfigError, and changes nothing, if the folder is not a disk cache.
        """
        # The folder itself may be a link: the user chose where it leads.
        make_folder_if_missing(self.files, self.directory.resolve())
        self.check()
        self._check_owners()
        try:
            fd = self.files.lock(self.lock_path)
        except BlockingIOError:
            raise CacheDirectoryBusy(
                f"{self.directory} is used by another kvstrata{_owner(self.lock_path)}. "
                "Stop that one, or use another --disk-cache-dir"
            ) from None
        self.release()
        self._lock_fds.append(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self.make_missing()
        self._tighten()

    def _tighten(self) -> None:
        """Close the folder to other users, also if it existed before: it holds conversations. Warn on failure."""
        is_closed = _tighten_one(self.files, self.directory.resolve(), FOLDER_MODE)
        inside = dict.fromkeys(self._folders, FOLDER_MODE)
        inside |= dict.fromkeys((self.lock_path, *self.catalogue_paths()), FILE_MODE)
        open_to_others = [path for path, mode in inside.items() if not _tighten_one(self.files, path, mode)]
        # It is enough if the folder is closed to others, or all that is in it.
        if open_to_others and not is_closed:
            log.warning(
                "Others on this machine may read the disk cache, which holds conversations: the mode of %s cannot be "
                "changed. Give it mode 0700, or use another --disk-cache-dir",
                ", ".join(map(str, open_to_others)),
            )

    def check(self) -> None:
        """Raise ConfigError if this is no folder for a disk cache: it holds other things or links."""
        for path in (self.lock_path, *self._folders, *self.catalogue_paths()):
            problem = self._problem_of(path)
            if problem:
                raise ConfigError(f"{path} is {problem}. Remove it, or use another --disk-cache-dir")
        if not self._is_ours():
            raise ConfigError(
                f"{self.directory} holds other things than a disk cache, and was left as it is. "
                f"Use an empty or a new folder, such as {self.directory / 'kvstrata-cache'}"
            )

    def _check_owners(self) -> None:
        """Raise ConfigError if another user can read and exchange the content; root can anyhow."""
        for path in (self.directory.resolve(), self.lock_path, *self._folders, *self.catalogue_paths()):
            try:
                owner = self.files.status(path).owner
            except FileNotFoundError:
                continue
            if owner not in (os.geteuid(), ROOT):
                raise ConfigError(
                    f"{path} belongs to another user (user id {owner}), who could read conversations and exchange what "
                    f"is in it. Give it to user id {os.geteuid()} (chown -R), or use another --disk-cache-dir"
                )

    def make_missing(self) -> bool:
        """Create missing subfolders. Return whether one was created."""
        made = [make_folder_if_missing(self.files, folder) for folder in self._folders]
        return any(made)

    def release(self) -> None:
        while self._lock_fds:
            self.files.close(self._lock_fds.pop())

    def is_intact(self) -> bool:
        """Whether the folder that was locked is still the one of this name."""
        try:
            there = self.files.status(self.lock_path).inode
        except OSError:
            return False
        return any(self.files.status(fd).inode == there for fd in self._lock_fds)

    def left_temporaries(self) -> list[Path]:
        found = plain_files(self.files, self.temporaries)
        return [path for path, _ in found if TEMPORARY_NAME.fullmatch(path.name)]

    def remove_temporaries(self) -> None:
        for path in self.left_temporaries():
            unlink_if_there(self.files, path)

    def shards(self) -> list[Path]:
        try:
            names = self.files.names(self.blocks)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [self.blocks / name for name in sorted(names) if len(name) == 2]

    def names(self) -> set[str]:
        """Return the names of all files in the folders of blocks, ours or not; no file is opened."""
        return {name for shard in self.shards() for name in _names_in(self.files, shard)}

    def stored(self, names: Iterable[str]) -> Iterator[tuple[Path, BlockId]]:
        """Yield path and block for the names that are names of blocks."""
        for name in names:
            for block in parse_file_name(name):
                yield self.path(block), block

    def _is_ours(self) -> bool:
        """Whether the folder is empty or a disk cache. The catalogue proves neither: it can be lost or be foreign."""
        names = set(self.files.names(self.directory)) - OF_THE_SYSTEM
        return not names or self._has_our_lock(names) or any(map(parse_file_name, self.names()))

    def _has_our_lock(self, names: set[str]) -> bool:
        """Whether our kind of lock is there, with all of our folders or, after an aborted start, nothing foreign."""
        folders = {path.name for path in self._first_folders}
        own = {path.name for path in (self.lock_path, *self._folders, *self.catalogue_paths())}
        if self.lock_path.name not in names or not (folders <= names or names <= own):
            return False
        status = self.files.status(self.lock_path)
        is_likely = status.is_plain and status.size_bytes <= LONGEST_LOCK_TEXT
        return is_likely and bool(LOCK_TEXT.fullmatch(self.lock_path.read_bytes()))

    def _problem_of(self, path: Path) -> str:
        """Return why a path cannot be one of our files or folders; empty if it can, or is not there."""
        try:
            status = self.files.status(path)
        except FileNotFoundError:
            return ""
        if status.is_link:
            return "a link, and the disk cache follows none inside its folder"
        if path in self._folders:
            return "" if status.is_folder else "no folder, and the disk cache needs one of that name"
        return "" if status.is_plain else "no plain file, and the disk cache opens nothing else"


def _tighten_one(files: Filesystem, path: Path, mode: int) -> bool:
    """Take all permissions from group and others. Return whether they have none now."""
    try:
        if files.status(path).mode & OF_OTHERS:
            files.set_mode(path, mode)
        return not files.status(path).mode & OF_OTHERS
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _names_in(files: Filesystem, shard: Path) -> list[str]:
    try:
        return [] if files.status(shard).is_link else files.names(shard)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _owner(lock_path: Path) -> str:
    try:
        pid = lock_path.read_text().strip()
    except OSError:
        return ""
    return f" (process {pid})" if pid.isdigit() else ""


def prepare(folder: CacheFolder) -> None:
    """Prepare the folder at the start. ConfigError: a folder that cannot be used is a mistake in the settings."""
    try:
        folder.directory.parent.mkdir(parents=True, exist_ok=True)
        folder.acquire()
        folder.remove_temporaries()
    except OSError as error:
        raise ConfigError(
            f"{folder.directory} cannot hold the disk cache: {error.strerror or error}. "
            "Make it writable, or use another --disk-cache-dir"
        ) from error


MOST_FILES = 32

# Limit of the quarantine: a share of the cache's limit, and at most LARGEST_BYTES.
LARGEST_SHARE = 0.02

LARGEST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class QuarantinedFile:
    name: str
    disk_bytes: int
    modified: float


def parse_quarantined_name(name: str) -> list[BlockId]:
    """Return the block whose file this was; none if `take` gives no such name."""
    file_name, _, reason = name.rpartition(".")
    return parse_file_name(file_name) if reason in list(Damage) else []


def list_quarantined(files: Filesystem, folder: Path) -> list[QuarantinedFile]:
    """List the files that `take` has moved there, oldest first. Other files are not ours to count or to delete."""
    held = [
        QuarantinedFile(path.name, status.disk_bytes, status.modified)
        for path, status in plain_files(files, folder)
        if parse_quarantined_name(path.name)
    ]
    return sorted(held, key=lambda held: held.modified)


class Quarantine:
    """Damaged files. One thread at a time changes them, any thread reads: no file operation runs under the lock."""

    def __init__(self, folder: Path, files: Filesystem, cache_bytes: int) -> None:
        """Read the quarantine. `cache_bytes`: the limit of the whole cache."""
        self._folder = folder
        self._files = files
        self._limit_bytes = min(int(LARGEST_SHARE * cache_bytes), LARGEST_BYTES)
        self._lock = threading.Lock()
        self._held: dict[str, QuarantinedFile] = {}  # the oldest first
        self.reload()

    @property
    def disk_bytes(self) -> int:
        with self._lock:
            return sum(held.disk_bytes for held in self._held.values())

    def keys(self) -> frozenset[bytes]:
        """Return the keys of the blocks in quarantine."""
        with self._lock:
            names = list(self._held)
        return frozenset(block.key for name in names for block in parse_quarantined_name(name))

    def reload(self) -> None:
        found = list_quarantined(self._files, self._folder)
        with self._lock:
            self._held = {held.name: held for held in found}
        self._shrink()

    def take(self, path: Path, reason: Damage) -> None:
        """Rename a damaged file into the quarantine; delete it if that fails, or if it is too large to keep."""
        name = f"{path.name}.{reason}"
        try:
            status = self._files.status(path)
            if status.disk_bytes > self._limit_bytes:
                self._files.unlink(path)
                return
            if name in self._held:
                # Renaming onto a file makes some volumes write the new one out first.
                self._files.unlink(self._folder / name)
            self._files.rename(path, self._folder / name)
        except OSError:
            unlink_if_there(self._files, path)
            return
        with self._lock:
            self._held.pop(name, None)
            self._held[name] = QuarantinedFile(name, status.disk_bytes, status.modified)
        self._shrink()

    def _shrink(self) -> None:
        while len(self._held) > MOST_FILES or self.disk_bytes > self._limit_bytes:
            oldest = next(iter(self._held))
            unlink_if_there(self._files, self._folder / oldest)
            with self._lock:
                del self._held[oldest]


MARKER_NAME = re.compile(r"[0-9]{1,18}")

MARKER_FORMAT = "kvstrata.cleared.1"

LARGEST_MARKER_BYTES = 64 << 20


class MarkerFiles:
    """Markers of clears in `cleared/`: removals whose files are not all deleted yet survive a crash.

    One thread at a time changes them, any thread reads `disk_bytes`.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        self._files = folder.files
        self._disk_bytes: dict[Path, int] = {}

    @property
    def disk_bytes(self) -> int:
        return sum(list(self._disk_bytes.values()))

    def load(self) -> list[ClearMarker]:
        """Read all markers. An unreadable one is reported and left out: its blocks may come back."""
        self._disk_bytes = {}
        markers: list[ClearMarker] = []
        for path, status in plain_files(self._files, self._folder.cleared):
            if not MARKER_NAME.fullmatch(path.name):
                continue
            self._disk_bytes[path] = status.disk_bytes
            try:
                markers += _parse_markers(self._read(path, status.size_bytes))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("A marker of cleared blocks cannot be read; blocks may come back: %s: %s", path, error)
        return markers

    def save(self, markers: Sequence[ClearMarker]) -> None:
        """Write markers as one file. When this returns, they survive a crash."""
        if not markers:
            return
        path = self._folder.cleared / str(max((int(each.name) for each in self._disk_bytes), default=0) + 1)
        temporary = self._folder.temporaries / f"{path.name}.marker.tmp"
        try:
            fd = self._files.create(temporary)
            try:
                write_all(self._files, fd, [memoryview(_marker_text(markers).encode())])
                self._files.sync(fd)
                disk_bytes = self._files.status(fd).disk_bytes
            finally:
                self._files.close(fd)
            self._files.rename(temporary, path)
        except OSError:
            unlink_if_there(self._files, temporary)
            raise
        self._disk_bytes[path] = disk_bytes
        self._files.sync_folder(self._folder.cleared)

    def delete_all(self) -> None:
        for path in list(self._disk_bytes):
            unlink_if_there(self._files, path)
            del self._disk_bytes[path]

    def __len__(self) -> int:
        return len(self._disk_bytes)

    def _read(self, path: Path, nbytes: int) -> bytes:
        if nbytes > LARGEST_MARKER_BYTES:
            raise ValueError(f"{nbytes} bytes")
        fd = self._files.open(path)
        try:
            content = bytearray(nbytes)
            return bytes(content[: read_all(self._files, fd, memoryview(content), 0)])
        finally:
            self._files.close(fd)


def _marker_text(markers: Sequence[ClearMarker]) -> str:
    removals = [
        {
            "before": marker.before,
            "root_prefix": None if marker.root_prefix is None else marker.root_prefix.hex(),
            "blocks": sorted([block.key.hex(), block.part] for block in marker.blocks),
        }
        for marker in markers
    ]
    return json.dumps({"format": MARKER_FORMAT, "removals": removals}, separators=(",", ":"), allow_nan=False)


def _parse_markers(content: bytes) -> list[ClearMarker]:
    fields = json.loads(content)
    if fields["format"] != MARKER_FORMAT:
        raise ValueError(f"its format is {fields['format']!r}, and this version reads {MARKER_FORMAT}")
    return [
        ClearMarker(
            float(each["before"]),
            None if each["root_prefix"] is None else bytes.fromhex(each["root_prefix"]),
            frozenset(BlockId(bytes.fromhex(key), part) for key, part in each["blocks"]),
        )
        for each in fields["removals"]
    ]
