"""Values as files in a folder that several machines mount, or several servers of one machine share.

A file's modification time is the time of its last use. An expired file counts as absent; a sweep deletes it, or the
server that creates it anew. Each server uses its own clock: one that is ahead lets files expire earlier.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path

from kvstrata.tiers.remote.health import StoreFault, StoreFaultReason
from kvstrata.tiers.remote.store import PREFIX, Content, StoredValue, require_size
from kvstrata.tiers.remote.url import RemoteUrl

FAULTS = {
    errno.ENOSPC: StoreFaultReason.FULL,
    errno.EDQUOT: StoreFaultReason.FULL,
    errno.EROFS: StoreFaultReason.READ_ONLY,
    errno.EACCES: StoreFaultReason.DENIED,
    errno.EPERM: StoreFaultReason.DENIED,
    errno.ENOENT: StoreFaultReason.NO_PLACE,
    errno.ENOTDIR: StoreFaultReason.NO_PLACE,
    errno.ESTALE: StoreFaultReason.UNREACHABLE,
    errno.ETIMEDOUT: StoreFaultReason.TIMEOUT,
}

# Age of a temporary file that no server finishes any more.
ABANDONED_S = 3600.0


class FolderStore:
    """A `KeyValueStore` in a folder."""

    def __init__(self, url: RemoteUrl, clock: Callable[[], float] = time.time, *, ttl_s: float = 0.0) -> None:
        """Open a folder. `ttl_s`: time without a use after which a value has expired; 0: none does."""
        self._clock = clock
        self._ttl_s = ttl_s
        self._place = Path(url.path)
        self._folder = self._place / PREFIX

    def sizes(self, names: Sequence[str]) -> list[int]:
        with _faults():
            self._place.stat()  # a folder that is gone is a fault, not a miss
            return [self._size(self._path(name)) for name in names]

    def leading(self, names: Sequence[str]) -> list[int]:
        with _faults():
            self._place.stat()
            return list(takewhile(bool, (self._size(self._path(name)) for name in names)))

    def get(self, name: str, max_bytes: int) -> bytes | None:
        with _faults():
            self._place.stat()
            path = self._path(name)
            try:
                with path.open("rb", buffering=0) as file:
                    nbytes = self._held_bytes(path, os.fstat(file.fileno()))
                    require_size(nbytes, max_bytes)
                    return _read(file, nbytes) if nbytes else None
            except FileNotFoundError:
                return None

    def create(self, name: str, content: Content, ttl_s: float) -> bool:
        del ttl_s
        path = self._path(name)
        with _faults():
            self._place.stat()
            if path.exists():
                if not os.access(path.parent, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                if self._size(path):
                    return False
                path.unlink(missing_ok=True)  # it has expired, or a machine lost power before its bytes were written
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = path.with_name(f"{name}.{os.getpid()}.{time.monotonic_ns()}.part")
            try:
                _write_synced(written, content)
                # Only one of several writers can make the link. The bytes are on the disk before the name is: a crash
                # leaves the whole file or none.
                os.link(written, path)
            except FileExistsError:
                return False
            finally:
                with suppress(OSError):
                    written.unlink()
        return True

    def touch(self, names: Sequence[str], ttl_s: float) -> None:
        del ttl_s
        with _faults():
            for name in names:
                path = self._path(name)
                with suppress(FileNotFoundError):
                    if self._size(path):
                        os.utime(path)

    def delete(self, names: Sequence[str]) -> None:
        with _faults():
            for name in names:
                self._path(name).unlink(missing_ok=True)

    def values(self) -> Iterator[StoredValue]:
        with _faults():
            for path in self._files():
                if path.suffix != ".part" and (nbytes := self._size(path)):
                    yield StoredValue(path.name, nbytes)

    def sweep(self, ttl_s: float) -> int:
        """Delete expired files, by the clock of this machine: one that is ahead deletes earlier."""
        num_deleted = 0
        with _faults():
            for path in self._files():
                oldest_s = ABANDONED_S if path.suffix == ".part" else ttl_s
                with suppress(FileNotFoundError):
                    if self._has_expired(path, path.stat(), oldest_s):
                        path.unlink()
                        num_deleted += path.suffix != ".part"
        return num_deleted

    def close(self) -> None:
        return

    def _size(self, path: Path) -> int:
        try:
            return self._held_bytes(path, path.stat())
        except FileNotFoundError:
            return 0

    def _held_bytes(self, path: Path, status: os.stat_result) -> int:
        return 0 if self._has_expired(path, status, self._ttl_s) else status.st_size

    def _has_expired(self, path: Path, status: os.stat_result, ttl_s: float) -> bool:
        """Whether a file is past its time. Files directly in the folder, which have fixed names, never expire."""
        return bool(ttl_s) and path.parent != self._folder and self._clock() - status.st_mtime > ttl_s

    def _files(self) -> Iterator[Path]:
        return (path for path in self._folder.rglob("*") if path.is_file())

    def _path(self, name: str) -> Path:
        """Return a path: blocks are in 256 folders, values with fixed names beside these folders."""
        return self._folder / name[:2] / name if len(name) > 32 else self._folder / name


def _write_synced(path: Path, content: Content) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(file: FileIO, nbytes: int) -> bytes:
    """Read the first bytes of a file, or fewer if it ends before, which the seal then shows."""
    pieces, left_bytes = list[bytes](), nbytes
    while left_bytes and (piece := file.read(left_bytes)):
        pieces.append(piece)
        left_bytes -= len(piece)
    return b"".join(pieces)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreFault(
            FAULTS.get(error.errno or 0, StoreFaultReason.OTHER), error.strerror or type(error).__name__
        ) from None
