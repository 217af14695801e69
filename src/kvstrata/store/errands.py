"""Work on what is stored that a caller waits for, and that takes many small steps: an export, an import.

Each errand is a generator: whenever it yields, all that is stored is whole. They take turns. Touched by the thread that
owns MLX alone; the caller waits for the future on another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


class Errands:
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

    def work(self, slice_s: float) -> None:
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
