"""Faults of a store: pauses after them, and the measured latency of queries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from kvstrata.errors import KvstrataError
from kvstrata.tiers.interface import BlockEvent, TierCounters
from kvstrata.tiers.write_limits import Backoff


class StoreFaultReason(StrEnum):
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    DENIED = "denied"  # a wrong password, or no permission
    TLS = "tls"  # a certificate that is not trusted, or no TLS at the other end
    READ_ONLY = "read_only"
    FULL = "full"
    NO_PLACE = "no_place"  # the bucket or the folder does not exist
    OTHER = "other"


# Faults that prevent writing and not reading.
WRITE_FAULTS = frozenset({StoreFaultReason.READ_ONLY, StoreFaultReason.FULL})


class StoreFault(KvstrataError):
    """A fault of a store, caught inside remote/: it becomes a miss or a refusal, at the start ConfigError."""

    def __init__(self, reason: StoreFaultReason, what: str) -> None:
        super().__init__(what)
        self.reason = reason


log = logging.getLogger(__name__)

# Weight of the former latency when a new one is measured.
OLD_SHARE = 0.7

# Without queries, the expected latency halves in this time. An answer that took a second is forgotten after about a
# minute, and a query in vain costs a request 20 ms to a second.
LATENCY_HALF_LIFE_S = 10.0


REMOTE_EVENTS = frozenset(BlockEvent) - {BlockEvent.QUARANTINED, BlockEvent.EVICTED}


class StoreHealth:
    """Pauses of queries and of writes after faults, and the latency of queries. Used from any thread."""

    def __init__(
        self,
        counters: TierCounters,
        *,
        first_pause_s: float,
        longest_pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._all = Backoff(first_pause_s, longest_pause_s, clock)
        self._writes = Backoff(first_pause_s, longest_pause_s, clock)
        self._latency_s = 0.0
        self._measured_s = 0.0  # when the latency was measured

    @property
    def is_paused(self) -> bool:
        """Whether reads and lookups are paused."""
        with self._lock:
            return self._all.is_paused

    @property
    def paused_because(self) -> str:
        """The reason why blocks are not accepted; empty: they are."""
        with self._lock:
            return next((each.reason for each in (self._all, self._writes) if each.is_paused), "")

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
            self._all.lift()
            self._writes.lift()

    @contextmanager
    def query(self, *, writes: bool = False, measures: bool = False) -> Iterator[None]:
        """Wrap a call of the store. Record a StoreFault and let it through, or record that the store works."""
        began_s = self._clock()
        try:
            yield
        except StoreFault as fault:
            self._record_fault(fault)
            raise
        self._record_success(writes, self._clock() - began_s if measures else None)

    def _record_fault(self, fault: StoreFault) -> None:
        self._counters.add(BlockEvent.FAILED, fault.reason)
        with self._lock:
            backoff = self._writes if fault.reason in WRITE_FAULTS else self._all
            if backoff.is_paused:
                return  # another thread met the same fault
            is_news = backoff.begin(fault.reason)
            pause_s = backoff.remaining_s
        if is_news:
            log.warning("The remote cache is left alone for %.0f s (%s): %s", pause_s, fault.reason, fault)

    def _record_success(self, writes: bool, seconds: float | None) -> None:
        with self._lock:
            was_failing = self._all.end()
            if writes:
                was_failing |= self._writes.end()
            if seconds is not None:
                now_s, old_s = self._clock(), self._latency_s
                old_weight = OLD_SHARE * self._fading(now_s) if old_s else 0.0
                new_weight = 1 - OLD_SHARE
                self._latency_s = (old_weight * old_s + new_weight * seconds) / (old_weight + new_weight)
                self._measured_s = now_s
        if was_failing:
            log.warning("The remote cache works again")
