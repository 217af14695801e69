"""Changes what spans are stored as, a layer at a time, between two steps of the engine.

A job is a generator: every time it yields, all spans are whole and readable. Whoever runs jobs decides for how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvstrata.spans.plan import Plan
from kvstrata.store.entry import Entry

Job = Iterator[None]


class Mover:
    """`make` builds the job of an entry when its turn comes; None: there is nothing to do for it now."""

    def __init__(self, make: Callable[[Entry], Job | None]) -> None:
        self._make = make
        self._waiting: dict[Entry, None] = {}  # in order
        self._jobs: dict[Entry, Job] = {}  # begun

    @property
    def idle(self) -> bool:
        return not self._waiting

    def add(self, entry: Entry) -> None:
        self._waiting[entry] = None

    def discard(self, entry: Entry) -> None:
        self._waiting.pop(entry, None)
        self._jobs.pop(entry, None)

    def work(self, slice_s: float) -> None:
        """At least one layer, then as many as the time allows."""
        until_s = time.monotonic() + slice_s
        while self._waiting:
            entry = next(iter(self._waiting))
            self._advance(entry)
            if time.monotonic() >= until_s:
                return

    def finish(self, entry: Entry) -> None:
        while entry in self._waiting:
            self._advance(entry)

    def _advance(self, entry: Entry) -> None:
        job = self._jobs.get(entry) or self._make(entry)
        if job is None:
            self.discard(entry)
            return
        self._jobs[entry] = job
        if next(job, StopIteration) is StopIteration:
            self.discard(entry)


def rewrite(entry: Entry, plan: Plan) -> Job:
    """Put every layer under the plan, in memory of its own, trimmed to what is used."""
    span = entry.span
    for layer in span.layers:
        span.rewrite(layer, plan.pairs[layer])
        yield
    span.rewrite_marks(plan)


def shrink(entry: Entry) -> Job:
    """Give back the memory of tokens that were cut off."""
    for layer in entry.span.layers:
        entry.span.shrink(layer)
        yield
