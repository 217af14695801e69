"""Which writes are worth the disk's life: second touch and a daily budget. Pure, but for what it remembers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

REMEMBERED_KEYS = 65_536
SECONDS_OF_A_DAY = 86_400


class SecondTouch:
    """Admits a key once it has been asked for before. The memory is bounded: the least recent keys are forgotten."""

    def __init__(self, capacity: int = REMEMBERED_KEYS) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._seen: OrderedDict[int, None] = OrderedDict()

    def see(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._see(key)

    def admit(self, key: bytes) -> bool:
        """A put is a touch of its own."""
        with self._lock:
            return self._see(key)

    def _see(self, key: bytes) -> bool:
        short = int.from_bytes(key[:8], "little")
        again = short in self._seen
        self._seen[short] = None
        self._seen.move_to_end(short)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return again


class DailyBudget:
    """Bytes written since midnight UTC. What is queued counts: otherwise a burst could pass the limit."""

    def __init__(self, limit_bytes: int, *, day: int = 0, written_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes  # 0: no limit
        self._lock = threading.Lock()
        self._day = day
        self._written_bytes = written_bytes
        self._is_spent = False

    def allows(self, nbytes: int, queued_bytes: int, now: float) -> bool:
        """As far as is known before a block is encoded: its header comes on top."""
        if not self._limit_bytes:
            return True
        total = self.written_bytes(now) + queued_bytes + nbytes
        return total <= self._limit_bytes and not self._is_spent

    def take(self, nbytes: int, now: float) -> bool:
        """Count so many bytes as written, unless that would be too many. After the first that is too many none are
        taken until tomorrow: what follows could hang on it."""
        with self._lock:
            self._turn(now)
            if self._limit_bytes and self._written_bytes + nbytes > self._limit_bytes:
                self._is_spent = True
            if not self._is_spent:
                self._written_bytes += nbytes
            return not self._is_spent

    def written_bytes(self, now: float) -> int:
        with self._lock:
            self._turn(now)
            return self._written_bytes

    def _turn(self, now: float) -> None:
        if day_of(now) != self._day:
            self._day, self._written_bytes, self._is_spent = day_of(now), 0, False


def day_of(now: float) -> int:
    return int(now // SECONDS_OF_A_DAY)
