"""Interface between the router and its replicas, and in-process calls of an ASGI app.

Cluster code implements the interface (`ray/`). Only plain values of a scope are sent to another process; `call_app`
builds the rest of the scope there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

# Messages buffered between the app and its reader.
AHEAD = 16


class ReplicaLost(Exception):
    """The replica has ended or cannot be reached; its unfinished responses are lost."""


class Replicas(Protocol):
    def names(self) -> tuple[str, ...]:
        """Return the names of the replicas that accept requests now."""
        ...

    def ask(self, name: str | None, request: Mapping[str, Any], body: bytes, *, only: bool) -> AsyncIterator[Message]:
        """Yield the messages of a replica's response. Raises ReplicaLost.

        `name` None means any replica. With `only` no other replica may take the place of the named one.
        """
        ...


def plain_scope(scope: Scope) -> dict[str, Any]:
    """Return the fields of a scope that a replica in another process needs."""
    return {
        "method": scope["method"],
        "path": scope["path"],
        "query_string": scope.get("query_string", b""),
        "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        "client": tuple(scope["client"]) if scope.get("client") else None,
        "scheme": scope.get("scheme", "http"),
    }


async def call_app(app: ASGIApp, request: Mapping[str, Any], body: bytes) -> AsyncIterator[Message]:
    """Yield the messages that the app sends. A reader that stops early looks to the app like a disconnected client."""
    gone, asked = asyncio.Event(), False
    messages: asyncio.Queue[Message | None] = asyncio.Queue(AHEAD)

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if gone.is_set():
            raise OSError("the client has gone")
        await messages.put(_copied(message))

    scope: Scope = {**request, "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": ""}
    scope["raw_path"] = scope["path"].encode()
    scope["server"] = None

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                messages.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while True:
            taking = asyncio.create_task(messages.get())
            await asyncio.wait([taking, running], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done() and messages.empty():
                taking.cancel()
                running.result()  # raises what the app raised
                return
            message = await taking
            if message is None:
                await running
                return
            yield message
    finally:
        gone.set()
        while not messages.empty():
            messages.get_nowait()
        await _ended(running)


async def _ended(running: asyncio.Task[None]) -> None:
    """Wait up to a second for the app to notice the disconnect and end, then cancel it."""
    await asyncio.wait([running], timeout=1.0)
    if not running.done():
        running.cancel()
        await asyncio.wait([running], timeout=5.0)
    if running.done() and not running.cancelled():
        running.exception()


def _copied(message: Message) -> Message:
    """Copy a message with plain bytes: apps may send memoryviews and mutable lists."""
    if message["type"] == "http.response.body":
        return {**message, "body": bytes(message.get("body", b""))}
    if message["type"] == "http.response.start":
        return {**message, "headers": [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]}
    return dict(message)


async def nothing() -> Message:
    """Return a disconnect: the receive channel of a request whose body has been read."""
    return {"type": "http.disconnect"}
