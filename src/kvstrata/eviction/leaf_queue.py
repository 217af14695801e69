"""Leaves in the order of their last use, open at both ends. Knows no tree and no worth."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LeafQueue(Generic[K]):
    """O(log n) for each operation: two heaps whose outdated items are skipped when they come up. The one for the newest
    is kept from the first call of `newest` on."""

    def __init__(self) -> None:
        self._current: dict[K, int] = {}  # the number of the item that counts
        self._oldest: list[tuple[float, int, int, K]] = []
        self._newest: list[tuple[float, int, int, K]] | None = None
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, key: K) -> bool:
        return key in self._current

    def put(self, key: K, used_s: float, start: int) -> None:
        """Also for a key that is there already. Of two with the same time, the one that starts later is the older."""
        self._num_put += 1
        self._current[key] = self._num_put
        heapq.heappush(self._oldest, (used_s, -start, self._num_put, key))
        most = 64 + 4 * len(self._current)
        if len(self._oldest) > most:
            self._oldest = self._without_outdated(self._oldest, 1)
        if self._newest is not None:
            heapq.heappush(self._newest, (-used_s, start, -self._num_put, key))
            if len(self._newest) > most:
                self._newest = self._without_outdated(self._newest, -1)

    def discard(self, key: K) -> None:
        self._current.pop(key, None)

    def oldest(self) -> K | None:
        return self._first(self._oldest, 1)

    def newest(self) -> K | None:
        if self._newest is None:
            current = self._without_outdated(self._oldest, 1)
            self._newest = [(-used_s, -start, -number, key) for used_s, start, number, key in current]
            heapq.heapify(self._newest)
        return self._first(self._newest, -1)

    def _first(self, heap: list[tuple[float, int, int, K]], sign: int) -> K | None:
        current = self._current
        while heap:
            _, _, number, key = heap[0]
            if current.get(key) == sign * number:
                return key
            heapq.heappop(heap)
        return None

    def _without_outdated(self, heap: list[tuple[float, int, int, K]], sign: int) -> list[tuple[float, int, int, K]]:
        kept = [item for item in heap if self._current.get(item[3]) == sign * item[2]]
        heapq.heapify(kept)
        return kept
