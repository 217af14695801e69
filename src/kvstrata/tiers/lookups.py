"""Questions that go through many blocks, answered one after the other on a thread of the tier. Knows no files.

The engine's thread asks and goes on. What is asked is a generator that yields now and then: a question that was
withdrawn ends soon, and others get their turn at the interpreter.
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

# The engine's thread waits for the interpreter's lock for no longer than this, beside us,
STRIDE_S = 0.0005

# and gets it while we rest. Without a rest we would mostly have it back before the other thread wakes up.
REST_S = 0.00005


class Lookup(Generic[T]):
    """One question. `answer` is `otherwise` until it is answered, and for good where it was withdrawn or failed."""

    def __init__(self, walk: Walk[T], otherwise: T, asked_s: float, on_answer: Callable[[], None]) -> None:
        self.answer = otherwise
        self.asked_s = asked_s
        self._walk = walk
        self._on_answer = on_answer
        self._is_done = threading.Event()
        self._is_withdrawn = False

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was answered in time."""
        return self._is_done.wait(timeout_s)

    def withdraw(self) -> None:
        """The answer is of no use any more."""
        self._is_withdrawn = True

    def run(self) -> None:
        """On the thread."""
        try:
            self._run()
        except Exception:  # The thread must outlive a mistake of ours, and say it.
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
    """A question that needs no thread."""
    lookup = Lookup(_no_steps(answer), answer, time.monotonic(), lambda: None)
    lookup.end()
    return lookup


def _no_steps(answer: T) -> Walk[T]:
    yield from ()
    return answer


def finish(walk: Walk[T]) -> T:
    """All of it at once, on the caller's thread."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value


class Lookups:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closing = False
        self._asked: queue.SimpleQueue[Lookup[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer_all, name="kvstrata-tier-lookups", daemon=True)
        self._thread.start()

    def ask(self, walk: Walk[T], otherwise: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Never waits. `on_answer` is called on our thread."""
        lookup = Lookup(walk, otherwise, time.monotonic(), on_answer)
        with self._lock:
            if not self._is_closing:
                self._asked.put(lookup)
                return lookup
        lookup.end()
        return lookup

    def close(self, timeout_s: float) -> bool:
        """What was not begun is answered with what it is otherwise. False: the thread has not ended in time."""
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
