"""Expected read time of blocks, measured while they are read. Knows no files.

The expected time is a line through the measurements: seconds for each block plus seconds for each byte. A measurement
fades with every block after it and with the time in which none is read: a disk that was slow once is tried again, the
later the slower it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# Factor on the weight of a measurement for each block after it.
MEMORY = 0.98

# While nothing is read, the expected time of the same blocks halves in this time.
HALF_LIFE_S = 60.0

# Sizes with a smaller spread, as a share of their mean, cannot separate time for each block from time for each byte.
LEAST_SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class ReadRates:
    """Rates of reads as they ran, in parallel or not. All 0 before the first measurement."""

    read_bytes_per_s: float = 0.0  # of recent reads, for people
    block_s: float = 0.0  # expected for each block, whatever its size
    byte_s: float = 0.0  # expected for each byte
    num_blocks: int = 0  # number of measurements
    under_way_s: float = 0.0  # of the running reads since the last block; 0 without a running read

    def seconds_for(self, nbytes: int, num_blocks: int) -> float:
        """Return the expected seconds for blocks. Before the first measurement only the running read counts: its block
        becomes the measurement."""
        return self.under_way_s + num_blocks * self.block_s + nbytes * self.byte_s


@dataclass(frozen=True, slots=True)
class _Sums:
    """Weighted sums over blocks."""

    weight: float = 0.0
    nbytes: float = 0.0
    squared: float = 0.0
    seconds: float = 0.0
    products: float = 0.0  # of bytes and seconds

    def faded(self, factor: float) -> _Sums:
        sums = (self.weight, self.nbytes, self.squared, self.seconds, self.products)
        return _Sums(*(factor * each for each in sums))

    def plus(self, nbytes: int, seconds: float) -> _Sums:
        return _Sums(
            self.weight + 1,
            self.nbytes + nbytes,
            self.squared + nbytes * nbytes,
            self.seconds + seconds,
            self.products + nbytes * seconds,
        )

    def line(self) -> tuple[float, float]:
        """Return the seconds for each block and for each byte, neither below 0."""
        mean_bytes, mean_s = self.nbytes / self.weight, self.seconds / self.weight
        by_bytes_alone = (0.0, mean_s / max(1.0, mean_bytes))
        spread = self.squared / self.weight - mean_bytes**2
        if spread <= (LEAST_SPREAD * mean_bytes) ** 2:
            return by_bytes_alone
        byte_s = (self.products / self.weight - mean_bytes * mean_s) / spread
        if byte_s <= 0:
            return mean_s, 0.0
        block_s = mean_s - byte_s * mean_bytes
        return (block_s, byte_s) if block_s > 0 else by_bytes_alone


class RateMeter:
    """Measures blocks by the time in which at least one read runs: reads that overlap are not counted twice."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._since = 0.0  # when the last block came, or the first running read began
        self._sums = _Sums()
        self._idle_s = 0.0  # without a running read, since the last block came and before `_ended`
        self._ended = 0.0  # when the last read ended
        self._num_blocks = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Measure a read. Call the yielded function with the number of bytes read; a failed read does not count."""
        with self._lock:
            if self._num_active == 0:
                self._since = self._clock()
                self._idle_s = self._idle_until(self._since)
            self._num_active += 1
        try:
            yield self._done
        finally:
            with self._lock:
                self._num_active -= 1
                self._ended = self._clock()

    def _done(self, nbytes: int) -> None:
        now = self._clock()
        with self._lock:
            # The sums fade only where a block is added: their weight is never below 1, however long the tier was idle.
            self._sums = self._sums.faded(MEMORY * _fading(self._idle_s)).plus(nbytes, now - self._since)
            self._idle_s = 0.0
            self._since = now
            self._num_blocks += 1

    def _idle_until(self, now: float) -> float:
        """Return the seconds without a running read since the last block came; while a read runs, none are added."""
        is_idle = self._num_blocks and not self._num_active
        return self._idle_s + (now - self._ended if is_idle else 0.0)

    def rates(self) -> ReadRates:
        now = self._clock()
        with self._lock:
            under_way_s = now - self._since if self._num_active else 0.0
            if not self._num_blocks:
                return ReadRates(under_way_s=under_way_s)
            block_s, byte_s = self._sums.line()
            fading = _fading(self._idle_until(now))
            per_s = self._sums.nbytes / max(self._sums.seconds, 1e-9)
            return ReadRates(per_s, fading * block_s, fading * byte_s, self._num_blocks, under_way_s)


def _fading(idle_s: float) -> float:
    return 0.5 ** (idle_s / HALF_LIFE_S)
