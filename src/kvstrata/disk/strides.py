"""Long work on bytes done in strides with rests between them, so that it takes a share of one core and never all of it
at once. Knows neither the work nor who waits.

A block is megabytes that are hashed and copied: tens of milliseconds of a core that a sequence that decodes there would
miss in a single step. A thread's priority alone does not help: once it runs it keeps its core for some
milliseconds, and some systems have no priorities for threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")

STRIDE_BYTES = 1 << 20
# Shorter ones are put together: to sleep and wake has its price too.
SHORTEST_REST_S = 0.005


class Take(Protocol):
    """Runs a stride, and rests if it is time to."""

    def __call__(self, stride: Callable[[], T], /) -> T: ...


def at_once(stride: Callable[[], T], /) -> T:
    return stride()


def strides_of(content: memoryview) -> Iterator[memoryview]:
    """`content` is of bytes."""
    for begin in range(0, content.nbytes, STRIDE_BYTES):
        yield content[begin : begin + STRIDE_BYTES]


class Strides:
    """`clock` tells the time that the thread has computed: while it waits for a disk it takes no core."""

    def __init__(
        self, rest: Callable[[float], None], *, share: float, clock: Callable[[], float] = time.thread_time
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"A share is above 0 and at most 1, not {share}")
        self._rest = rest
        self._rest_for_each_s = 1 / share - 1
        self._clock = clock
        self._owed_s = 0.0

    def take(self, stride: Callable[[], T], /) -> T:
        began_s = self._clock()
        result = stride()
        self._owed_s += (self._clock() - began_s) * self._rest_for_each_s
        if self._owed_s >= SHORTEST_REST_S:
            owed_s, self._owed_s = self._owed_s, 0.0
            self._rest(min(owed_s, threading.TIMEOUT_MAX))
        return result
