"""Limits of clients: bytes, seconds, connections; request bodies are bounded and decompressed as they arrive.

Counts bytes as they arrive, because a client may send a false content-length. A compressed body is bounded before and
after: a few kilobytes may inflate to gigabytes.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.errors import BodyTooLarge, InvalidRequest, QueueFull, RequestTimeout, Unavailable, UnsupportedCoding
from kvstrata.server.http.access import header_values
from kvstrata.server.http.errors import error_response
from kvstrata.sizes import format_bytes

# Least transfer rate of a body and of a response; slower clients time out.
MIN_BYTES_S = 1024
# Concurrent imports: each file is kept until it has been verified.
MAX_IMPORTS = 4
# JSON values allowed in a body for any context size: about 0.1 s of parsing, which holds the interpreter lock.
MIN_VALUES = 1 << 18
# Most JSON objects in a body for any context size: an object takes 6 us to validate, and a message 10 us to render.
MAX_OBJECTS = 1 << 16
PIECE_BYTES = 1 << 16
CODING = b"content-encoding"
INFLATED_BYTES = 1 << 18  # decompressed at a time: about a millisecond without the event loop
GZIP_BITS = 16 + zlib.MAX_WBITS
GONE = (CODING, b"content-length")  # headers removed from the app's request
SCOPE_HELD = "kvstrata.held_body"


@dataclass(frozen=True)
class HttpLimits:
    """Limits of a client."""

    max_connections: int = 512
    max_header_bytes: int = 32 << 10
    header_timeout_s: float = 20.0
    max_body_bytes: int = 32 << 20
    body_memory_bytes: int = 256 << 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0


@dataclass(frozen=True)
class BodyLimits:
    """Limits of request bodies. `larger`: size limits of the paths that receive files."""

    http: HttpLimits
    larger: Mapping[str, int] = field(default_factory=dict)

    def of_path(self, path: str) -> HttpLimits:
        return replace(self.http, max_body_bytes=self.larger.get(path, self.http.max_body_bytes))

    def too_large(self, path: str) -> BodyTooLarge:
        """Return the error for a body over the limit."""
        return (_too_large_file if path in self.larger else _too_large)(self.of_path(path).max_body_bytes)


class LimitBody:
    """Middleware that answers 413 to a body that is too large, by its content-length or as soon as it exceeds the
    limit, and 408 to one that takes too long."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        bounds, too_large = self.limits.of_path(scope["path"]), self.limits.too_large(scope["path"])
        if _declared_length(scope) > bounds.max_body_bytes:
            return await error_response(too_large)(scope, receive, send)
        return await self.app(scope, BoundedBody(receive, bounds, too_large), send)


class BoundedBody:
    """An ASGI receive callable that is bounded until the body is complete; afterwards it waits without a limit."""

    def __init__(self, receive: Receive, bounds: HttpLimits, too_large: BodyTooLarge) -> None:
        self._too_large = too_large
        self._receive = receive
        self._bounds = bounds
        self._num_bytes = 0
        self._complete = False
        self._began = asyncio.get_running_loop().time()

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        message = await self._in_time()
        self._num_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._num_bytes > self._bounds.max_body_bytes:
            raise self._too_large
        return message

    async def _in_time(self) -> Message:
        allowed_s = self._bounds.body_timeout_s + self._num_bytes / MIN_BYTES_S
        try:
            async with asyncio.timeout_at(self._began + allowed_s):
                return await self._receive()
        except TimeoutError:
            raise RequestTimeout(
                f"The body did not arrive in time: {self._num_bytes} bytes in {allowed_s:.0f} s. Send it again."
            ) from None


