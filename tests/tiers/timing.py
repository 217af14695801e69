"""Clocks and waits of the tests of tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


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
