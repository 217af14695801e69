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

from kvstrata.server.app import create_app, wrap_app
from kvstrata.server.history import HistorySampler
from kvstrata.server.http.connection import ClientConnection
from kvstrata.server.state import ServerState, expire_regularly

FLUSH_S = 5  # time to flush connections
INTERRUPTED = 130


class Server(uvicorn.Server):
    """A uvicorn server with draining. `say` receives messages for the user."""

    def __init__(
        self,
        state: ServerState,
        *,
        drain_timeout_s: float = 30.0,
        log_level: str = "warning",
        on_ready: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(_uvicorn_config(state, log_level))
        self.state = state
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
        state = self.state
        sampler = HistorySampler(state.engine, state.metrics, state.request_log.history)
        self._sampling = self._loop.create_task(sampler.run())
        if self.state.cache_ttl_s is not None:
            self._expiring = self._loop.create_task(expire_regularly(self.state, self.state.cache_ttl_s))
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
            if isinstance(connection, ClientConnection):
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
        self.state.drain_gate.is_closed = True
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
        drain_gate = self.state.drain_gate
        self.state.engine.drain()
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        while (left_s := deadline - asyncio.get_running_loop().time()) > 0 and drain_gate.num_running:
            replies = "1 reply" if drain_gate.num_running == 1 else f"{drain_gate.num_running} replies"
            self._say(f"Finishing {replies}, {left_s:.0f} s left. Ctrl-C again ends at once.")
            await drain_gate.wait_empty(min(1.0, left_s))
        await to_thread.run_sync(self.state.engine.stop)
        for end in self.state.at_end:
            await to_thread.run_sync(end)
        if self.state.replies is not None:
            await to_thread.run_sync(self.state.replies.memory.close)
        self.should_exit = True


def _uvicorn_config(state: ServerState, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        wrap_app(create_app(state), state),
        # uvicorn's messages at level info (process id, how to quit) repeat the server's own.
        log_level="warning" if log_level == "info" else log_level,
        # platform/logging.py configures logging.
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        # The server aborts its connections after FLUSH_S; a task that runs longer is a defect.
        timeout_graceful_shutdown=2 * FLUSH_S,
        http=functools.partial(ClientConnection, state.http_limits),  # pyright: ignore[reportArgumentType]
        # An agent thinks for minutes between two requests; a connection kept open saves it a round trip.
        timeout_keep_alive=120,
    )
