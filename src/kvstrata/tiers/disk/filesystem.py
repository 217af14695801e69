"""Every file operation of the disk tier, one method each, so that a test can make any of them fail. Knows no blocks.

SQLite opens the catalogue itself; all other operations go through a `Filesystem`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstrata.tiers.write_limits import SLICE_BYTES, Pace, unpaced

FILE_MODE = 0o600

FOLDER_MODE = 0o700

SECTOR_BYTES = 512  # the unit of st_blocks, whatever the volume's own


@dataclass(frozen=True, slots=True)
class FileStatus:
    size_bytes: int
    disk_bytes: int  # space that the file takes on the volume
    modified: float
    inode: int
    owner: int  # a user's id
    is_plain: bool  # a file, and no link, folder or device
    is_folder: bool
    is_link: bool
    mode: int  # the permissions alone


class NotAFile(OSError):
    """A link, a folder, a pipe or a device under the name of a file: never ours, and not opened."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(errno.EINVAL, "Not a plain file", str(path))


class Filesystem:
    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, piece: memoryview) -> int:
        return os.write(fd, piece)

    def set_modified(self, fd: int, seconds: float) -> None:
        """Set the time of the last change, which a scan takes as the time of a record."""
        nanoseconds = int(seconds * 1e9)
        os.utime(fd, ns=(nanoseconds, nanoseconds))

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open(self, path: Path) -> int:
        """Open a plain file. NotAFile for anything else: a link could lead anywhere, a pipe waits for a writer."""
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise NotAFile(path)
        # Another file may have this name by now.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotAFile(path)
        return fd

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def status(self, place: int | Path) -> FileStatus:
        found = os.fstat(place) if isinstance(place, int) else os.lstat(place)
        disk_bytes = found.st_blocks * SECTOR_BYTES
        return FileStatus(
            size_bytes=found.st_size,
            disk_bytes=disk_bytes,
            modified=found.st_mtime,
            inode=found.st_ino,
            owner=found.st_uid,
            is_plain=stat.S_ISREG(found.st_mode),
            is_folder=stat.S_ISDIR(found.st_mode),
            is_link=stat.S_ISLNK(found.st_mode),
            mode=stat.S_IMODE(found.st_mode),
        )

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, FOLDER_MODE)

    def set_mode(self, path: Path, mode: int) -> None:
        os.chmod(path, mode)

    def free_bytes(self, folder: Path) -> int:
        volume = os.statvfs(folder)
        return volume.f_bavail * volume.f_frsize

    def lock(self, path: Path) -> int:
        """Open a file and lock it; BlockingIOError where it is locked already. Closing it unlocks it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd


def write_all(files: Filesystem, fd: int, pieces: Iterable[memoryview], pace: Pace = unpaced) -> None:
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            done += pace(partial(files.write, fd, piece[done : done + SLICE_BYTES]))


def read_all(files: Filesystem, fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from an offset. Return the bytes read: fewer than its size mean that the file ends there."""
    done = 0
    while done < buffer.nbytes:
        count = files.read_into(fd, buffer[done:], offset + done)
        if count == 0:
            break
        done += count
    return done


def plain_files(files: Filesystem, folder: Path) -> Iterator[tuple[Path, FileStatus]]:
    """Yield the plain files of a folder, by name; none if there is no folder. Anything else in it is not ours."""
    try:
        names = sorted(files.names(folder))
    except FileNotFoundError:
        return
    for path in (folder / name for name in names):
        try:
            status = files.status(path)
        except FileNotFoundError:
            continue
        if status.is_plain:
            yield path, status


def unlink_if_there(files: Filesystem, path: Path) -> None:
    try:
        files.unlink(path)
    except FileNotFoundError:
        return


def make_folder_if_missing(files: Filesystem, path: Path) -> bool:
    """Create a folder if it is missing. Return whether it was created."""
    try:
        files.make_folder(path)
    except FileExistsError:
        # A link could lead anywhere.
        if path.is_symlink() or not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
        return False
    return True
