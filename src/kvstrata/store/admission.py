"""What was just stored and did not stay: counted by reason, so that no store is refused without a word.

A span is new from when its request ends until room was made for it once. What goes later was evicted, not refused.

too_large    it alone is larger than all that may be stored
no_room      all else is leased, pinned or running, or had to go too
least_worth  others could have gone, and are worth more
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from kvstrata.store.entry import Entry

Reason = Literal["too_large", "no_room", "least_worth"]


class Admission:
    def __init__(self, counters: Counter[str], hot_bytes: int) -> None:
        self._counters = counters
        self._hot_bytes = hot_bytes
        self._new: dict[Entry, None] = {}

    def stored(self, entry: Entry) -> None:
        self._new[entry] = None

    def evicted(self, entry: Entry, free_bytes: int) -> None:
        """All of it or its end goes. `free_bytes`: of all that could go, itself included."""
        if entry not in self._new:
            return
        del self._new[entry]
        if not entry.is_clean:
            self._counters[f"refused_{self._reason(entry, free_bytes)}"] += 1

    def settled(self) -> None:
        """There is room for all that is left."""
        self._new.clear()

    def _reason(self, entry: Entry, free_bytes: int) -> Reason:
        if entry.nbytes > self._hot_bytes:
            return "too_large"
        return "least_worth" if free_bytes > entry.nbytes else "no_room"
