"""Outermost middleware: gives each request an id and a trace, and adds the trace to the journal when the request has
ended.

A client that sends an x-request-id gets the same id back, so that its log and the server's agree.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.server.auth import owner_salt
from kvstrata.server.journal.journal import Journal
from kvstrata.server.journal.trace import SCOPE_TRACE, Trace

REQUEST_ID = b"x-request-id"
ANTHROPIC_ID = b"request-id"  # the header that Anthropic's clients read
SANE_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:+/=-]{0,127}")
MAX_PATH_CHARS = 200


class WatchRequests:
    def __init__(self, app: ASGIApp, journal: Journal) -> None:
        self.app = app
        self._journal = journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = _printable(scope["path"])
        trace = Trace(_id_of(scope), scope["method"], path, on_first_token=self._journal.on_first_token)
        scope[SCOPE_TRACE] = trace
        names = (REQUEST_ID, ANTHROPIC_ID) if path.startswith("/v1/messages") else (REQUEST_ID,)
        try:
            return await self.app(scope, receive, _noting(trace, send, names))
        finally:
            trace.end()
            self._journal.add(trace, owner_salt(scope))


def _noting(trace: Trace, send: Send, names: tuple[bytes, ...]) -> Callable[[Message], Awaitable[None]]:
    async def noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            trace.status = message["status"]
            headers = [*message.get("headers", ()), *((name, trace.id.encode()) for name in names)]
            message = {**message, "headers": headers}
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            trace.is_complete = True

    return noted


def _id_of(scope: Scope) -> str:
    """Return the first valid id that the client sent, or a new one. The id is used in headers and logs."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and SANE_ID.fullmatch(value):
            return value.decode()
    return f"req_{uuid.uuid4().hex[:24]}"


def _printable(path: str) -> str:
    """Return a path for the log, without line breaks and other control characters: the path is already decoded."""
    return "".join(char if char.isprintable() else "?" for char in path[:MAX_PATH_CHARS])
