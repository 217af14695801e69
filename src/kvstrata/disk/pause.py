"""When to try again after the disk said no: each time twice as long, up to a limit. Knows no threads."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstrata.disk.reasons import Drop, Fault

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 300.0


class Pause:
    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._clock = clock
        self._next_s = first_s
        self._until = 0.0
        self.reason = ""

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._until - self._clock()) if self.reason else 0.0

    @property
    def is_on(self) -> bool:
        return self.remaining_s > 0

    def begin(self, reason: Fault | Drop, what: str) -> None:
        """Said once for each reason, until a write succeeds."""
        if reason != self.reason:
            log.warning(
                "The disk cache cannot be written (%s): %s. The server goes on from memory and tries again in %.0f s",
                reason,
                what,
                self._next_s,
            )
        self.reason = reason
        self._until = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, max(self._first_s, LONGEST_PAUSE_S))

    def lift(self) -> None:
        """Try now. After another fault the next is longer all the same."""
        self._until = 0.0

    def end(self) -> None:
        if self.reason:
            log.info("The disk cache can be written again")
        self.reason = ""
        self._next_s = self._first_s
