"""Runs a compiler that cannot be interrupted and recurses: on a thread with a stack of its own, waited for so long.

Knows nothing of grammars. llguidance follows a chain of references by recursion, so 3,000 of them end a process whose
threads have the usual 8 MiB. A chain that fills 256 KiB of text took up to 320 MiB. Only what is used becomes memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 1 << 30
MAX_RUNNING = 4  # those that were given up included
# Callers that wait at the same time, for a place or for their result. Each holds one of the 40 threads on which the
# server reads bodies.
MAX_CALLERS = 24
PLACE_LIMIT_S = 2.0

T = TypeVar("T")

# The size of new stacks is a setting of the process.
_starting = threading.Lock()


class NoPlace(Exception):
    """Raised where too much is running or waiting already."""


class CompilePool:
    """A bounded number of such threads, and of callers that wait for them."""

    def __init__(
        self, max_running: int = MAX_RUNNING, max_callers: int = MAX_CALLERS, place_limit_s: float = PLACE_LIMIT_S
    ) -> None:
        self.max_running = max_running
        self._place_limit_s = place_limit_s
        self._places = threading.BoundedSemaphore(max_running)
        self._callers = threading.BoundedSemaphore(max_callers)

    def run(self, work: Callable[[], T], limit_s: float) -> T:
        """Raises what `work` raises, NoPlace, and TimeoutError when it takes longer: then it goes on to its end, for
        nothing."""
        if not self._callers.acquire(blocking=False):
            raise NoPlace
        try:
            if not self._places.acquire(timeout=self._place_limit_s):
                raise NoPlace
            return self._started(work).result(limit_s)
        finally:
            self._callers.release()

    def _started(self, work: Callable[[], T]) -> Future[T]:
        """Holds a place until `work` has ended."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001
                # The caller gets it.
                result.set_exception(error)
            finally:
                self._places.release()

        _start(threading.Thread(target=run, name="kvstrata-grammar", daemon=True))
        return result


def _start(thread: threading.Thread) -> None:
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
