"""How many bytes of the volume the cache takes: blocks by their rows, all else by asking, on the tier's threads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvstrata.disk.folder import CacheFolder
from kvstrata.disk.quarantine import Quarantine

PAGE_BYTES = 4096
# The folder itself, the three in it, the lock.
FIXED_BYTES = 5 * PAGE_BYTES


class Account:
    """Changed under the shelf's lock, read from anywhere: no question here asks the disk."""

    def __init__(self, folder: CacheFolder, quarantine: Quarantine) -> None:
        self._folder = folder
        self._quarantine = quarantine
        self._shard_bytes: dict[str, int] = {}
        self._catalogue_bytes = 0
        self._stray_bytes = 0
        self.look_at_all()

    def look_at_all(self) -> None:
        self._shard_bytes = {shard.name: self._disk_bytes(shard) for shard in self._folder.shards()}
        self.look_at_catalogue()

    def look_at_shard(self, shard: Path) -> None:
        """A folder grows with the names in it."""
        self._shard_bytes[shard.name] = self._disk_bytes(shard)

    def look_at_catalogue(self) -> None:
        """After every change of it."""
        self._catalogue_bytes = sum(map(self._disk_bytes, self._folder.catalogue_paths()))

    def look_at_strays(self, paths: Iterable[Path]) -> None:
        """Files under the names of blocks that cannot be read, or not be deleted."""
        self._stray_bytes = sum(map(self._disk_bytes, paths))

    def disk_bytes(self, block_bytes: int) -> int:
        """`block_bytes`: of all files that have a row."""
        beside = self._quarantine.disk_bytes + self._catalogue_bytes + self._stray_bytes
        return block_bytes + FIXED_BYTES + beside + sum(list(self._shard_bytes.values()))

    def _disk_bytes(self, path: Path) -> int:
        try:
            return self._folder.files.status(path).disk_bytes
        except OSError:
            return 0


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
