"""How large a body may be. Counts bytes as they arrive, so a client that lies about its length is stopped too."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata.config import human_bytes
from kvstrata.errors import BodyTooLarge
from kvstrata.server.errors import error_response


class LimitBody:
    """Middleware. Answers 413 before the body is read where its length is told, else as soon as it is too long."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if _told_length(scope) > self.max_bytes:
            return await error_response(self._error())(scope, receive, send)
        return await self.app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise self._error()
            return message

        return counted

    def _error(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"The body is larger than the {human_bytes(self.max_bytes)} that this server reads. Send less, or start it "
            "with a larger --max-body-bytes (KVSTRATA_MAX_BODY_BYTES)."
        )


def _told_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
