"""What Ray knows of the replicas, from the router that Ray makes to the front in the same process.

A module of its own: Ray sends a router's class by value, with copies of the names beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Reports = Mapping[str, Mapping[str, Any]]  # by the name of the replica

_lock = threading.Lock()
_listeners: list[Callable[[Reports], object]] = []
_last: Reports | None = None


def listen(listener: Callable[[Reports], object]) -> None:
    """It is told on Ray's thread; what is known already, at once."""
    with _lock:
        _listeners.append(listener)
        if _last is not None:
            listener(_last)


def tell(reports: Reports) -> None:
    global _last
    with _lock:
        _last = reports
        for listener in _listeners:
            listener(reports)
