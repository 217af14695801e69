"""Detection of clients that are gone, as opposed to those that have only closed their sending side.

Both look the same here: the end of input. But the machine of a client that is gone rejects data, which shows as a
socket error. Before the response begins, an interim response is sent as a probe: HTTP/1.1 clients must skip '100
Continue', even if they did not ask for it. After that the response itself is the probe.
"""

from __future__ import annotations

import asyncio
import math
import socket

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvstrata.server.wire.timers import Timers

TIMER = "half closed"
LOOK_S = 0.1
ASK_S = 1.0  # a response that begins sooner needs no interim response
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosed:
    """A watch on a half-closed connection; aborts it as soon as the client turns out to be gone."""

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
            self._asks_at = math.inf  # one interim response is enough
            if not self._cycle.response_started and self._cycle.scope["http_version"] == "1.1":
                self._transport.write(INTERIM)
        self.watch()
