"""Lets go of a client that does not read its answer.

The transport holds what the client has not taken. Above its high-water mark the app's next write waits, so a stream
that is not read stops there; but it would wait for ever, and what the engine goes on to write would pile up meanwhile.
"""

from __future__ import annotations

import asyncio

from kvstrata.server.wire.bounds import MIN_BYTES_S
from kvstrata.server.wire.timers import Timers

TIMER = "slow reader"


class SlowReader:
    """Watches while more waits to be sent than the transport likes. Aborts where too little of it is taken."""

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
