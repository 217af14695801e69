"""Speeds as they are measured, smoothed. The scheduler sizes chunks by them."""

from __future__ import annotations

# Weight of the newest measurement.
SMOOTHING = 0.3


class Rate:
    def __init__(self) -> None:
        self.tokens_s = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        newest = num_tokens / seconds
        self.tokens_s = newest if not self.tokens_s else (1 - SMOOTHING) * self.tokens_s + SMOOTHING * newest
