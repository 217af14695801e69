"""The timers of one connection, by name, so that none outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def start(self, name: str, delay_s: float, action: Callable[[], object]) -> None:
        """Once, after that long. One that has this name already starts anew."""
        self.stop(name)
        self._handles[name] = self._loop.call_later(delay_s, action)

    def stop(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def stop_all(self) -> None:
        for name in tuple(self._handles):
            self.stop(name)
