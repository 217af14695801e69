"""One file over HTTP, whose checksum is known: resumed where it was cut off, and never used before it is whole.

Knows ranges and checksums. Does not know what is in the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

PIECE_BYTES = 1 << 20
NOTHING_THERE = 416  # behind what was asked for
MAX_TRIES = 3  # of one call; what has arrived stays for the next one

Advance = Callable[[int], None]


class WrongChecksum(Exception):
    """What arrived is another file. Nothing of it is kept."""

    def __init__(self, sha256: str) -> None:
        super().__init__(sha256)
        self.sha256 = sha256


def download(
    client: httpx.Client, url: str, target: Path, part: Path, sha256: str, size_bytes: int, advance: Advance
) -> None:
    """Publishes `target` by rename once all of it has arrived and is right. What has arrived so far rests in `part`,
    which must be on the same file system. Nothing is kept behind `size_bytes`, however much a server sends. Raises
    httpx.HTTPError, OSError and WrongChecksum."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("a+b") as file:
        if _is_ours(file, part):
            _fill(client, url, _Part(file, size_bytes, advance), sha256)
            os.replace(part, target)
            return
    # Another process is filling it.
    own = target.with_name(f"{target.name}.part")
    with own.open("a+b") as file:
        _fill(client, url, _Part(file, size_bytes, advance), sha256)
    os.replace(own, target)


def _is_ours(file: IO[bytes], part: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, another process may have published it.
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except OSError:
        return False


class _Part:
    """What has arrived, and its checksum so far."""

    def __init__(self, file: IO[bytes], size_bytes: int, advance: Advance) -> None:
        self._file = file
        self._size_bytes = size_bytes  # of the whole file
        self._advance = advance
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        file.seek(0)
        while piece := file.read(PIECE_BYTES):
            self._count(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def add(self, piece: bytes) -> None:
        """Raises WrongChecksum for more than the whole file has."""
        if self.num_bytes + len(piece) > self._size_bytes:
            found = self.sha256
            self.restart()
            raise WrongChecksum(found)
        self._file.write(piece)
        self._count(piece)

    def restart(self) -> None:
        self._file.truncate(0)
        self._advance(-self.num_bytes)
        self._digest, self.num_bytes = hashlib.sha256(), 0

    def sync(self) -> None:
        self._file.flush()
        with suppress(OSError):  # some file systems have none
            os.fsync(self._file.fileno())

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.num_bytes += len(piece)
        self._advance(len(piece))


def _fill(client: httpx.Client, url: str, part: _Part, sha256: str) -> None:
    is_resumed = part.num_bytes > 0
    if part.sha256 != sha256:
        _receive_all(client, url, part)
    if part.sha256 != sha256 and is_resumed:
        # What was there may have been damaged, or of another file.
        part.restart()
        _receive_all(client, url, part)
    if part.sha256 != sha256:
        found = part.sha256
        part.restart()
        raise WrongChecksum(found)
    part.sync()


def _receive_all(client: httpx.Client, url: str, part: _Part) -> None:
    import httpx

    for tries_left in reversed(range(MAX_TRIES)):
        try:
            _receive(client, url, part)
            break
        except httpx.TransportError:
            if not tries_left:
                raise


def _receive(client: httpx.Client, url: str, part: _Part) -> None:
    """Appends what is missing; all of it, where the server knows no ranges."""
    have = part.num_bytes
    # As it is: a checksum is of the file, not of how it travels.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with client.stream("GET", url, headers=headers) as response:
        if have and response.status_code == NOTHING_THERE:
            return
        response.raise_for_status()
        if have and not response.headers.get("content-range", "").startswith(f"bytes {have}-"):
            part.restart()
        for piece in response.iter_raw():
            part.add(piece)
