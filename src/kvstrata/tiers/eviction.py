"""Who goes first: the least recently used, leaves before what they hang on. Decides; deletes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvstrata.tiers.catalogue import Row

FIRST_BATCH = 8


class Leaves(Protocol):
    """What of a catalogue this needs: as it is now, with what was just removed gone."""

    def oldest_leaves(self, count: int) -> Sequence[Row]: ...

    def leaves_at(self, key: bytes) -> Sequence[Row]: ...


def victims(catalogue: Leaves, is_kept: Callable[[bytes], bool]) -> Iterator[Row]:
    """The caller must remove each from the catalogue before it asks for the next, or keep its key from then on.

    A batch is the oldest leaves there are, so nothing outside it can be older than its last. Removing a leaf may free
    its parent, which then takes its own place in the order; when the order passes the batch's last, a new batch is due.
    """
    num_kept = 0
    while True:
        count = FIRST_BATCH + 2 * num_kept
        batch = catalogue.oldest_leaves(count)
        free = [row for row in batch if not is_kept(row.id.key)]
        if not free:
            if len(batch) < count:
                return
            num_kept = max(1, 2 * num_kept, len(batch))
            continue
        num_kept = len(batch) - len(free)
        yield from _in_order(catalogue, is_kept, free, _age(batch[-1]))


def _in_order(
    catalogue: Leaves, is_kept: Callable[[bytes], bool], free: list[Row], last: tuple[float, int]
) -> Iterator[Row]:
    heap = [(_age(row), row.id.key, row.id.part, row) for row in free]
    heapq.heapify(heap)
    while heap and heap[0][0] <= last:
        row = heapq.heappop(heap)[-1]
        yield row
        freed = (*catalogue.leaves_at(row.parent), *catalogue.leaves_at(row.id.key))
        known = {(key, part) for _, key, part, _ in heap}
        for leaf in freed:
            if not is_kept(leaf.id.key) and (leaf.id.key, leaf.id.part) not in known:
                heapq.heappush(heap, (_age(leaf), leaf.id.key, leaf.id.part, leaf))


def _age(row: Row) -> tuple[float, int]:
    return row.last_use, -row.start
