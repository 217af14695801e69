"""Tells a client that has only stopped sending from one that is gone.

Both look the same here: the end of what comes. But the machine of a client that is gone refuses what it is sent, and
that shows as an error of the socket. Before the answer begins an interim response is there to be sent: HTTP/1.1 has
clients skip '100 Continue', whether they asked for it or not. Afterwards the answer itself is.
"""

from __future__ import annotations

import asyncio
import math
import socket

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvstrata.server.wire.timers import Timers

TIMER = "half closed"
LOOK_S = 0.1
ASK_S = 1.0  # an answer that begins sooner needs no interim response
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosed:
    """Aborts the connection as soon as the client turns out to be gone."""

    def __init__(self, transport: asyncio.Transport, timers: Timers, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._timers = timers
        self._cycle = cycle
        self._asks_at = asyncio.get_running_loop().time() + ASK_S

    def watch(self) -> None:
        self._timers.start(TIMER, LOOK_S, self._look)

    def _look(self) -> None:
        line = self._transport.get_extra_info("socket")
        if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        if asyncio.get_running_loop().time() >= self._asks_at:
            self._asks_at = math.inf  # one such answer is enough to find out
            if not self._cycle.response_started and self._cycle.scope["http_version"] == "1.1":
                self._transport.write(INTERIM)
        self.watch()
