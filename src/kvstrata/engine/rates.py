"""Speeds as they are measured, smoothed. The scheduler sizes chunks by them."""

from __future__ import annotations

import statistics
from collections import deque

# Weight of the newest measurement.
SMOOTHING = 0.3
# Steps that the usual one is the median of.
PACE_STEPS = 8


class Rate:
    def __init__(self) -> None:
        self.tokens_s = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        newest = num_tokens / seconds
        self.tokens_s = newest if not self.tokens_s else (1 - SMOOTHING) * self.tokens_s + SMOOTHING * newest


class Pace:
    """How long a decode step usually takes. Only those count that had no other work between them."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=PACE_STEPS)

    def add(self, seconds: float) -> None:
        self._steps.append(seconds)

    @property
    def step_s(self) -> float:
        return statistics.median(self._steps) if self._steps else 0.0
