"""Limits on the size and duration of a request body and on the memory of all bodies. Counts bytes as they arrive,
because a client may send a false content-length."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.errors import BodyTooLarge, RequestTimeout, Unavailable
from kvstrata.server.errors import error_response
from kvstrata.server.wire.bounds import MIN_BYTES_S, Bounds
from kvstrata.sizes import format_bytes

SCOPE_HELD = "kvstrata.held_body"


@dataclass(frozen=True)
class BodyLimits:
    """Limits of request bodies. `larger`: size limits of the paths that receive files."""

    bounds: Bounds
    larger: Mapping[str, int] = field(default_factory=dict)

    def of(self, path: str) -> Bounds:
        return replace(self.bounds, max_body_bytes=self.larger.get(path, self.bounds.max_body_bytes))

    def too_large(self, path: str) -> BodyTooLarge:
        """Return the error for a body over the limit."""
        return (_too_large_file if path in self.larger else _too_large)(self.of(path).max_body_bytes)


class LimitBody:
    """Middleware that answers 413 to a body that is too large, by its content-length or as soon as it exceeds the
    limit, and 408 to one that takes too long."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        bounds, too_large = self.limits.of(scope["path"]), self.limits.too_large(scope["path"])
        if _told_length(scope) > bounds.max_body_bytes:
            return await error_response(too_large)(scope, receive, send)
        return await self.app(scope, Body(receive, bounds, too_large), send)


class Body:
    """An ASGI receive callable that is bounded until the body is complete; afterwards it waits without a limit."""

    def __init__(self, receive: Receive, bounds: Bounds, too_large: BodyTooLarge) -> None:
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
                f"The body did not arrive in time: {self._num_bytes} bytes in {allowed_s:.0f} s. Send it again, "
                "or send less where the line is slow."
            ) from None


class BodyMemory:
    """The memory of all bodies that are held at once. Belongs to the event loop's thread."""

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
    """Middleware inside of Inflate that answers 503 when the memory for bodies is full. Uploaded files are not counted,
    because they are not held in memory."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self.app = app
        self._limits = limits
        bounds = limits.bounds
        self._memory = BodyMemory(max(bounds.body_memory_bytes, bounds.max_body_bytes))

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
    return BodyTooLarge(
        f"The body is larger than the {format_bytes(max_bytes)} that this server reads. Send less, in several requests."
    )


def _too_large_file(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is larger than {format_bytes(max_bytes)}: this server has no memory to store all of it. Give it "
        "more (--memory-limit, --hot-cache-size), or export a shorter conversation."
    )


def _told_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
