"""Waiting for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.005


def eventually(condition: Callable[[], T | None], timeout_s: float = 20.0, *, pause_s: float = PAUSE_S) -> T:
    """Call `condition` until its value is true, and return that value. Fail after `timeout_s`. `pause_s`: between two
    calls; longer where a call costs the other side work."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s; last: {value!r}"
        time.sleep(pause_s)
    return value
