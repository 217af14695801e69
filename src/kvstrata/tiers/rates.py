"""How fast blocks come back, measured while they do. Knows no files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstrata.tiers.usage import Rates

# Each block counts this much less for every block that comes after it.
MEMORY = 0.98


class RateMeter:
    """Bytes by the time in which at least one read was under way: reads that overlap are not counted twice."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._since = 0.0
        self._bytes = 0.0
        self._busy_s = 0.0
        self._block_s = 0.0
        self._weight = 0.0
        self._num_blocks = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Call what it yields with the number of bytes once they are there; a read that failed counts for nothing."""
        started = self._clock()
        with self._lock:
            if self._num_active == 0:
                self._since = started
            self._num_active += 1
        try:
            yield lambda nbytes: self._done(started, nbytes)
        finally:
            with self._lock:
                self._num_active -= 1

    def _done(self, started: float, nbytes: int) -> None:
        now = self._clock()
        with self._lock:
            self._bytes = self._bytes * MEMORY + nbytes
            self._busy_s = self._busy_s * MEMORY + now - self._since
            self._block_s = self._block_s * MEMORY + now - started
            self._weight = self._weight * MEMORY + 1
            self._since = now
            self._num_blocks += 1

    def rates(self) -> Rates:
        with self._lock:
            if not self._num_blocks:
                return Rates(0.0, 0.0, 0)
            per_s = self._bytes / max(self._busy_s, 1e-9)
            return Rates(per_s, self._block_s / self._weight, self._num_blocks)
