"""Middleware that inflates compressed request bodies as they arrive, with a size limit: a few kilobytes may inflate to
gigabytes.

Supports gzip and deflate; another encoding is refused with a message that names these two.
"""

from __future__ import annotations

import asyncio
import zlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.errors import BodyTooLarge, InvalidRequest, UnsupportedCoding
from kvstrata.server.errors import error_response
from kvstrata.server.hosts import header_values
from kvstrata.server.limits import BodyLimits

CODING = b"content-encoding"
PIECE_BYTES = 1 << 18  # inflated at a time: about a millisecond, in which no other client is served
GZIP_BITS = 16 + zlib.MAX_WBITS
GONE = (CODING, b"content-length")  # headers removed from the app's request


class Inflate:
    """Middleware inside of LimitBody: LimitBody limits the compressed size, Inflate the inflated size."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self.app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        codings = _codings(scope) if scope["type"] == "http" else []
        if not codings:
            return await self.app(scope, receive, send)
        if codings not in (["gzip"], ["x-gzip"], ["deflate"]):
            return await error_response(_unknown(", ".join(codings)))(scope, receive, send)
        path = scope["path"]
        most_bytes, too_large = self._limits.of(path).max_body_bytes, self._limits.too_large(path)
        inflated = Inflated(receive, codings[0], most_bytes, too_large)
        headers = [(name, value) for name, value in scope["headers"] if name not in GONE]
        return await self.app({**scope, "headers": headers}, inflated, send)


class Inflated:
    """An ASGI receive callable whose messages are pieces of the inflated body."""

    def __init__(self, receive: Receive, coding: str, most_bytes: int, too_large: BodyTooLarge) -> None:
        self._receive = receive
        self._coding = coding
        self._left_bytes = most_bytes
        self._too_large = too_large
        self._stream: zlib._Decompress | None = None  # None: before the first byte, or between two gzip members
        self._waiting = b""  # received, not inflated yet
        self._num_streams = 0
        self._has_all = False
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if len(self._waiting) < self._least() and not self._has_all:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._waiting += message.get("body", b"")
            self._has_all = not message.get("more_body", False)
        else:
            await asyncio.sleep(0)  # let other tasks run
        piece = self._inflate()
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            raise self._too_large
        self._complete = self._has_all and not self._waiting and not (self._stream and len(piece) == PIECE_BYTES)
        if self._complete:
            self._require_end()
        return {"type": "http.request", "body": piece, "more_body": not self._complete}

    def _inflate(self) -> bytes:
        try:
            if self._stream is None:
                if len(self._waiting) < (1 if self._has_all else self._least()):
                    return b""
                self._stream = self._begin(self._waiting[:2])
                self._num_streams += 1
            piece = self._stream.decompress(self._waiting, PIECE_BYTES)
        except zlib.error as error:
            raise _damaged(self._coding, str(error)) from None
        self._waiting = self._stream.unconsumed_tail
        if self._stream.eof:
            self._waiting, self._stream = self._stream.unused_data, None
            if self._coding == "deflate" and self._waiting:
                raise _damaged(self._coding, "more comes after its end")
        return piece

    def _least(self) -> int:
        """Return how many bytes must be available to continue: two at the start of a stream, to detect its header."""
        return 1 if self._stream else 2

    def _begin(self, first: bytes) -> zlib._Decompress:
        if self._coding != "deflate":
            return zlib.decompressobj(GZIP_BITS)
        # The standard requires zlib's header; some clients leave it out.
        has_header = len(first) == 2 and first[0] & 0x0F == 8 and int.from_bytes(first, "big") % 31 == 0
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)

    def _require_end(self) -> None:
        if self._stream is not None or not self._num_streams:
            raise _damaged(self._coding, "it ends too early")


def _codings(scope: Scope) -> list[str]:
    named = (name.strip().lower() for value in header_values(scope, CODING) for name in value.split(","))
    return [name for name in named if name not in ("", "identity")]


def _unknown(codings: str) -> UnsupportedCoding:
    return UnsupportedCoding(
        f"content-encoding: '{codings[:80]}' is not read here. Send the body as it is, or by gzip or deflate."
    )


def _damaged(coding: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not whole {coding}, as content-encoding says it is: {why}. Send it again.")
