"""An hour of figures in slots of some seconds: what requests did in each, and how the cache was at its end.

Knows time and sums. Who samples and who asks is elsewhere. An hour takes half a megabyte, and a few where every slot is
full of first tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.server.journal.trace import CLIENT_GONE, Trace

KEPT_S = 3600.0
MAX_TIMES = 200  # of first tokens that one slot's percentiles are told from


@dataclass(frozen=True)
class Sample:
    """How things were at the end of a slot."""

    running: int
    waiting: int
    budget_bytes: int  # for all KV
    running_bytes: int  # of running requests
    tiers: Mapping[str, Mapping[str, Any]]  # bytes, tokens, and bytes by precision


@dataclass
class Slot:
    start_s: float  # since the epoch
    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens_per_s: float | None = None  # generated, of all requests together; None: the slot has not ended
    sample: Sample | None = None
    _first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    _percentiles: tuple[float | None, float | None] | None = None  # None: there is news

    def note_first_token(self, seconds: float) -> None:
        self._first_token_s.append(seconds)
        self._percentiles = None

    def first_token_percentiles(self) -> tuple[float | None, float | None]:
        """The 50th and the 95th. Told of all slots of an hour at once, so sorted once."""
        if self._percentiles is None:
            self._percentiles = percentile(self._first_token_s, 0.5), percentile(self._first_token_s, 0.95)
        return self._percentiles

    def count(self, trace: Trace) -> None:
        self.requests += 1
        self.cancelled += trace.status == CLIENT_GONE
        self.failed += trace.status != CLIENT_GONE and (trace.status >= 400 or bool(trace.error))
        if trace.asked is not None and trace.cached_tokens is not None:
            self.prompt_tokens += trace.asked.prompt_tokens
            self.cached_tokens += trace.cached_tokens


class Slots:
    def __init__(self, slot_s: float, clock: Callable[[], float]) -> None:
        self.slot_s = slot_s
        self._clock = clock
        self._slots: deque[Slot] = deque(maxlen=math.ceil(KEPT_S / slot_s) + 1)

    @property
    def current(self) -> Slot:
        """The slot of this moment. A clock that was set back stays in the last one."""
        start_s = self._clock() // self.slot_s * self.slot_s
        if not self._slots or start_s > self._slots[-1].start_s:
            self._slots.append(Slot(start_s))
        return self._slots[-1]

    def now_s(self) -> float:
        return self._clock()

    def left_s(self) -> float:
        """Until the slot of this moment ends."""
        return max(0.0, self.current.start_s + self.slot_s - self._clock())

    def since(self, time_s: float) -> list[Slot]:
        """Those that end later than that, the oldest first; none is older than an hour."""
        oldest_s = max(time_s, self.current.start_s - KEPT_S)
        return [slot for slot in self._slots if slot.start_s + self.slot_s > oldest_s]


def percentile(times: Collection[float], share: float) -> float | None:
    """The smallest of them that at least so many are not longer than; None of none."""
    if not times:
        return None
    return sorted(times)[max(0, math.ceil(share * len(times)) - 1)]
