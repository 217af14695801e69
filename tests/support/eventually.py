"""Waiting for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.005


def eventually(condition: Callable[[], T], timeout_s: float = 20.0) -> T:
    """Return the first true value of `condition`, which is called until then. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s; last: {value!r}"
        time.sleep(PAUSE_S)
    return value
