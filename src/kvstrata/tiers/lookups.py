"""A thread of a tier that walks chains of blocks for the engine, one lookup after the other. Knows no files.

The engine thread does not wait. A walk is a generator that yields now and then: a withdrawn lookup ends soon, and other
threads get the GIL.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

Walk = Generator[None, None, T]  # yields now and then, and returns the answer

# The engine thread waits for the GIL at most this long while a walk runs.
STRIDE_S = 0.0005

# The engine thread gets the GIL in this rest. Without one, this thread would mostly have it back before others wake.
REST_S = 0.00005


class Lookup(Generic[T]):
    """A lookup. `answer` is `fallback` until the walk ends, and for good if it was withdrawn or failed."""

    def __init__(self, walk: Walk[T], fallback: T, asked_s: float, on_answer: Callable[[], None]) -> None:
        self.answer = fallback
        self.asked_s = asked_s
        self._walk = walk
        self._on_answer = on_answer
        self._is_done = threading.Event()
        self._is_withdrawn = False

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the answer. Return whether it came in time."""
        return self._is_done.wait(timeout_s)

    def withdraw(self) -> None:
        """End the walk soon: its answer is not needed any more."""
        self._is_withdrawn = True

    def run(self) -> None:
        """Run the walk, on the lookup thread."""
        try:
            self._run()
        except Exception:  # A bug is logged and must not end the thread.
            log.exception("A lookup of blocks failed in a way that it should not")
        finally:
            self.end()

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._is_withdrawn:
            try:
                next(self._walk)
            except StopIteration as end:
                self.answer = end.value
                return
            if time.monotonic() >= began_s + STRIDE_S:
                time.sleep(REST_S)
                began_s = time.monotonic()

    def end(self) -> None:
        self._walk.close()
        self._is_done.set()
        self._on_answer()


def answered(answer: T) -> Lookup[T]:
    """Return a lookup that has its answer already."""
    lookup = Lookup(_no_steps(answer), answer, time.monotonic(), lambda: None)
    lookup.end()
    return lookup


def _no_steps(answer: T) -> Walk[T]:
    yield from ()
    return answer


def run_walk(walk: Walk[T]) -> T:
    """Run a whole walk on the caller's thread, and return its answer."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value


class LookupThread:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closing = False
        self._asked: queue.SimpleQueue[Lookup[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer_all, name="kvstrata-tier-lookups", daemon=True)
        self._thread.start()

    def ask(self, walk: Walk[T], fallback: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Queue a walk without waiting. `on_answer` is called on the lookup thread."""
        lookup = Lookup(walk, fallback, time.monotonic(), on_answer)
        with self._lock:
            if not self._is_closing:
                self._asked.put(lookup)
                return lookup
        lookup.end()
        return lookup

    def close(self, timeout_s: float) -> bool:
        """End lookups that have not begun with their `fallback`. False: the thread has not ended in time."""
        with self._lock:
            self._is_closing = True
            self._asked.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _answer_all(self) -> None:
        while (lookup := self._asked.get()) is not None:
            if self._is_closing:
                lookup.end()
            else:
                lookup.run()
