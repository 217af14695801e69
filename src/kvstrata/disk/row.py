"""A row: what is known of a block on the disk without opening its file. Knows no SQL and no files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvstrata.tier.block import BASE, BlockId


@dataclass(frozen=True, slots=True)
class BlockRow:
    id: BlockId
    parent: bytes
    root: bytes
    start: int
    num_tokens: int
    disk_bytes: int
    last_use: float
    uses: int
    created: float
    tally: str = "{}"  # JSON: bytes by label. Equal blocks have the same text


@dataclass(frozen=True, slots=True)
class RowTotals:
    num_blocks: int
    num_tokens: int
    disk_bytes: int
    labels: Mapping[str, int]  # bytes by label


class Sums:
    """Running totals of rows that come and go."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._num_tokens = 0
        self.disk_bytes = 0
        self._labels: Counter[str] = Counter()

    def count(self, row: BlockRow, labels: Mapping[str, int], sign: int) -> None:
        if row.id.part == BASE:
            self._num_blocks += sign
            self._num_tokens += sign * row.num_tokens
        self.disk_bytes += sign * row.disk_bytes
        for label, nbytes in labels.items():
            self._labels[label] += sign * nbytes

    def count_all(self, others: Sums, sign: int) -> None:
        self._num_blocks += sign * others._num_blocks
        self._num_tokens += sign * others._num_tokens
        self.disk_bytes += sign * others.disk_bytes
        for label, nbytes in others._labels.items():
            self._labels[label] += sign * nbytes

    def totals(self) -> RowTotals:
        labels = {label: nbytes for label, nbytes in self._labels.items() if nbytes}
        return RowTotals(self._num_blocks, self._num_tokens, self.disk_bytes, labels)


def write_tally(labels: Mapping[str, int]) -> str:
    return json.dumps(labels, sort_keys=True, separators=(",", ":"))


def read_tally(text: str) -> Counter[str]:
    """Nothing where it makes no sense: at worst a block is written again."""
    try:
        return Counter({str(label): int(nbytes) for label, nbytes in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        return Counter()
