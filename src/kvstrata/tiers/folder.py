"""The names in a cache folder, and the lock that makes it one server's. Knows no catalogue.

DIR/lock                                  held while a server uses the folder
DIR/catalogue.sqlite                      can be lost
DIR/blocks/ab/<key in hex>.<part>.safetensors
DIR/tmp/                                  what is being written; empty after a start
DIR/quarantine/                           files that were not what they said
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstrata.errors import CacheDirectoryBusy, ConfigError
from kvstrata.tiers.block import KEY_BYTES, PART_NAME, BlockId
from kvstrata.tiers.files import Files, make_folder_if_missing, unlink_if_there

SUFFIX = ".safetensors"


def file_name(block: BlockId) -> str:
    return f"{block.key.hex()}.{block.part}{SUFFIX}"


def parse_file_name(name: str) -> list[BlockId]:
    """The block that a file of this name holds; none where the name is not one of ours."""
    key, _, part = name.removesuffix(SUFFIX).partition(".")
    if not name.endswith(SUFFIX) or len(key) != 2 * KEY_BYTES or not PART_NAME.fullmatch(part):
        return []
    try:
        block = BlockId(bytes.fromhex(key), part)
    except ValueError:
        return []
    return [block] if file_name(block) == name else []


class CacheFolder:
    def __init__(self, directory: Path, files: Files) -> None:
        self.directory = directory
        self.files = files
        self.blocks = directory / "blocks"
        self.temporaries = directory / "tmp"
        self.quarantine = directory / "quarantine"
        self.catalogue = directory / "catalogue.sqlite"
        self.lock_path = directory / "lock"
        self._lock_fds: list[int] = []

    def path(self, block: BlockId) -> Path:
        return self.blocks / block.key[:1].hex() / file_name(block)

    def catalogue_paths(self) -> tuple[Path, Path, Path]:
        return self.catalogue, Path(f"{self.catalogue}-wal"), Path(f"{self.catalogue}-shm")

    def acquire(self) -> None:
        """Take the lock and make what is missing. The parent of the folder must be there."""
        make_folder_if_missing(self.files, self.directory)
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
        for folder in (self.blocks, self.temporaries, self.quarantine):
            make_folder_if_missing(self.files, folder)

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

    def remove_temporaries(self) -> None:
        for name in self.files.names(self.temporaries):
            unlink_if_there(self.files, self.temporaries / name)

    def shards(self) -> list[Path]:
        try:
            names = self.files.names(self.blocks)
        except FileNotFoundError:
            return []
        return [self.blocks / name for name in sorted(names) if len(name) == 2]

    def names(self) -> set[str]:
        """The names of all files where blocks are, ours or not; nothing is opened."""
        return {name for shard in self.shards() for name in self._names_in(shard)}

    def stored(self, names: Iterable[str]) -> Iterator[tuple[Path, BlockId]]:
        """Those of `names` that are names of blocks, and their files."""
        for name in names:
            for block in parse_file_name(name):
                yield self.path(block), block

    def _names_in(self, shard: Path) -> list[str]:
        try:
            return self.files.names(shard)
        except (FileNotFoundError, NotADirectoryError):
            return []


def _owner(lock_path: Path) -> str:
    try:
        pid = lock_path.read_text().strip()
    except OSError:
        return ""
    return f" (process {pid})" if pid.isdigit() else ""


def prepare(folder: CacheFolder) -> None:
    """At start: a folder that cannot be used is a mistake in the settings, said at once."""
    try:
        folder.directory.parent.mkdir(parents=True, exist_ok=True)
        folder.acquire()
        folder.remove_temporaries()
    except OSError as error:
        raise ConfigError(
            f"{folder.directory} cannot hold the disk cache: {error.strerror or error}. "
            "Make it writable, or use another --disk-cache-dir"
        ) from error
