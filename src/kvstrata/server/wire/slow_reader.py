"""Disconnection of clients that do not read their response.

The transport buffers data that the client has not read. Above its high-water mark the app's next write waits, so an
unread stream stops there; but it would wait forever, while the engine's further output accumulates.
"""

from __future__ import annotations

import asyncio

from kvstrata.server.wire.bounds import MIN_BYTES_S
from kvstrata.server.wire.timers import Timers

TIMER = "slow reader"


class SlowReader:
    """A watch on a connection with a full write buffer; aborts it if the client reads too slowly."""

    def __init__(self, transport: asyncio.Transport, timers: Timers, timeout_s: float) -> None:
        self._transport = transport
        self._timers = timers
        self._timeout_s = timeout_s
        self._left_bytes = 0

    def watch(self) -> None:
        self._left_bytes = self._transport.get_write_buffer_size()
        self._timers.start(TIMER, self._timeout_s, self._look)

    def rest(self) -> None:
        self._timers.stop(TIMER)

    def _look(self) -> None:
        taken_bytes = self._left_bytes - self._transport.get_write_buffer_size()
        if taken_bytes < MIN_BYTES_S * self._timeout_s:
            self._transport.abort()
        else:
            self.watch()
