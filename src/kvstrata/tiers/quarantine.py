"""Files that were not what they said, kept for a look, bounded in number and bytes. Knows no catalogue."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path

from kvstrata.tiers.files import Files, unlink_if_there
from kvstrata.tiers.reasons import Damage

KEY_IN_HEX = re.compile("(?:[0-9a-f]{2})+")


@dataclass(frozen=True, slots=True)
class Held:
    name: str
    disk_bytes: int
    modified: float


class Quarantine:
    def __init__(self, folder: Path, files: Files, *, limit_files: int, limit_bytes: int) -> None:
        self._folder = folder
        self._files = files
        self._limit_files = limit_files
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}  # the oldest first
        self.reload()

    @property
    def disk_bytes(self) -> int:
        with self._lock:
            return sum(held.disk_bytes for held in self._held.values())

    def keys(self) -> frozenset[bytes]:
        """Of the blocks whose files these were."""
        with self._lock:
            stems = [name.partition(".")[0] for name in self._held]
        return frozenset(bytes.fromhex(stem) for stem in stems if KEY_IN_HEX.fullmatch(stem))

    def reload(self) -> None:
        found: list[Held] = []
        for name in self._files.names(self._folder):
            status = self._files.status(self._folder / name)
            found.append(Held(name, status.disk_bytes, status.modified))
        with self._lock:
            self._held = {held.name: held for held in sorted(found, key=lambda held: held.modified)}
            self._shrink()

    def take(self, path: Path, reason: Damage) -> None:
        """Out of the way by a rename; where that cannot be done, or it is too large to keep, it is deleted."""
        name = f"{path.name}.{reason}"
        try:
            status = self._files.status(path)
            if status.disk_bytes > self._limit_bytes or not self._limit_files:
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
            self._held[name] = Held(name, status.disk_bytes, status.modified)
            self._shrink()

    def clear(self) -> int:
        """Bytes that this gave back."""
        freed = 0
        with self._lock:
            for held in list(self._held.values()):
                unlink_if_there(self._files, self._folder / held.name)
                del self._held[held.name]
                freed += held.disk_bytes
        return freed

    def _shrink(self) -> None:
        total = sum(held.disk_bytes for held in self._held.values())
        while self._held and (len(self._held) > self._limit_files or total > self._limit_bytes):
            oldest = next(iter(self._held.values()))
            unlink_if_there(self._files, self._folder / oldest.name)
            del self._held[oldest.name]
            total -= oldest.disk_bytes
