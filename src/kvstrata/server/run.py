"""The server process: drains on the first Ctrl-C, exits at once on the second.

Handles uvicorn and signals. While it drains, new requests get 503 and running replies continue until they end or the
timeout expires; then the engine stops and the remaining requests get an error.
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

FLUSH_S = 5  # time to flush connections
INTERRUPTED = 130


class Server(uvicorn.Server):
    """A uvicorn server with draining. `say` receives messages for the user."""

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
        """Handle SIGINT or SIGTERM. Called by uvicorn in the main thread."""
        del sig, frame
        if self._draining is not None or self._loop is None:
            sys.stdout.flush()
            os._exit(INTERRUPTED)  # do not wait for the engine's thread, which may be in a long computation
        self.drain()

    def drain(self) -> None:
        """Refuse new requests and exit when the running replies have ended. May be called from any thread or a signal
        handler."""
        assert self._loop is not None, "only a server that has started can drain"
        # Takes effect at once. Nothing here may take a lock, which the interrupted code might hold.
        self.service.door.closed = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_drain)

    def end(self) -> None:
        """Exit without waiting for replies. May be called from any thread; has no effect after the server has ended."""
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
        # uvicorn's messages at level info (process id, how to quit) repeat the server's own.
        log_level="warning" if log_level == "info" else log_level,
        # logs.py configures logging.
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        # The server aborts its connections after FLUSH_S; a task that runs longer is a defect.
        timeout_graceful_shutdown=2 * FLUSH_S,
        http=functools.partial(Connection, service.bounds),  # pyright: ignore[reportArgumentType]
        # An agent thinks for minutes between two requests; a connection kept open saves it a round trip.
        timeout_keep_alive=120,
    )
