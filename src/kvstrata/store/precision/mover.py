"""Changes what spans are stored as, a layer at a time, between two steps of the engine.

A job is a generator: every time it yields, all spans are whole and readable. The caller decides for how long jobs run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from kvstrata.store.entry import Entry

Job = Iterator[None]
# Of one entry, until the caller of `finish` goes on.
MAX_JOBS = 4


class Mover:
    """`make` builds the job of an entry when its turn comes; None: there is nothing to do for it now. `done` is told
    when a job has come to its end, `failed` when it raised: that costs its entry the job, and the others nothing.
    `changed` is told when an entry begins to wait or waits no more. A step runs `watching`."""

    def __init__(
        self,
        make: Callable[[Entry], Job | None],
        done: Callable[[Entry], None],
        failed: Callable[[Entry, Exception], None],
        changed: Callable[[Entry], None] = lambda _: None,
        watching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._make = make
        self._done = done
        self._failed = failed
        self._changed = changed
        self._watching = watching
        self._waiting: dict[Entry, None] = {}  # in order
        self._urgent: dict[Entry, None] = {}  # of those, the ones that go first
        self._jobs: dict[Entry, Job] = {}  # begun

    @property
    def idle(self) -> bool:
        return not self._waiting

    @property
    def waiting(self) -> tuple[Entry, ...]:
        return tuple(self._waiting)

    def has(self, entry: Entry) -> bool:
        return entry in self._waiting

    def has_begun(self, entry: Entry) -> bool:
        return entry in self._jobs

    def add(self, entry: Entry) -> None:
        self._waiting[entry] = None
        self._changed(entry)

    def hurry(self, entry: Entry) -> None:
        """Take one that waits before the others: a request waits for it."""
        if entry in self._waiting:
            self._urgent[entry] = None

    def discard(self, entry: Entry) -> None:
        self._waiting.pop(entry, None)
        self._urgent.pop(entry, None)
        self._jobs.pop(entry, None)
        self._changed(entry)

    def work(self, slice_s: float) -> None:
        """At least one step, then as many as the time allows."""
        until_s = time.monotonic() + slice_s
        while self._waiting:
            entry = next(iter(self._urgent or self._waiting))
            self._advance(entry)
            if time.monotonic() >= until_s:
                return

    def finish(self, entry: Entry, until_s: float = math.inf) -> None:
        """All that there is to do for an entry, until then. What a job leaves to be done is left for later after a few
        of them."""
        num_ended = 0
        while entry in self._waiting and num_ended < MAX_JOBS and time.monotonic() < until_s:
            num_ended += self._advance(entry)

    def _advance(self, entry: Entry) -> bool:
        """One step. Tells whether the job has come to its end."""
        try:
            with self._watching():
                return self._step(entry)
        except Exception as error:  # noqa: BLE001
            # Whatever it is: requests that run have nothing to do with it.
            self.discard(entry)
            self._failed(entry, error)
            return True

    def _step(self, entry: Entry) -> bool:
        job = self._jobs.get(entry) or self._make(entry)
        if job is None:
            self.discard(entry)
            return True
        self._jobs[entry] = job
        if next(job, StopIteration) is not StopIteration:
            return False
        self.discard(entry)
        self._done(entry)
        return True

    def clear(self) -> None:
        """Leave what is begun as it is: every layer is whole, under one precision or the other."""
        for entry in self.waiting:
            self.discard(entry)
