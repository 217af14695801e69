"""The process around the app: drains on the first Ctrl-C, ends at once on the second.

Knows uvicorn and signals. Draining: new requests get 503, running replies go on until they end or the time is
up, then the engine stops and the requests that are left get an error.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from anyio import to_thread

from kvstrata.server.app import front
from kvstrata.server.forgetting import expire_regularly
from kvstrata.server.journal.sampling import JournalSampler
from kvstrata.server.service import Service
from kvstrata.server.wire.connection import Connection

FLUSH_S = 5  # for connections to take what was written to them
INTERRUPTED = 130


class Server(uvicorn.Server):
    """uvicorn's server with draining. `say` gets a line for each thing that a person should know."""

    def __init__(
        self,
        service: Service,
        *,
        drain_timeout_s: float = 30.0,
        log_level: str = "warning",
        on_ready: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(_uvicorn_config(service, log_level))
        self.service = service
        self._drain_timeout_s = drain_timeout_s
        self._on_ready = on_ready
        self._say = say
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._expiring: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._sampling = self._loop.create_task(JournalSampler(self.service).run())
        if self.service.cache_ttl_s is not None:
            self._expiring = self._loop.create_task(expire_regularly(self.service, self.service.cache_ttl_s))
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        if self._expiring is not None:
            self._expiring.cancel()
        end = asyncio.get_running_loop().call_later(FLUSH_S, self._end_connections)
        await super().shutdown(sockets)
        end.cancel()

    def _end_connections(self) -> None:
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM, in the main thread."""
        del sig, frame
        if self._draining is not None or self._loop is None:
            sys.stdout.flush()
            os._exit(INTERRUPTED)  # the engine's thread may be inside a long computation; do not wait for it
        self.drain()

    def drain(self) -> None:
        """From any thread, or a signal: take no new requests and end when the running replies have ended."""
        assert self._loop is not None, "only a server that has started can drain"
        # At once; but nothing here may take a lock, which the interrupted code might hold.
        self.service.door.closed = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_drain)

    def end(self) -> None:
        """From any thread: end now, without waiting for replies. Does nothing to a server that has ended."""
        self._drain_timeout_s = 0.0
        self.drain()

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        door = self.service.door
        self.service.engine.drain()
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        while (left_s := deadline - asyncio.get_running_loop().time()) > 0 and door.num_inside:
            replies = "1 reply" if door.num_inside == 1 else f"{door.num_inside} replies"
            self._say(f"Finishing {replies}, {left_s:.0f} s left. Ctrl-C again ends at once.")
            await door.wait_empty(min(1.0, left_s))
        await to_thread.run_sync(self.service.engine.stop)
        for end in self.service.at_end:
            await to_thread.run_sync(end)
        if self.service.replies is not None:
            await to_thread.run_sync(self.service.replies.close)
        self.should_exit = True


def _uvicorn_config(service: Service, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        front(service),
        # What uvicorn says at level info (a process id, how to quit) is said better elsewhere.
        log_level="warning" if log_level == "info" else log_level,
        # Its messages go the way that logs.py has made for them.
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        # The server ends its connections itself after FLUSH_S; a task that hangs on longer is a defect.
        timeout_graceful_shutdown=2 * FLUSH_S,
        http=functools.partial(Connection, service.bounds),  # pyright: ignore[reportArgumentType]
        # An agent thinks for minutes between two requests; a connection kept open saves it a round trip.
        timeout_keep_alive=120,
    )
