"""Clocks and waits of the tests of tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def eventually(is_true: Callable[[], object], timeout_s: float = 10.0, *, interval_s: float = 0.01) -> None:
    """Wait until a condition holds; fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s, f"the condition did not hold within {timeout_s} s"
        time.sleep(interval_s)


def in_time(work: Callable[[], T], timeout_s: float = 20.0) -> T:
    """Return the result of `work`, or raise its exception; fail if it hangs. It runs on a thread of its own, because a
    wait for a hanging disk would never end."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - it is raised on the thread of the caller
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), f"the call did not return within {timeout_s} s"
    if errors:
        raise errors[0]
    return results[0]
