"""Work on stored spans that failed: counted each time, logged once for each reason. The engine goes on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

log = logging.getLogger(__name__)

Chore = Literal["rewrites", "spills", "promotions", "restores", "shares", "lookups", "loads"]

# Of reasons that were logged, so that one whose text differs each time does not fill memory.
MAX_REASONS = 64


class Failures:
    def __init__(self, counters: Counter[str]) -> None:
        self.counters = counters
        self._logged: set[str] = set()

    def note(self, chore: Chore, error: Exception) -> None:
        self.counters[f"failed_{chore}"] += 1
        reason = f"{chore}: {error!r}"
        if reason not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(reason)
            log.error("Work on a stored span failed (%s). Only this span is concerned.", reason, exc_info=error)

    @contextmanager
    def counting(self, chore: Chore) -> Iterator[None]:
        """Note an exception of the body in place of raising it: the body's work stays undone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.note(chore, error)
