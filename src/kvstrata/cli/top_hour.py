"""The last hour of a server, assembled from successive /cache/history responses. Sends no requests.

`series` resamples it to the cells of a line: each cell is the mean of the slots that overlap its time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Answer = Mapping[str, Any]
KEPT_S = 3600.0
KEPT_REQUESTS = KEPT_EVENTS = 500  # as many as the server keeps
SPANS_S = (600.0, 1800.0, KEPT_S)


class Hour:
    def __init__(self) -> None:
        self.now_s = 0.0  # the server's clock; 0: no response yet
        self.slot_s = 10.0
        self.slots: dict[float, Answer] = {}  # start time -> slot, oldest first
        self.requests: deque[Answer] = deque(maxlen=KEPT_REQUESTS)
        self.events: deque[Answer] = deque(maxlen=KEPT_EVENTS)

    @property
    def path(self) -> str:
        """Return the path of the request for entries that are new."""
        return f"/cache/history?since={self.now_s!r}" if self.now_s else "/cache/history"

    def add(self, answer: Answer) -> None:
        if answer["now"] < self.now_s:  # another server, or its clock was set back
            self.clear()
        self.now_s, self.slot_s = answer["now"], answer["slot_s"]
        # The unfinished slot is sent again.
        told = {slot["time"]: slot for slot in answer["slots"]}
        kept = {time: slot for time, slot in self.slots.items() if time >= self.now_s - KEPT_S}
        self.slots = dict(sorted({**kept, **told}.items()))
        _take_new(self.requests, answer["requests"], "id")
        _take_new(self.events, answer["events"], "name")

    def clear(self) -> None:
        self.slots = {}
        self.requests.clear()
        self.events.clear()

    @property
    def span_s(self) -> float:
        """Return the shortest of the spans that covers all slots: a server that was just started has no full hour."""
        age_s = self.now_s - min(self.slots, default=self.now_s)
        return next((span_s for span_s in SPANS_S if age_s <= span_s), KEPT_S)

    def series(self, figure: Callable[[Answer], float | None], cells: int) -> list[float | None]:
        """Return the means for each cell, oldest first. None means that nothing is known of that time."""
        begin_s, cell_s = self.now_s - self.span_s, self.span_s / cells
        found: list[list[float]] = [[] for _ in range(cells)]
        for time_s, slot in self.slots.items():
            value = figure(slot)
            if value is None:
                continue
            # A slot may be longer than a cell.
            first = math.floor((time_s - begin_s) / cell_s)
            last = math.ceil((time_s + self.slot_s - begin_s) / cell_s)
            for place in range(max(0, first), min(cells, max(last, first + 1))):
                found[place].append(value)
        return [sum(values) / len(values) if values else None for values in found]


def _take_new(kept: deque[Answer], told: Sequence[Answer], name: str) -> None:
    """Append entries that are not kept yet: replicas' clocks differ, so an entry may be sent twice."""

    def key(each: Answer) -> tuple[Any, ...]:
        return each["time"], each[name], each.get("replica")

    known = set(map(key, kept))
    kept.extend(each for each in told if key(each) not in known)


def memory_bytes(slot: Answer) -> float | None:
    """Return the bytes of running requests and of cached KV in memory."""
    tiers, running = slot["tiers"], slot["running_bytes"]
    return None if tiers is None or running is None else float(tiers["hot"]["bytes"] + running)


def first_token_s(slot: Answer) -> float | None:
    return slot["first_token_p50_s"]


def tokens_per_s(slot: Answer) -> float | None:
    return slot["tokens_per_s"]
