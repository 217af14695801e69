"""How much is written in a day, for a disk's life or a network's sake. Pure, but for what it counts."""

from __future__ import annotations

import math
import threading

SECONDS_OF_A_DAY = 86_400


class DailyBudget:
    """Bytes written since midnight UTC. What is queued counts: otherwise a burst could pass the limit."""

    def __init__(self, limit_bytes: int, *, day: int = 0, written_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes  # 0: no limit
        self._lock = threading.Lock()
        self._day = day
        self._written_bytes = written_bytes
        self._is_spent = False

    def left_bytes(self, now: float) -> float:
        """Infinite without a limit. The headers of blocks that are encoded later come on top."""
        if not self._limit_bytes:
            return math.inf
        written_bytes = self.written_bytes(now)
        return -math.inf if self._is_spent else self._limit_bytes - written_bytes

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

    def give_back(self, nbytes: int, now: float) -> None:
        """They were taken, and could not be written."""
        with self._lock:
            self._turn(now)
            self._written_bytes = max(0, self._written_bytes - nbytes)

    def written_bytes(self, now: float) -> int:
        with self._lock:
            self._turn(now)
            return self._written_bytes

    def _turn(self, now: float) -> None:
        if day_of(now) != self._day:
            self._day, self._written_bytes, self._is_spent = day_of(now), 0, False


def day_of(now: float) -> int:
    return int(now // SECONDS_OF_A_DAY)
