"""A client's connection: its place among the others, and how it ends. The server never waits for a client forever."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvstrata.errors import Unavailable
from kvstrata.server.wire.bounds import Bounds
from kvstrata.server.wire.crowd import gives_way
from kvstrata.server.wire.half_closed import HalfClosed
from kvstrata.server.wire.reading import LINGER_S, Reading
from kvstrata.server.wire.slow_reader import SlowReader

LAST_LINGER_S = 1.0  # at shutdown
MAX_REFUSED = 64  # connections beyond the limit that get a refusal


class Connection(Reading):
    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(bounds, **given)
        self._slow_reader: SlowReader
        self._running: RequestResponseCycle | None = None  # the request that the app is serving; `cycle` is the newest

    @property
    def holds_place(self) -> bool:
        return not self._leaving and not self.transport.is_closing()

    @property
    def is_idle(self) -> bool:
        return self._reads == "nothing" and not self._is_answering

    @property
    def has_begun(self) -> bool:
        """Whether any byte of a request has arrived."""
        return self._num_begun > 0

    @property
    def waits_since(self) -> float | None:
        """The loop time at which the connection began to wait for a request, or None while it has one."""
        return None if self._is_answering or self._reads == "body" else self._since

    def give_way(self) -> None:
        if self.is_idle or not self.has_begun:
            self.timeout_keep_alive_handler()
        else:
            self._refuse(self._too_many())

    def shutdown(self) -> None:
        """Close the connection at shutdown. A request that is still arriving is refused."""
        if self._reads == "nothing":
            super().shutdown()
        elif not self._leaving:
            self._refuse(Unavailable("The server is shutting down. Try again when it is back."), LAST_LINGER_S)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._slow_reader = SlowReader(transport, self._timers, self._bounds.send_timeout_s)
        if self._find_place():
            self._await_head()
        elif len(self.connections) > self._bounds.max_connections + MAX_REFUSED:
            transport.abort()
        else:
            self._refuse(self._too_many())

    def connection_lost(self, exc: Exception | None) -> None:
        self._timers.stop_all()
        self.pipeline.clear()
        # uvicorn notifies only the newest request, but an earlier one may be running.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return whether the connection stays open. A client that has finished sending may still wait for its
        response."""
        if not self._is_answering or self._running is None:
            return False
        self.cycle.keep_alive = False
        HalfClosed(self.transport, self._timers, self._running).watch()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow_reader.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slow_reader.rest()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_soon()
        elif self._reads == "body" and self.cycle.response_complete:
            self._timers.start("linger", LINGER_S, self.transport.abort)
        elif self.is_idle:
            self._since = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon()

    def _end_soon(self) -> None:
        """Abort the connection after the send timeout: a closed transport waits without a limit until its client has
        read everything."""
        self._timers.start("flush", self._bounds.send_timeout_s, self.transport.abort)

    def _find_place(self) -> bool:
        if len(self.connections) <= self._bounds.max_connections:
            return True
        others = [each for each in self.connections if isinstance(each, Connection) and each.holds_place]
        if len(others) <= self._bounds.max_connections:
            return True
        chosen = gives_way((each for each in others if each is not self), self.loop.time())
        if chosen is not None:
            chosen.give_way()
        return chosen is not None

    def _too_many(self) -> Unavailable:
        return Unavailable(
            f"{self._bounds.max_connections} connections are open, the most that this server takes. Try again in a "
            "moment, or close some.",
            code="too_many_connections",
        )
