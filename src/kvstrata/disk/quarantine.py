"""Files that were not what they said, kept for a look, bounded in number and bytes. Knows no catalogue."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from kvstrata.disk.files import Files, plain_files, unlink_if_there
from kvstrata.disk.folder import parse_file_name
from kvstrata.disk.reasons import Damage
from kvstrata.tier.block import BlockId

MOST_FILES = 32
# Of the cache's limit, and at most so many bytes.
LARGEST_SHARE = 0.02
LARGEST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Quarantined:
    name: str
    disk_bytes: int
    modified: float


def parse_quarantined_name(name: str) -> list[BlockId]:
    """The block whose file this was; none where the name is not one that `take` gives."""
    file_name, _, reason = name.rpartition(".")
    return parse_file_name(file_name) if reason in list(Damage) else []


def list_quarantined(files: Files, folder: Path) -> list[Quarantined]:
    """What `take` has put there, the oldest first. What else lies there is not ours to count or to delete."""
    held = [
        Quarantined(path.name, status.disk_bytes, status.modified)
        for path, status in plain_files(files, folder)
        if parse_quarantined_name(path.name)
    ]
    return sorted(held, key=lambda held: held.modified)


class Quarantine:
    """Changed by one thread at a time, read from anywhere: its lock is never held over a file operation."""

    def __init__(self, folder: Path, files: Files, cache_bytes: int) -> None:
        """`cache_bytes`: the limit of the whole cache."""
        self._folder = folder
        self._files = files
        self._limit_bytes = min(int(LARGEST_SHARE * cache_bytes), LARGEST_BYTES)
        self._lock = threading.Lock()
        self._held: dict[str, Quarantined] = {}  # the oldest first
        self.reload()

    @property
    def disk_bytes(self) -> int:
        with self._lock:
            return sum(held.disk_bytes for held in self._held.values())

    def keys(self) -> frozenset[bytes]:
        """Of the blocks whose files these were."""
        with self._lock:
            names = list(self._held)
        return frozenset(block.key for name in names for block in parse_quarantined_name(name))

    def reload(self) -> None:
        found = list_quarantined(self._files, self._folder)
        with self._lock:
            self._held = {held.name: held for held in found}
        self._shrink()

    def take(self, path: Path, reason: Damage) -> None:
        """Out of the way by a rename; where that cannot be done, or it is too large to keep, it is deleted."""
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
            self._held[name] = Quarantined(name, status.disk_bytes, status.modified)
        self._shrink()

    def _shrink(self) -> None:
        while len(self._held) > MOST_FILES or self.disk_bytes > self._limit_bytes:
            oldest = next(iter(self._held))
            unlink_if_there(self._files, self._folder / oldest)
            with self._lock:
                del self._held[oldest]
