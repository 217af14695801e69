"""CORS middleware: allows browsers to use this server from pages of the origins in --allowed-origins, or from all pages
(*).

It is outside of all middleware that refuses requests, so that a page can read errors too, and answers preflights
itself, because those have no key. Credentials such as cookies are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.server.errors import error_response
from kvstrata.server.hosts import ANY, allows, header_values, wrong_origin
from kvstrata.server.journal.watch import REQUEST_ID

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = ", ".join((
    REQUEST_ID.decode(), "x-kvstrata-cached-tokens", "x-kvstrata-miss", "x-kvstrata-max-tokens",
    "x-kvstrata-schema-ignored", "x-kvstrata-tokens", "retry-after",
))  # fmt: skip
ASKED_METHOD = b"access-control-request-method"
ASKED_HEADERS = b"access-control-request-headers"
ASKED_PRIVATE = b"access-control-request-private-network"
HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{0,4096}")
MAX_AGE_S = 600


class Cors:
    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self.app = app
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = header_values(scope, b"origin") if scope["type"] == "http" else []
        if not origins:
            return await self.app(scope, receive, send)
        is_allowed = len(origins) == 1 and allows(self.origins, origins[0])
        if scope["method"] == "OPTIONS" and header_values(scope, ASKED_METHOD):
            if not is_allowed:
                return await error_response(wrong_origin(origins[0]))(scope, receive, send)
            return await self._preflight(scope, origins[0])(scope, receive, send)
        return await self.app(scope, receive, self._telling(origins[0], send) if is_allowed else send)

    def _preflight(self, scope: Scope, origin: str) -> Response:
        asked = ", ".join(header_values(scope, ASKED_HEADERS))
        headers = {**self._allowed(origin), "access-control-allow-methods": METHODS}
        if asked and HEADER_NAMES.fullmatch(asked):
            # All headers are allowed: a header can do no more than the body, and clients send many of their own.
            headers["access-control-allow-headers"] = asked
        if header_values(scope, ASKED_PRIVATE):
            headers["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers={**headers, "access-control-max-age": str(MAX_AGE_S)})

    def _telling(self, origin: str, send: Send) -> Callable[[Message], Awaitable[None]]:
        told = {**self._allowed(origin), "access-control-expose-headers": EXPOSED}
        added = [(name.encode(), value.encode("latin-1")) for name, value in told.items()]

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        return telling

    def _allowed(self, origin: str) -> dict[str, str]:
        if ANY in self.origins:
            return {"access-control-allow-origin": ANY}
        return {"access-control-allow-origin": origin, "vary": "origin"}
