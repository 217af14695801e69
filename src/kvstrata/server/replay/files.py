"""Remembered replies in a folder: a file of lines for each salt, beside the blocks of the disk cache.

Written on a thread of its own, which no request waits for. A folder that cannot be read or written costs only what
would have been remembered. Files hold token ids, as the blocks do, and only their owner may read them.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from kvstrata.engine.cache_api import owner_of
from kvstrata.server.replay.record import Record, from_line, said_s, to_line

log = logging.getLogger(__name__)

SUFFIX = ".replies"
MAX_FILE_BYTES = 8 << 20
MAX_FOLDER_BYTES = 64 << 20
NEW_SUFFIX = ".new"  # while a file is written anew
MAX_WAITING = 1024
OWNER_CHARS = 32
ROOT = 0  # may change everything anyhow
OF_OTHERS = 0o077  # what a mode lets them do


class ReplyFiles:
    """`fingerprint`: of the model whose ids these are."""

    def __init__(self, folder: Path, fingerprint: str, vocab_size: int, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._clock = clock
        self._expired_s = 0.0  # what was said before that is not read
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._appended_bytes = 0  # since the folder was last bounded
        self._told = False  # that the folder cannot be used
        self._thread = threading.Thread(target=self._work, name="kvstrata-replies", daemon=True)
        self._thread.start()
        self._jobs.put(self._bound)

    def read(self, salt: str) -> list[Record]:
        """The oldest first."""
        try:
            if not self._is_there():
                return []
            with _open_plain(self._path(salt), os.O_RDONLY) as file:
                # The end of a file that is too long: its newest lines.
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_FILE_BYTES))
                lines = file.read(MAX_FILE_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell(error)
            return []
        expired_s = self._expired_s
        fresh = [line for line in lines if said_s(line) >= expired_s] if expired_s else lines
        read = (from_line(line, self._vocab_size) for line in fresh)
        return [record for record in read if record is not None]

    def append(self, salt: str, record: Record) -> None:
        line = to_line(record, self._clock())
        if self._jobs.qsize() < MAX_WAITING:  # or else a disk hangs: the reply is remembered in memory only
            self._jobs.put(lambda: self._append(self._path(salt), line))

    def clear(self, salt: str | None, owner: str | None, timeout_s: float = 5.0) -> None:
        """Waits until the files are gone, for at most so long: a disk that hangs removes them when it goes on."""
        done = threading.Event()

        def clear() -> None:
            try:
                self._clear(salt, owner)
            finally:
                done.set()

        self._jobs.put(clear)
        done.wait(timeout_s)

    def expire(self, before_s: float) -> None:
        """Leave out what was said before that."""
        self._expired_s = before_s
        if self._jobs.qsize() < MAX_WAITING:
            self._jobs.put(lambda: self._expire(before_s))

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits until all is written, for at most so long."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:
                self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "Replies cannot be kept in %s: %s. They are remembered until the server ends.", self._folder, error
            )

    def _append(self, path: Path, line: bytes) -> None:
        if not self._is_there():
            self._folder.mkdir(mode=0o700, parents=True)
        with _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
            # After a line that a crash cut off, this one begins anew.
            file.write(line if _ends_whole(file) else b"\n" + line)
            size = file.tell()
        if size > MAX_FILE_BYTES:
            self._halve(path)
        self._appended_bytes += len(line)
        if self._appended_bytes > MAX_FILE_BYTES:
            self._bound()

    def _halve(self, path: Path) -> None:
        """Keep the newer half."""
        with _open_plain(path, os.O_RDONLY) as file:
            file.seek(-MAX_FILE_BYTES // 2, os.SEEK_END)
            lines = file.read().splitlines(keepends=True)[1:]
        self._rewrite(path, lines)

    def _rewrite(self, path: Path, lines: Sequence[bytes]) -> None:
        """Published by rename, so that a crash leaves one or the other."""
        new = path.with_suffix(NEW_SUFFIX)
        with _open_plain(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            file.writelines(lines)
        new.replace(path)

    def _clear(self, salt: str | None, owner: str | None) -> None:
        begins = self._digest(owner)[:OWNER_CHARS] if owner is not None else ""
        for path in self._paths():
            if path.name.startswith(begins) and (salt is None or path == self._path(salt)):
                path.unlink(missing_ok=True)
        self._remove_unfinished()

    def _expire(self, before_s: float) -> None:
        """Lines are in the order in which they were written."""
        for path in self._paths():
            status = path.lstat()
            if status.st_mtime < before_s:
                path.unlink(missing_ok=True)
                continue
            with _open_plain(path, os.O_RDONLY) as file:
                if said_s(file.readline()) >= before_s:
                    continue
                lines = file.read(MAX_FILE_BYTES).splitlines(keepends=True)
            kept = [line for line in lines if said_s(line) >= before_s]
            if kept:
                self._rewrite(path, kept)
                os.utime(path, (status.st_atime, status.st_mtime))
            else:
                path.unlink(missing_ok=True)

    def _remove_unfinished(self) -> None:
        """Remove the files that a crash left half written."""
        for path in self._paths(NEW_SUFFIX):
            path.unlink(missing_ok=True)

    def _bound(self) -> None:
        """Those that were not written to for longest go, whichever model they are of."""
        self._appended_bytes = 0
        self._remove_unfinished()
        by_age = sorted(self._paths(), key=lambda path: path.lstat().st_mtime, reverse=True)
        total = 0
        for path in by_age:
            total += path.lstat().st_size
            if total > MAX_FOLDER_BYTES:
                path.unlink(missing_ok=True)

    def _paths(self, suffix: str = SUFFIX) -> list[Path]:
        return list(self._folder.glob(f"*{suffix}")) if self._is_there() else []

    def _is_there(self) -> bool:
        """Raises OSError for a link, which could lead anywhere, and for a folder that another user can change."""
        try:
            found = self._folder.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "It is no folder, or a link to one", str(self._folder))
        if found.st_uid not in (os.geteuid(), ROOT):
            raise PermissionError(errno.EPERM, f"It belongs to user id {found.st_uid}", str(self._folder))
        if found.st_mode & OF_OTHERS:
            self._folder.chmod(0o700)
        return True

    def _path(self, salt: str) -> Path:
        """An owner's files begin alike, so that they can be told apart without a list of salts."""
        own = self._digest(owner_of(salt))[:OWNER_CHARS]
        return self._folder / f"{own}{self._digest(salt)[:OWNER_CHARS]}{SUFFIX}"

    def _digest(self, salt: str) -> str:
        fields = [self._fingerprint.encode(), salt.encode("utf-8", "surrogatepass")]
        return blake3(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).hexdigest()


@contextmanager
def _open_plain(path: Path, flags: int) -> Iterator[BinaryIO]:
    """Follows no link, and does not wait for the other end of a pipe."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "rb" if flags == os.O_RDONLY else "a+b") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Not a plain file", str(path))
        yield file


def _ends_whole(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
