"""Pauses after faults and measured latency."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvstrata.errors import KvstrataError


class Fault(StrEnum):
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    DENIED = "denied"  # a wrong password, or no permission
    TLS = "tls"  # a certificate that is not trusted, or no TLS at the other end
    READ_ONLY = "read_only"
    FULL = "full"
    NO_PLACE = "no_place"  # the bucket or the folder does not exist
    OTHER = "other"


# Faults that prevent writing and not reading.
WRITE_FAULTS = frozenset({Fault.READ_ONLY, Fault.FULL})


class StoreFault(KvstrataError):
    """A fault of a store, inside remote/. The tier answers with a miss or a refusal, at the start with ConfigError."""

    def __init__(self, reason: Fault, what: str) -> None:
        super().__init__(what)
        self.reason = reason


class Damage(StrEnum):
    """The ways in which a value is not what its name says."""

    SEAL = "seal"  # damaged, forged, moved here from another name, or sealed with another secret
    HEADER = "header"
    SIZE = "size"  # larger than any block of this model
    KEY = "key"
    ROOT = "root"


class DamagedBlock(KvstrataError):
    """A block failed verification, inside remote/. The tier answers with a miss with `reason`."""

    def __init__(self, reason: Damage, what: str) -> None:
        super().__init__(what)
        self.reason = reason


log = logging.getLogger(__name__)

# Weight of the former latency when a new one is measured.
OLD_SHARE = 0.7

# Without queries, the expected latency halves in this time. An answer that took a second is forgotten after about a
# minute, and a query in vain costs a request 20 ms to a second.
LATENCY_HALF_LIFE_S = 10.0


class Event(StrEnum):
    WRITTEN = "written"
    REFUSED = "refused"  # not accepted by put
    DROPPED = "dropped"  # accepted, then given up
    FAILED = "failed"  # a fault of the store
    READ = "read"
    MISSED = "missed"  # requested, not delivered
    DELETED = "deleted"  # damaged blocks
    SKIPPED = "skipped"  # not offered: it has fewer bits than blocks here


class Counters:
    """Event counters, updated on every thread of the tier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Event, str]] = Counter()
        self._bytes: Counter[Event] = Counter()
        self._tokens: Counter[Event] = Counter()

    def add(self, event: Event, reason: str = "ok", *, nbytes: int = 0, tokens: int = 0) -> None:
        with self._lock:
            self._counts[event, str(reason)] += 1
            self._bytes[event] += nbytes
            self._tokens[event] += tokens

    def nbytes(self, event: Event) -> int:
        with self._lock:
            return self._bytes[event]

    def tokens(self, event: Event) -> int:
        with self._lock:
            return self._tokens[event]

    def snapshot(self) -> dict[str, dict[str, int]]:
        with self._lock:
            by_event: dict[str, dict[str, int]] = {event.value: {} for event in Event}
            for (event, reason), count in sorted(self._counts.items()):
                by_event[event.value][reason] = count
            return by_event


class _Pause:
    """A pause after a fault, guarded by its owner's lock."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s
        self.until_s = 0.0
        self.reason = ""

    def begin(self, reason: str, now_s: float) -> None:
        if now_s < self.until_s:
            return  # another thread met the same fault
        self.reason = reason
        self.until_s = now_s + self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)

    def end(self) -> None:
        self.reason, self.until_s, self._next_s = "", 0.0, self._first_s


class Health:
    def __init__(
        self,
        counters: Counters,
        *,
        first_pause_s: float,
        longest_pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._all = _Pause(first_pause_s, longest_pause_s)
        self._writes = _Pause(first_pause_s, longest_pause_s)
        self._latency_s = 0.0
        self._measured_s = 0.0  # when the latency was measured

    @property
    def is_paused(self) -> bool:
        """Whether reads and lookups are paused."""
        with self._lock:
            return self._clock() < self._all.until_s

    @property
    def paused_because(self) -> str:
        """The reason why blocks are not accepted; empty: they are."""
        with self._lock:
            now_s = self._clock()
            return next((pause.reason for pause in (self._all, self._writes) if now_s < pause.until_s), "")

    @property
    def latency_s(self) -> float:
        """Recent latency of queries without payload, for people; 0: none was made."""
        with self._lock:
            return self._latency_s

    @property
    def expected_latency_s(self) -> float:
        """Seconds that the next query is expected to take: the measured latency, faded by the time since."""
        with self._lock:
            return self._fading(self._clock()) * self._latency_s

    def _fading(self, now_s: float) -> float:
        return 0.5 ** ((now_s - self._measured_s) / LATENCY_HALF_LIFE_S)

    def lift(self) -> None:
        """Allow queries now. After another fault the next pause is longer all the same."""
        with self._lock:
            self._all.until_s = self._writes.until_s = 0.0

    @contextmanager
    def asking(self, *, writes: bool = False, measures: bool = False) -> Iterator[None]:
        """Wrap a call of the store. Record a StoreFault and let it through, or record that the store works."""
        began_s = self._clock()
        try:
            yield
        except StoreFault as fault:
            self._note(fault)
            raise
        self._works(writes, self._clock() - began_s if measures else None)

    def _note(self, fault: StoreFault) -> None:
        self._counters.add(Event.FAILED, fault.reason)
        with self._lock:
            pause = self._writes if fault.reason in WRITE_FAULTS else self._all
            is_news = pause.reason != fault.reason
            pause.begin(fault.reason, self._clock())
            seconds = pause.until_s - self._clock()
        if is_news:
            log.warning("The remote cache is left alone for %.0f s (%s): %s", seconds, fault.reason, fault)

    def _works(self, writes: bool, seconds: float | None) -> None:
        with self._lock:
            was = self._all.reason or (self._writes.reason if writes else "")
            self._all.end()
            if writes:
                self._writes.end()
            if seconds is not None:
                now_s, old_s = self._clock(), self._latency_s
                old_weight = OLD_SHARE * self._fading(now_s) if old_s else 0.0
                new_weight = 1 - OLD_SHARE
                self._latency_s = (old_weight * old_s + new_weight * seconds) / (old_weight + new_weight)
                self._measured_s = now_s
        if was:
            log.warning("The remote cache works again")
