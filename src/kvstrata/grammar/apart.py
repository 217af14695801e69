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

T = TypeVar("T")

# The size of new stacks is a setting of the process.
_starting = threading.Lock()
_places = threading.BoundedSemaphore(MAX_RUNNING)


def run_apart(work: Callable[[], T], limit_s: float) -> T:
    """Raises what `work` raises, and TimeoutError when it takes longer: then it goes on to its end, for nothing."""
    if not _places.acquire(timeout=limit_s):
        raise TimeoutError
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001
            # The caller gets it.
            result.set_exception(error)
        finally:
            _places.release()

    _start(threading.Thread(target=run, name="kvstrata-grammar", daemon=True))
    return result.result(limit_s)


def _start(thread: threading.Thread) -> None:
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
