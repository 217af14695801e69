"""Queues of sliced work, and the log of their failures."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

from kvstrata.errors import KvstrataError
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable

Job = Iterator[None]

# Of one entry, until the caller of `finish` goes on.
MAX_JOBS = 4


class JobQueue:
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

    def prioritize(self, entry: Entry) -> None:
        """Take one that waits before the others: a request waits for it."""
        if entry in self._waiting:
            self._urgent[entry] = None

    def discard(self, entry: Entry) -> None:
        self._waiting.pop(entry, None)
        self._urgent.pop(entry, None)
        self._jobs.pop(entry, None)
        self._changed(entry)

    def run(self, slice_s: float) -> None:
        """At least one step, then as many as the time allows."""
        until_s = time.monotonic() + slice_s
        while self._waiting:
            entry = next(iter(self._urgent or self._waiting))
            self._advance(entry)
            if time.monotonic() >= until_s:
                return

    def run_entry(self, entry: Entry, until_s: float = math.inf) -> None:
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


T = TypeVar("T")

Steps = Generator[None, None, T]


class ClientTasks:
    """A step runs `watching`."""

    def __init__(self, watching: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._watching = watching
        self._waiting: deque[tuple[Steps[Any], Future[Any]]] = deque()

    @property
    def idle(self) -> bool:
        return not self._waiting

    def add(self, steps: Steps[T]) -> Future[T]:
        """What it comes to."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()
        self._waiting.append((steps, answer))
        return answer

    def run(self, slice_s: float) -> None:
        """At least one step, then as many as the time allows."""
        until_s = time.monotonic() + slice_s
        while self._waiting:
            steps, answer = self._waiting.popleft()
            if self._advance(steps, answer):
                self._waiting.append((steps, answer))
            if time.monotonic() >= until_s:
                return

    def _advance(self, steps: Steps[Any], answer: Future[Any]) -> bool:
        """Whether there is more to do."""
        try:
            with self._watching():
                next(steps)
        except StopIteration as end:
            answer.set_result(end.value)
            return False
        except Exception as error:  # noqa: BLE001
            # The caller gets it; requests that run have nothing to do with it.
            answer.set_exception(error)
            return False
        return True

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """None of them will come to its end."""
        while self._waiting:
            steps, answer = self._waiting.popleft()
            steps.close()
            answer.set_exception(make_error())


def run_to_end(steps: Steps[T]) -> T:
    """All steps at once, for a caller that has nothing else to do."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


log = logging.getLogger(__name__)

FailedWork = Literal[
    "rewrites",
    "spills",
    "promotions",
    "restores",
    "shares",
    "lookups",
    "loads",
    "commits",
    "releases",
    "reclaims",
    "slices",
]

# Of reasons that were logged, so that one whose text differs each time does not fill memory.
MAX_REASONS = 64


class FailureLog:
    def __init__(self, counters: Counter[str], shelf: EntryTable) -> None:
        self.counters = counters
        self._shelf = shelf
        self._logged: set[str] = set()

    @property
    def is_broken(self) -> bool:
        """Whether the table is half changed, and must be replaced."""
        return self._shelf.is_broken

    def record_failure(self, chore: FailedWork, error: Exception) -> None:
        self.counters[f"failed_{chore}"] += 1
        reason = f"{chore}: {error!r}"
        if reason not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(reason)
            log.error("Work on the cache failed (%s). Requests go on without it.", reason, exc_info=error)

    def attempt(self, chore: FailedWork, operation: Callable[[], T], otherwise: T) -> T:
        """Return what an operation returns, or `otherwise` where it fails."""
        if self._shelf.is_broken:
            return otherwise
        try:
            with self.watching():
                return operation()
        except Exception as error:  # noqa: BLE001
            self.record_failure(chore, error)
            return otherwise

    @contextmanager
    def counting(self, chore: FailedWork) -> Iterator[None]:
        """Note an exception of the body in place of raising it: the body's work stays undone."""
        try:
            with self.watching():
                yield
        except Exception as error:  # noqa: BLE001
            self.record_failure(chore, error)

    def require(self, chore: FailedWork, operation: Callable[[], T], otherwise: T) -> T:
        """Likewise for an operation that must not be left out: without it entries would stay leased, or memory full."""

        def run() -> T:
            try:
                return operation()
            except Exception:
                self._shelf.is_broken = True
                raise

        return self.attempt(chore, run, otherwise)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Mark the table as broken where an exception leaves the body half done."""
        num_changes = self._shelf.num_changes
        try:
            yield
        except (KvstrataError, StopIteration):
            raise  # a refusal, before anything was begun; the end of a generator
        except Exception:
            self._shelf.is_broken |= self._shelf.num_changes != num_changes
            raise