class BodyMemory:
    """Account of the memory of all bodies that are held at once. Belongs to the event loop's thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0

    def take(self, num_bytes: int) -> None:
        if self._held_bytes + num_bytes > self._limit_bytes:
            raise Unavailable(
                f"The bodies of other requests fill the {format_bytes(self._limit_bytes)} that this server holds at "
                "once. Try again in a moment, or start it with a larger --body-memory (KVSTRATA_BODY_MEMORY)."
            )
        self._held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes


class HeldBody:
    """The share of one body in the memory for all bodies."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def add_bytes(self, num_bytes: int) -> None:
        self._memory.take(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._memory.give_back(self._num_bytes)
        self._num_bytes = 0


class BoundBodyMemory:
    """Middleware inside of DecompressBody that answers 503 when the memory for bodies is full. Uploaded files are not
    counted, because they are not held in memory."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self.app = app
        self._limits = limits
        http_limits = limits.http
        self._memory = BodyMemory(max(http_limits.body_memory_bytes, http_limits.max_body_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._limits.larger:
            return await self.app(scope, receive, send)
        held = HeldBody(self._memory)

        async def counted() -> Message:
            message = await receive()
            held.add_bytes(len(message.get("body", b"")))
            return message

        try:
            scope[SCOPE_HELD] = held
            return await self.app(scope, counted, send)
        finally:
            held.release()


def release_body(scope: Scope) -> None:
    """Release the memory of a body that has been parsed, so that others can use it before the reply ends."""
    held: HeldBody | None = scope.get(SCOPE_HELD)
    if held is not None:
        held.release()


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the {format_bytes(max_bytes)} that this server reads. Send less.")


def _too_large_file(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is larger than {format_bytes(max_bytes)}: this server has no memory to store all of it. Give it "
        "more (--memory-limit, --hot-cache-size), or export a shorter conversation."
    )


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


class DecompressBody:
    """Middleware inside of LimitBody that decompresses gzip: LimitBody limits the compressed size, this one the
    size of the whole."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self.app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        codings = _codings(scope) if scope["type"] == "http" else []
        if not codings:
            return await self.app(scope, receive, send)
        if codings not in (["gzip"], ["x-gzip"]):
            return await error_response(_unknown(", ".join(codings)))(scope, receive, send)
        path = scope["path"]
        most_bytes, too_large = self._limits.of_path(path).max_body_bytes, self._limits.too_large(path)
        inflated = DecompressedBody(receive, most_bytes, too_large)
        headers = [(name, value) for name, value in scope["headers"] if name not in GONE]
        return await self.app({**scope, "headers": headers}, inflated, send)


class DecompressedBody:
    """An ASGI receive callable whose messages are pieces of the inflated body."""

    def __init__(self, receive: Receive, most_bytes: int, too_large: BodyTooLarge) -> None:
        self._receive = receive
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
        if not self._waiting and not self._has_all:
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
        self._complete = self._has_all and not self._waiting and not (self._stream and len(piece) == INFLATED_BYTES)
        if self._complete:
            self._require_end()
        return {"type": "http.request", "body": piece, "more_body": not self._complete}

    def _inflate(self) -> bytes:
        try:
            if self._stream is None:
                if not self._waiting:
                    return b""
                self._stream = zlib.decompressobj(GZIP_BITS)
                self._num_streams += 1
            piece = self._stream.decompress(self._waiting, INFLATED_BYTES)
        except zlib.error as error:
            raise _damaged(str(error)) from None
        self._waiting = self._stream.unconsumed_tail
        if self._stream.eof:
            self._waiting, self._stream = self._stream.unused_data, None
        return piece

    def _require_end(self) -> None:
        if self._stream is not None or not self._num_streams:
            raise _damaged("it ends too early")


def _codings(scope: Scope) -> list[str]:
    named = (name.strip().lower() for value in header_values(scope, CODING) for name in value.split(","))
    return [name for name in named if name not in ("", "identity")]


def _unknown(codings: str) -> UnsupportedCoding:
    return UnsupportedCoding(
        f"content-encoding: '{codings[:80]}' is not read here. Send the body as it is, or compressed by gzip."
    )


def _damaged(why: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not whole gzip, as content-encoding says it is: {why}. Send it again.")


class ImportLimit:
    """Limits on concurrent imports, in number and in total bytes; further ones are asked to try again. Belongs to the
    event loop's thread."""

    def __init__(self, most: int = MAX_IMPORTS) -> None:
        self._most = most
        self._num_taken = 0
        self._num_bytes = 0

    @contextmanager
    def reserve(self, most_bytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve a place for an import, and yield a function to call before more bytes of its file are written.
        `most_bytes`: limit of all files together, and so of a single one."""
        if self._num_taken >= self._most:
            raise QueueFull(f"{self._num_taken} files are being imported already. Try again in a moment.")
        own_bytes = 0

        def grow(num_bytes: int) -> None:
            nonlocal own_bytes
            if self._num_bytes + num_bytes > most_bytes:
                raise QueueFull(
                    f"The files that are being imported would have more than {format_bytes(most_bytes)} together. Try "
                    "again when the others are done."
                )
            own_bytes += num_bytes
            self._num_bytes += num_bytes

        self._num_taken += 1
        try:
            yield grow
        finally:
            self._num_taken -= 1
            self._num_bytes -= own_bytes


def max_values(max_items: int) -> int:
    """Return the most JSON values allowed in a body whose lists have at most `max_items`."""
    return max(MIN_VALUES, 2 * max_items)


def num_values(text: str) -> int:
    """Count lists, objects and commas: about the number of values that parsing the text as JSON creates."""
    return sum(map(text.count, ",[{"))


def require_few_values(body: bytes, max_items: int) -> None:
    """Raise BodyTooLarge if the body has too many JSON values or objects to parse and validate."""
    most = max_values(max_items)
    if len(body) <= min(most, MAX_OBJECTS):
        return
    num_values = num_objects = 0
    for values, objects in _values_in_pieces(body):
        num_values += values
        num_objects += objects
        if num_values > most or num_objects > MAX_OBJECTS:
            found = f"{most} JSON values" if num_values > most else f"{MAX_OBJECTS} JSON objects"
            raise BodyTooLarge(
                f"The body has more than the {found} that this server reads at a time. Send fewer messages, prompts or "
                "tools in one request."
            )


def _values_in_pieces(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the numbers of values and of objects outside of strings, for one piece of the body at a time; each piece
    holds the interpreter lock."""
    start, is_in_string = 0, False
    while start < len(body):
        piece = body[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + PIECE_BYTES + 1]  # do not split an escape
        start += len(piece)
        runs = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(runs[is_in_string::2])
        is_in_string ^= len(runs) % 2 == 0
        objects = outside.count(b"{")
        yield objects + outside.count(b",") + outside.count(b"["), objects
