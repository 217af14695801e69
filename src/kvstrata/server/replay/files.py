"""Remembered replies in a folder: a file of lines for each salt, beside the blocks of the disk cache.

Written on a thread of its own, which no request waits for. A folder that cannot be read or written costs only what
would have been remembered. Files hold token ids, as the blocks do, and only their owner may read them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvstrata.engine.cache import owner_of
from kvstrata.server.replay.record import Record, from_line, to_line

log = logging.getLogger(__name__)

SUFFIX = ".replies"
MAX_FILE_BYTES = 8 << 20
MAX_FOLDER_BYTES = 64 << 20
MAX_WAITING = 1024
OWNER_CHARS = 32


class ReplyFiles:
    """`fingerprint`: of the model whose ids these are."""

    def __init__(self, folder: Path, fingerprint: str, vocab_size: int) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._appended_bytes = 0  # since the folder was last bounded
        self._told = False  # that the folder cannot be used
        self._thread = threading.Thread(target=self._work, name="kvstrata-replies", daemon=True)
        self._thread.start()
        self._later(self._bound)

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
        read = (from_line(line, self._vocab_size) for line in lines)
        return [record for record in read if record is not None]

    def append(self, salt: str, record: Record) -> None:
        self._later(lambda: self._append(self._path(salt), to_line(record)))

    def clear(self, salt: str | None, owner: str | None) -> None:
        self._later(lambda: self._clear(salt, owner))

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits until all is written, for at most so long."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _later(self, job: Callable[[], None]) -> None:
        with contextlib.suppress(queue.Full):  # a disk that hangs: the reply is remembered in memory only
            self._jobs.put_nowait(job)

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
        """Keep the newer half. Published by rename, so that a crash leaves one or the other."""
        with path.open("rb") as file:
            file.seek(-MAX_FILE_BYTES // 2, os.SEEK_END)
            lines = file.read().splitlines(keepends=True)[1:]
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(lines)
        new.replace(path)

    def _clear(self, salt: str | None, owner: str | None) -> None:
        begins = self._digest(owner)[:OWNER_CHARS] if owner is not None else ""
        for path in self._paths():
            if path.name.startswith(begins) and (salt is None or path == self._path(salt)):
                path.unlink(missing_ok=True)

    def _bound(self) -> None:
        """Those that were not written to for longest go, whichever model they are of."""
        self._appended_bytes = 0
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
