"""Replica reports, passed from the request router that Ray creates to `RayIngress` in the same process.

This is a separate module because Ray pickles the request router's class by value, with copies of its globals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

Reports = Mapping[str, Mapping[str, Any]]  # by replica name

_lock = threading.Lock()

_listeners: list[Callable[[Reports], object]] = []

_last: Reports | None = None


def listen(listener: Callable[[Reports], object]) -> None:
    """Add a listener. It is called on Ray's thread, and at once if there is a report already."""
    with _lock:
        _listeners.append(listener)
        if _last is not None:
            listener(_last)


def publish_reports(reports: Reports) -> None:
    global _last
    with _lock:
        _last = reports
        for listener in _listeners:
            listener(reports)
