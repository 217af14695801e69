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

log = logging.getLogger(__name__)

T = TypeVar("T")

Job = Iterator[None]  # work on one entry; every span is whole at each yield
Steps = Generator[None, None, T]  # work of a client task, with its result

# Most jobs of one entry that `JobQueue.run_entry` brings to their end in one call.
MAX_JOBS = 4


class JobQueue:
    """Queue of entries with at most one job each, which runs in slices.

    `make_job` builds an entry's job when the entry's turn comes; None means that there is nothing to do now. `on_done`
    is called after a job's last step, `on_failed` after an exception, which costs only this entry its job.
    `on_changed` is called when an entry enters or leaves the queue. Each step runs inside `watching()`."""

    def __init__(
        self,
        make_job: Callable[[Entry], Job | None],
        on_done: Callable[[Entry], None],
        on_failed: Callable[[Entry, Exception], None],
        on_changed: Callable[[Entry], None] = lambda _: None,
        watching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._make_job = make_job
        self._on_done = on_done
        self._on_failed = on_failed
        self._on_changed = on_changed
        self._watching = watching
        self._waiting: dict[Entry, None] = {}  # in order, with the entries whose jobs have begun
        self._urgent: dict[Entry, None] = {}  # subset of the waiting entries that goes first
        self._jobs: dict[Entry, Job] = {}  # jobs that have begun

    @property
    def is_idle(self) -> bool:
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
        self._on_changed(entry)

    def prioritize(self, entry: Entry) -> None:
        """Run a waiting entry's job before the others, because a request waits for it."""
        if entry in self._waiting:
            self._urgent[entry] = None

    def discard(self, entry: Entry) -> None:
        self._waiting.pop(entry, None)
        self._urgent.pop(entry, None)
        self._jobs.pop(entry, None)
        self._on_changed(entry)

    def run(self, slice_s: float) -> None:
        """Run at least one step, then more until the slice is over."""
        until_s = time.monotonic() + slice_s
        while self._waiting:
            entry = next(iter(self._urgent or self._waiting))
            self._advance(entry)
            if time.monotonic() >= until_s:
                return

    def run_entry(self, entry: Entry, until_s: float = math.inf) -> None:
        """Run an entry's jobs until `until_s`. A finished job may queue its entry again; after `MAX_JOBS` of them the
        rest waits in the queue."""
        num_ended = 0
        while entry in self._waiting and num_ended < MAX_JOBS and time.monotonic() < until_s:
            num_ended += self._advance(entry)

    def _advance(self, entry: Entry) -> bool:
        """Run one step of an entry's job. Return whether the job has ended."""
        try:
            with self._watching():
                return self._step(entry)
        except Exception as error:  # noqa: BLE001
            # Any failure ends this job alone: running requests do not depend on it.
            self.discard(entry)
            self._on_failed(entry, error)
            return True

    def _step(self, entry: Entry) -> bool:
        job = self._jobs.get(entry) or self._make_job(entry)
        if job is None:
            self.discard(entry)
            return True
        self._jobs[entry] = job
        if next(job, StopIteration) is not StopIteration:
            return False
        self.discard(entry)
        self._on_done(entry)
        return True

    def clear(self) -> None:
        """Empty the queue. Jobs that have begun leave every layer whole, in its old format or the new one."""
        for entry in self.waiting:
            self.discard(entry)


class ClientTasks:
    """Queue of clients' tasks: generators that take turns, each with a future for its result. Each step runs inside
    `watching()`."""

    def __init__(self, watching: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._watching = watching
        self._waiting: deque[tuple[Steps[Any], Future[Any]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def add(self, steps: Steps[T]) -> Future[T]:
        """Queue a task and return the future of its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._waiting.append((steps, future))
        return future

    def run(self, slice_s: float) -> None:
        """Run at least one step, then more until the slice is over."""
        until_s = time.monotonic() + slice_s
        while self._waiting:
            steps, future = self._waiting.popleft()
            if self._advance(steps, future):
                self._waiting.append((steps, future))
            if time.monotonic() >= until_s:
                return

    def _advance(self, steps: Steps[Any], future: Future[Any]) -> bool:
        """Run one step of a task. Return whether the task has more steps."""
        try:
            with self._watching():
                next(steps)
        except StopIteration as end:
            future.set_result(end.value)
            return False
        except Exception as error:  # noqa: BLE001
            # The task's client gets the error: running requests do not depend on the task.
            future.set_exception(error)
            return False
        return True

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """End every task with an error."""
        while self._waiting:
            steps, future = self._waiting.popleft()
            steps.close()
            future.set_exception(make_error())


def run_to_end(steps: Steps[T]) -> T:
    """Run all steps at once, for a caller that has nothing else to do, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


# The names appear in counters: `failed_rewrites` counts failed transcoding.
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

# Most reasons that are logged, so that reasons whose text differs each time do not fill memory.
MAX_REASONS = 64


class FailureLog:
    """Log of the cache's failures. It keeps a failing operation away from requests, and marks the entry table as broken
    where the operation left it half changed."""

    def __init__(self, counters: Counter[str], table: EntryTable) -> None:
        self.counters = counters
        self._table = table
        self._logged: set[str] = set()

    @property
    def is_broken(self) -> bool:
        """Whether the entry table is half changed and must be replaced."""
        return self._table.is_broken

    def record_failure(self, work: FailedWork, error: Exception) -> None:
        self.counters[f"failed_{work}"] += 1
        reason = f"{work}: {error!r}"
        if reason not in self._logged and len(self._logged) < MAX_REASONS:
            self._logged.add(reason)
            log.error("Work on the cache failed (%s). Requests go on without it.", reason, exc_info=error)

    def attempt(self, work: FailedWork, operation: Callable[[], T], otherwise: T) -> T:
        """Return the operation's result, or `otherwise` where the operation fails or the table is broken."""
        if self._table.is_broken:
            return otherwise
        try:
            with self.breaking_on_error():
                return operation()
        except Exception as error:  # noqa: BLE001
            self.record_failure(work, error)
            return otherwise

    @contextmanager
    def counting(self, work: FailedWork) -> Iterator[None]:
        """Record an exception of the body instead of raising it; the body's work stays undone."""
        try:
            with self.breaking_on_error():
                yield
        except Exception as error:  # noqa: BLE001
            self.record_failure(work, error)

    def attempt_or_break(self, work: FailedWork, operation: Callable[[], T], otherwise: T) -> T:
        """Attempt an operation that must not be left out, and mark the table as broken where it fails: entries would
        stay leased, or memory full."""

        def run() -> T:
            try:
                return operation()
            except Exception:
                self._table.is_broken = True
                raise

        return self.attempt(work, run, otherwise)

    @contextmanager
    def breaking_on_error(self) -> Iterator[None]:
        """Mark the table as broken where an exception leaves the body's changes half done."""
        num_changes = self._table.num_changes
        try:
            yield
        except (KvstrataError, StopIteration):
            raise  # a refusal before the first change, or the end of a generator
        except Exception:
            self._table.is_broken |= self._table.num_changes != num_changes
            raise
