"""Values as files in a folder that several machines mount, or several servers of one machine share.

A file's time of change is when it was last used. What has expired is not there for anyone, and is deleted by a sweep.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from kvstrata.remote.faults import Fault, StoreFault
from kvstrata.remote.stores.base import PREFIX, Content, StoredValue
from kvstrata.remote.url import RemoteUrl

FAULTS = {
    errno.ENOSPC: Fault.FULL,
    errno.EDQUOT: Fault.FULL,
    errno.EROFS: Fault.READ_ONLY,
    errno.EACCES: Fault.DENIED,
    errno.EPERM: Fault.DENIED,
    errno.ENOENT: Fault.NO_PLACE,
    errno.ENOTDIR: Fault.NO_PLACE,
    errno.ESTALE: Fault.UNREACHABLE,
    errno.ETIMEDOUT: Fault.TIMEOUT,
}
# Of a temporary that no server finishes any more.
ABANDONED_S = 3600.0


class FolderStore:
    def __init__(self, url: RemoteUrl, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._place = Path(url.path)
        self._folder = self._place / PREFIX

    def sizes(self, names: Sequence[str]) -> list[int]:
        with _faults():
            self._place.stat()  # a folder that is gone is a fault, not a miss
            return [_size(self._path(name)) for name in names]

    def leading(self, names: Sequence[str]) -> list[int]:
        with _faults():
            self._place.stat()
            return list(takewhile(bool, (_size(self._path(name)) for name in names)))

    def get(self, name: str) -> bytes | None:
        with _faults():
            self._place.stat()
            try:
                return self._path(name).read_bytes()
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
                return False
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = path.with_name(f"{name}.{os.getpid()}.{time.monotonic_ns()}.part")
            try:
                written.write_bytes(content)
                written.chmod(0o600)
                # A link is made by one of several writers only, and a crash leaves the whole file or none.
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
                with suppress(FileNotFoundError):
                    os.utime(self._path(name))

    def delete(self, names: Sequence[str]) -> None:
        with _faults():
            for name in names:
                self._path(name).unlink(missing_ok=True)

    def values(self) -> Iterator[StoredValue]:
        with _faults():
            for path in self._files():
                if path.suffix != ".part" and (nbytes := _size(path)):
                    yield StoredValue(path.name, nbytes)

    def sweep(self, ttl_s: float) -> int:
        """By the clock of this machine: one that is ahead deletes earlier."""
        num_deleted = 0
        with _faults():
            for path in self._files():
                oldest_s = ABANDONED_S if path.suffix == ".part" else ttl_s
                with suppress(FileNotFoundError):
                    if oldest_s and path.parent != self._folder and self._clock() - path.stat().st_mtime > oldest_s:
                        path.unlink()
                        num_deleted += path.suffix != ".part"
        return num_deleted

    def close(self) -> None:
        return

    def _files(self) -> Iterator[Path]:
        return (path for path in self._folder.rglob("*") if path.is_file())

    def _path(self, name: str) -> Path:
        """Blocks in 256 folders; what has a name of its own lies beside them."""
        return self._folder / name[:2] / name if len(name) > 32 else self._folder / name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreFault(FAULTS.get(error.errno or 0, Fault.OTHER), error.strerror or type(error).__name__) from None
