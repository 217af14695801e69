"""Remembered replies in a folder: a file of lines for each salt, beside the blocks of the disk cache.

Written on a thread of its own, which no request waits for. A folder that cannot be read or written costs only what
would have been remembered. Files hold token ids, as the blocks do, and only their owner may read them.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from kvstrata.engine.cache import owner_of
from kvstrata.server.replay.record import Record, from_line, said_s, to_line

log = logging.getLogger(__name__)

SUFFIX = ".replies"
MAX_FILE_BYTES = 8 << 20
MAX_FOLDER_BYTES = 64 << 20
NEW_SUFFIX = ".new"  # while a file is written anew
MAX_WAITING = 1024
OWNER_CHARS = 32


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
        path = self._path(salt)
        try:
            with path.open("rb") as file:
                # The end of a file that is too long: its newest lines.
                file.seek(max(0, path.stat().st_size - MAX_FILE_BYTES))
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
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            # After a line that a crash cut off, this one begins anew.
            file.write(line if file.tell() == 0 or _ends_whole(path) else b"\n" + line)
            size = file.tell()
        if size > MAX_FILE_BYTES:
            self._halve(path)
        self._appended_bytes += len(line)
        if self._appended_bytes > MAX_FILE_BYTES:
            self._bound()

    def _halve(self, path: Path) -> None:
        """Keep the newer half."""
        with path.open("rb") as file:
            file.seek(-MAX_FILE_BYTES // 2, os.SEEK_END)
            lines = file.read().splitlines(keepends=True)[1:]
        self._rewrite(path, lines)

    def _rewrite(self, path: Path, lines: Sequence[bytes]) -> None:
        """Published by rename, so that a crash leaves one or the other."""
        new = path.with_suffix(NEW_SUFFIX)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
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
            status = path.stat()
            if status.st_mtime < before_s:
                path.unlink(missing_ok=True)
                continue
            with path.open("rb") as file:
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
        """What a crash left of a file that was being written anew."""
        if self._folder.is_dir():
            for path in self._folder.glob(f"*{NEW_SUFFIX}"):
                path.unlink(missing_ok=True)

    def _bound(self) -> None:
        """Those that were not written to for longest go, whichever model they are of."""
        self._appended_bytes = 0
        self._remove_unfinished()
        by_age = sorted(self._paths(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in by_age:
            total += path.stat().st_size
            if total > MAX_FOLDER_BYTES:
                path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return list(self._folder.glob(f"*{SUFFIX}")) if self._folder.is_dir() else []

    def _path(self, salt: str) -> Path:
        """An owner's files begin alike, so that they can be told apart without a list of salts."""
        own = self._digest(owner_of(salt))[:OWNER_CHARS]
        return self._folder / f"{own}{self._digest(salt)[:OWNER_CHARS]}{SUFFIX}"

    def _digest(self, salt: str) -> str:
        fields = [self._fingerprint.encode(), salt.encode("utf-8", "surrogatepass")]
        return blake3(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).hexdigest()


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
