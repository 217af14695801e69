"""Reading of requests from a connection, with limits that uvicorn lacks: the size of headers, the time until they are
complete, and the number of pipelined requests.

uvicorn's protocol parses requests and runs the app. A refusal has the API's error format if no other response is in
progress, and is logged only at level info.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvstrata.errors import HeadersTooLarge, InvalidRequest, RequestError, RequestTimeout
from kvstrata.server.errors import raw_error
from kvstrata.server.wire.bounds import Bounds
from kvstrata.server.wire.timers import Timers
from kvstrata.sizes import format_bytes

logger = logging.getLogger("kvstrata.server")

# A client that is refused while it sends would lose the response if the connection closed at once. So the rest of its
# input is read and dropped, within these limits.
LINGER_S = 10.0
LINGER_BYTES = 128 << 20
MAX_PIPELINED = 16
HOP_HEADERS = (b"upgrade", b"http2-settings", b"connection")


class Reading(HttpToolsProtocol):
    def __init__(self, bounds: Bounds, **given: Any) -> None:
        super().__init__(**given)
        self._bounds = bounds
        self._timers = Timers(self.loop)
        self._reads: Literal["nothing", "head", "body"] = "nothing"
        self._head_bytes = 0
        self._num_begun = 0  # requests whose first byte has arrived
        self._since = self.loop.time()  # when it last began to wait for a request
        self._upgrades = False
        self._leaving = False  # refused: further input is dropped
        self._dropped_bytes = 0

    @property
    def _is_answering(self) -> bool:
        """Whether a completely received request has no complete response yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        size = self._bounds.max_header_bytes
        for start in range(0, len(data), size):
            if self._leaving:
                return self._drop(len(data) - start)
            self._feed(data[start : start + size])
        return None

    def _feed(self, piece: bytes) -> None:
        if self._reads == "nothing":
            self._await_head()
        num_begun = self._num_begun
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("This is not HTTP/1.1. Check the address: http://, not https://."))
        # The piece in which a request begins may contain the end of the one before, so it is not counted.
        if self._reads == "head" and self._num_begun == num_begun:
            self._head_bytes += len(piece)
            if self._head_bytes > self._bounds.max_header_bytes:
                self._refuse(self._too_large())

    def _await_head(self) -> None:
        self._reads, self._head_bytes, self._since = "head", 0, self.loop.time()
        self._timers.start("head", self._bounds.header_timeout_s, self._on_late_head)

    def _on_late_head(self) -> None:
        if self._num_begun == 0:
            self.transport.close()  # no request was sent: browsers open connections that they may never use
        else:
            seconds = f"{self._bounds.header_timeout_s:g}"
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {seconds} s. Send it again."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_begun += 1
        if self._reads != "head" and not self._leaving:
            self._await_head()

    def on_headers_complete(self) -> None:
        if self._leaving:
            return
        if _head_bytes(self.url, self.headers) > self._bounds.max_header_bytes:
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
        if self._leaving or self._upgrades:
            return
        if self.cycle.response_complete:
            self._drop(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._leaving or self._upgrades:
            return
        super().on_message_complete()
        self._reads = "nothing"
        self._timers.stop("linger")
        if self.cycle.response_complete:
            # The response did not wait for the body. uvicorn stopped its timer when the rest of the body arrived.
            self._since = self.loop.time()
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
        self._leaving = True
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
            f"The request's headers are larger than the {format_bytes(self._bounds.max_header_bytes)} that this server "
            "reads. Send less."
        )


def _head_bytes(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
