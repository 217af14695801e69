"""What a tier has done and holds, for people and for the store. Knows no files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured as reads really ran, several at a time where they did. All 0 before the first."""

    read_bytes_per_s: float  # as it was lately, for people
    block_s: float  # expected for each block, whatever its size
    byte_s: float  # expected for each byte
    num_blocks: int  # how many this rests on
    under_way_s: float = 0.0  # how long the disk has been reading and no block came

    def seconds_for(self, nbytes: int, num_blocks: int) -> float:
        """What blocks are expected to take. Before anything was measured only what is under way counts: then the first
        block is the measurement."""
        return self.under_way_s + num_blocks * self.block_s + nbytes * self.byte_s


@dataclass(frozen=True, slots=True)
class Usage:
    limit_bytes: int
    disk_bytes: int  # blocks, catalogue, quarantine and folders: what the volume gives up for the cache
    block_bytes: int
    leaving_bytes: int  # of blocks that were cleared and whose files are not deleted yet; part of disk_bytes
    quarantine_bytes: int
    num_blocks: int
    num_tokens: int
    labels: Mapping[str, int]  # bytes of tensors by what `tally` calls them
    queue_bytes: int
    num_queued: int
    num_pending_reads: int
    unused_bytes: int  # read, or being read, and not used yet
    written_bytes: int
    written_today_bytes: int
    read_bytes: int
    is_writing_paused: bool
    paused_because: str  # empty where it is not
    rates: Rates
    counters: Mapping[str, Mapping[str, int]]  # event -> reason -> how often


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
