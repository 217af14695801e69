"""What the disk tier has done, counted by event and reason. Knows no files."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum


class Event(StrEnum):
    WRITTEN = "written"  # published and on the disk
    REFUSED = "refused"  # not taken by put
    DROPPED = "dropped"  # taken, then given up
    FAILED = "failed"  # the disk did not do it: writes, reads and the catalogue, by fault
    READ = "read"
    MISSED = "missed"  # asked for, not delivered
    QUARANTINED = "quarantined"
    EVICTED = "evicted"


class Counters:
    """Counted on every thread of the tier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Event, str]] = Counter()
        self._bytes: Counter[Event] = Counter()

    def add(self, event: Event, reason: str = "ok", *, nbytes: int = 0) -> None:
        with self._lock:
            self._counts[event, reason] += 1
            self._bytes[event] += nbytes

    def nbytes(self, event: Event) -> int:
        with self._lock:
            return self._bytes[event]

    def snapshot(self) -> dict[str, dict[str, int]]:
        with self._lock:
            by_event: dict[str, dict[str, int]] = {event.value: {} for event in Event}
            for (event, reason), count in sorted(self._counts.items()):
                by_event[event.value][str(reason)] = count
            return by_event
