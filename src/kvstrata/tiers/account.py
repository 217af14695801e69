"""How many bytes of the volume the cache takes: blocks by their rows, all else by asking. Knows no SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvstrata.tiers.block import BASE
from kvstrata.tiers.catalogue import Row, Totals, read_tally
from kvstrata.tiers.folder import CacheFolder
from kvstrata.tiers.quarantine import Quarantine

PAGE_BYTES = 4096
# The folder itself, the three in it, the lock.
FIXED_BYTES = 5 * PAGE_BYTES


class Account:
    """Changed under the shelf's lock, read from anywhere."""

    def __init__(self, folder: CacheFolder, quarantine: Quarantine) -> None:
        self._folder = folder
        self._quarantine = quarantine
        self._shard_bytes: dict[str, int] = {}
        self.totals = Totals(0, 0, 0, {})

    def begin(self, totals: Totals) -> None:
        self.totals = totals
        self._shard_bytes = {shard.name: self._disk_bytes(shard) for shard in self._folder.shards()}

    def add(self, rows: Sequence[Row]) -> None:
        self._count(rows, 1)

    def subtract(self, rows: Sequence[Row]) -> None:
        self._count(rows, -1)

    def look_at(self, shard: Path) -> None:
        """A folder grows with the names in it."""
        self._shard_bytes[shard.name] = self._disk_bytes(shard)

    def disk_bytes(self) -> int:
        overhead = FIXED_BYTES + self._quarantine.disk_bytes + sum(list(self._shard_bytes.values()))
        return self.totals.disk_bytes + overhead + sum(map(self._disk_bytes, self._folder.catalogue_paths()))

    def _count(self, rows: Sequence[Row], sign: int) -> None:
        bases = [row for row in rows if row.id.part == BASE]
        labels = Counter(self.totals.labels)
        for row in rows:
            for label, nbytes in read_tally(row.tally).items():
                labels[label] += sign * nbytes
        self.totals = Totals(
            self.totals.num_blocks + sign * len(bases),
            self.totals.num_tokens + sign * sum(row.num_tokens for row in bases),
            self.totals.disk_bytes + sign * sum(row.disk_bytes for row in rows),
            dict(labels),
        )

    def _disk_bytes(self, path: Path) -> int:
        try:
            return self._folder.files.status(path).disk_bytes
        except OSError:
            return 0


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
