"""A client connection under limits that uvicorn lacks: size and time of headers, slow readers, number of connections.

uvicorn's protocol parses requests and runs the app. A refusal has the API's error format if no other response is in
progress, and is logged only at level info. The server never waits for a client forever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TypeVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvstrata.errors import HeadersTooLarge, InvalidRequest, RequestError, RequestTimeout, Unavailable
from kvstrata.server.http.body_limit import MIN_BYTES_S, HttpLimits
from kvstrata.server.http.errors import raw_error
from kvstrata.sizes import format_bytes

logger = logging.getLogger("kvstrata.server")

# A client that is refused while it sends would lose the response if the connection closed at once. So the rest of its
# input is read and dropped, within these limits.
LINGER_S = 10.0
LAST_LINGER_S = 1.0  # at shutdown
LINGER_BYTES = 128 << 20
MAX_PIPELINED = 16
MAX_REFUSED = 64  # connections beyond the limit that get a refusal
# The headers of a well-behaved client arrive within this time; a slower one has no priority over a new connection.
HEADERS_S = 1.0
HOP_HEADERS = (b"upgrade", b"http2-settings", b"connection")


class SlowReader:
    """A watch on a connection with a full write buffer; aborts it if the client reads too slowly.

    The transport buffers data that the client has not read. Above its high-water mark the app's next write waits, so an
    unread stream stops there; but it would wait forever, while the engine's further output accumulates.
    """

    TIMER = "slow reader"

    def __init__(self, transport: asyncio.Transport, timers: Timers, timeout_s: float) -> None:
        self._transport = transport
        self._timers = timers
        self._timeout_s = timeout_s
        self._left_bytes = 0

    def start_watch(self) -> None:
        self._left_bytes = self._transport.get_write_buffer_size()
        self._timers.start(self.TIMER, self._timeout_s, self._look)

    def stop_watch(self) -> None:
        self._timers.stop(self.TIMER)

    def _look(self) -> None:
        taken_bytes = self._left_bytes - self._transport.get_write_buffer_size()
        if taken_bytes < MIN_BYTES_S * self._timeout_s:
            self._transport.abort()
        else:
            self.start_watch()


class Timers:
    """Named timers of one connection, which can all be stopped when it ends."""

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


class ClosableConnection(Protocol):
    """The state of a connection that decides whether it is closed for another one."""

    @property
    def is_idle(self) -> bool:
        """Whether the connection is kept open between two requests."""
        ...

    @property
    def has_sent(self) -> bool:
        """Whether any byte of a request has arrived."""
        ...

    @property
    def idle_since(self) -> float | None:
        """The loop time at which the connection began to wait for a request, or None while it has one."""
        ...


W = TypeVar("W", bound=ClosableConnection)


def choose_to_close(connections: Iterable[W], now: float) -> W | None:
    """Return the connection to close, or None: idle ones first, then silent ones, then ones with slow headers; among
    equals the one that has waited longest."""
    ranked = [(_closing_rank(each), since, each) for each in connections if (since := each.idle_since) is not None]
    able = [(rank, since, each) for rank, since, each in ranked if rank < 2 or since <= now - HEADERS_S]
    return min(able, key=lambda each: each[:2])[2] if able else None


def _closing_rank(each: ClosableConnection) -> int:
    if each.is_idle:
        return 0
    return 2 if each.has_sent else 1


class ClientConnection(HttpToolsProtocol):
    """A uvicorn protocol for one client, under limits."""

    def __init__(self, limits: HttpLimits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._timers = Timers(self.loop)
        self._reads: Literal["nothing", "head", "body"] = "nothing"
        self._head_bytes = 0
        self._num_requests = 0  # requests whose first byte has arrived
        self._idle_since = self.loop.time()  # when it last began to wait for a request
        self._upgrades = False
        self._is_refused = False  # refused: further input is dropped
        self._dropped_bytes = 0
        self._slow_reader: SlowReader
        self._running: RequestResponseCycle | None = None  # the request that the app is serving; `cycle` is the newest

    @property
    def _is_answering(self) -> bool:
        """Whether a completely received request has no complete response yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        size = self._limits.max_header_bytes
        for start in range(0, len(data), size):
            if self._is_refused:
                return self._drop(len(data) - start)
            self._feed(data[start : start + size])
        return None

    def _feed(self, piece: bytes) -> None:
        if self._reads == "nothing":
            self._await_head()
        num_begun = self._num_requests
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("This is not HTTP/1.1. Check the address: http://, not https://."))
        # The piece in which a request begins may contain the end of the one before, so it is not counted.
        if self._reads == "head" and self._num_requests == num_begun:
            self._head_bytes += len(piece)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse(self._too_large())

    def _await_head(self) -> None:
        self._reads, self._head_bytes, self._idle_since = "head", 0, self.loop.time()
        self._timers.start("head", self._limits.header_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        if self._num_requests == 0:
            self.transport.close()  # no request was sent: browsers open connections that they may never use
        else:
            seconds = f"{self._limits.header_timeout_s:g}"
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {seconds} s. Send it again."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_requests += 1
        if self._reads != "head" and not self._is_refused:
            self._await_head()

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        if _head_bytes(self.url, self.headers) > self._limits.max_header_bytes:
            self._refuse(self._too_large())
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(InvalidRequest("Too many requests were sent before the first was answered."))
        elif self.parser.should_upgrade():
            self._upgrades = True
        else:
            super().on_headers_complete()
            self._timers.stop("head")
            self._reads = "body"

    def on_body(self, body: bytes) -> None:
        if self._is_refused or self._upgrades:
            return
        if self.cycle.response_complete:
            self._drop(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused or self._upgrades:
            return
        super().on_message_complete()
        self._reads = "nothing"
        self._timers.stop("linger")
        if self.cycle.response_complete:
            # The response did not wait for the body. uvicorn stopped its timer when the rest of the body arrived.
            self._idle_since = self.loop.time()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Continue with the request as if it had no Upgrade header, as HTTP allows. Java's client asks for h2c with
        every first request; the parser stops there and would lose the body."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            return self._refuse(InvalidRequest("This server is no proxy. Send requests to its own paths."))
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in HOP_HEADERS]
        self._upgrades = False
        self.parser = httptools.HttpRequestParser(self)
        return self._feed(b"\r\n".join([*lines, b"", b""]) + rest)

    def _refuse(self, error: RequestError, linger_s: float = LINGER_S) -> None:
        """Send an error if no other response is in progress, and close the connection after `linger_s` at most."""
        logger.info("%s: %d, %s", self.client[0] if self.client else "a client", error.status, error.message)
        self._is_refused = True
        self._timers.stop("head")
        if self._is_answering:
            self.cycle.keep_alive = False
        elif not self._may_answer():
            self.transport.abort()
        else:
            self._give_up_request()
            self.transport.write(raw_error(error))
            self.transport.write_eof()
            self.flow.resume_reading()
            self._timers.start("linger", linger_s, self.transport.abort)

    def _may_answer(self) -> bool:
        """Return whether the next bytes to the client would be the response to the request that is being read."""
        if self.pipeline:
            return False
        if self._reads == "body":
            return not self.cycle.response_started
        return self.cycle is None or self.cycle.response_complete

    def _give_up_request(self) -> None:
        if self._reads == "body":
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _drop(self, num_bytes: int) -> None:
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.abort()

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"The request's headers are larger than the {format_bytes(self._limits.max_header_bytes)} that this server "
            "reads. Send less."
        )

    @property
    def counts_as_open(self) -> bool:
        return not self._is_refused and not self.transport.is_closing()

    @property
    def is_idle(self) -> bool:
        return self._reads == "nothing" and not self._is_answering

    @property
    def has_sent(self) -> bool:
        """Whether any byte of a request has arrived."""
        return self._num_requests > 0

    @property
    def idle_since(self) -> float | None:
        """The loop time at which the connection began to wait for a request, or None while it has one."""
        return None if self._is_answering or self._reads == "body" else self._idle_since

    def close_for_another(self) -> None:
        if self.is_idle or not self.has_sent:
            self.timeout_keep_alive_handler()
        else:
            self._refuse(self._too_many())

    def shutdown(self) -> None:
        """Close the connection at shutdown. A request that is still arriving is refused."""
        if self._reads == "nothing":
            super().shutdown()
        elif not self._is_refused:
            self._refuse(Unavailable("The server is shutting down. Try again when it is back."), LAST_LINGER_S)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._slow_reader = SlowReader(transport, self._timers, self._limits.send_timeout_s)
        if self._find_free_place():
            self._await_head()
        elif len(self.connections) > self._limits.max_connections + MAX_REFUSED:
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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow_reader.start_watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slow_reader.stop_watch()

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
            self._idle_since = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon()

    def _end_soon(self) -> None:
        """Abort the connection after the send timeout: a closed transport waits without a limit until its client has
        read everything."""
        self._timers.start("flush", self._limits.send_timeout_s, self.transport.abort)

    def _find_free_place(self) -> bool:
        if len(self.connections) <= self._limits.max_connections:
            return True
        others = [each for each in self.connections if isinstance(each, ClientConnection) and each.counts_as_open]
        if len(others) <= self._limits.max_connections:
            return True
        chosen = choose_to_close((each for each in others if each is not self), self.loop.time())
        if chosen is not None:
            chosen.close_for_another()
        return chosen is not None

    def _too_many(self) -> Unavailable:
        return Unavailable(
            f"{self._limits.max_connections} connections are open, the most that this server takes. Try again in a "
            "moment, or close some.",
            code="too_many_connections",
        )


def _head_bytes(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
