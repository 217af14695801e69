"""Middleware for HEAD requests: runs the GET handler and drops the body. Health checks, proxies and browsers send
HEAD."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.server import dashboard

# Paths that are cheap to answer; others have no HEAD, because the computed body would be discarded.
PATHS = dashboard.OPEN_PATHS | {"/health", "/v1/models", "/metrics", "/openapi.json"}


class Head:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        return await self.app({**scope, "method": "GET"}, receive, without_body)
