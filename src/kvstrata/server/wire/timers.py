"""Named timers of one connection, which can all be stopped when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timers:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def start(self, name: str, delay_s: float, action: Callable[[], object]) -> None:
        """Run `action` once after a delay. A running timer with the same name restarts."""
        self.stop(name)
        self._handles[name] = self._loop.call_later(delay_s, action)

    def stop(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def stop_all(self) -> None:
        for name in tuple(self._handles):
            self.stop(name)
