"""Error responses: in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, or in that of the path's API.

Sets status codes and headers. The errors themselves are defined in kvstrata.errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvstrata.errors import InvalidRequest, ReplyFailed, RequestError, RequestTimeout, Unauthorized, UnsupportedCoding

logger = logging.getLogger("kvstrata.server")

SCOPE_TRACE = "kvstrata.trace"  # a request's trace in its scope (request_log.py)
CLIENT_GONE = 499  # as in nginx's log
UNEXPECTED = "Something went wrong inside the server; its log has the details. Please report it with the request."
DESCRIPTIONS: Mapping[int, str] = {
    400: "The request cannot be served as it is; `param` names the field",
    401: "No key, or a wrong one",
    403: "A server without keys was called by a name that is not its own, or from another site's page; or a key would "
    "pin more than its quota",
    404: "No such model, or no such session",
    408: "The body did not arrive in time",
    413: "The body is larger than the server reads",
    415: "The body is compressed in a way that the server does not read; see Accept-Encoding",
    429: "The queue is full; see Retry-After",
    503: "The server is draining, or holds as many bodies as it may; see Retry-After",
}


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponseBody(BaseModel):
    error: ErrorBody


# Writes an error in an API's format. The app's state has one for each API, by the start of its paths.
ErrorBodyFn = Callable[[RequestError], dict[str, Any]]


def openai_error(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def _error_body_in(scope: Scope) -> ErrorBodyFn:
    path, app = scope["path"], scope.get("app")
    bodies: Mapping[str, ErrorBodyFn] = getattr(app.state, "error_bodies", {}) if app else {}
    matching = (body for start, body in bodies.items() if path == start or path.startswith(f"{start}/"))
    return next(matching, openai_error)


class ErrorResponse(JSONResponse):
    """An error response in the format of the requested path's API."""

    def __init__(
        self, error: RequestError, status: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(openai_error(error), status or error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (trace := scope.get(SCOPE_TRACE)) is not None:
            trace.record_error(self._error)
        self.body = self.render(_error_body_in(scope)(self._error))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: RequestError) -> ErrorResponse:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RequestTimeout):
        headers["Connection"] = "close"  # the rest of the request may still arrive
    if isinstance(error, UnsupportedCoding):
        headers["Accept-Encoding"] = "gzip"
    return ErrorResponse(error, headers=headers)


def raw_error(error: RequestError) -> bytes:
    """Return a complete HTTP response, for a request that never reaches the app."""
    response = error_response(error)
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers if name != b"connection"]
    return b"\r\n".join([*lines, b"connection: close", b"", b""]) + bytes(response.body)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the error responses for the OpenAPI document."""
    return {
        status: {"model": ErrorResponseBody, "description": DESCRIPTIONS[status]} for status in documented(statuses)
    }


def documented(statuses: Collection[int]) -> list[int]:
    """Return the statuses to document: any path may answer 403 (access.py), and a path with a body limit may answer
    415."""
    return sorted({403, *statuses, *([415] if 413 in statuses else [])})


def install_handlers(app: FastAPI, error_bodies: Mapping[str, ErrorBodyFn]) -> None:
    """Answer errors in the format of the path's API. `error_bodies`: by the start of paths."""
    app.state.error_bodies = dict(sorted(error_bodies.items(), key=lambda item: -len(item[0])))
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_request_error(_request: Request, error: Exception) -> ErrorResponse:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> ErrorResponse:
    """Handle an HTTPException of Starlette: an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}. GET /openapi.json lists what there is."
    error_of_path = InvalidRequest(message, code="not_found" if error.status_code == 404 else None)
    return ErrorResponse(error_of_path, error.status_code, error.headers)


async def _on_disconnect(_request: Request, _error: Exception) -> ErrorResponse:
    return ErrorResponse(ReplyFailed("The client went away."), CLIENT_GONE)


async def _on_unexpected(request: Request, error: Exception) -> ErrorResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ErrorResponse(ReplyFailed(UNEXPECTED, code="internal_error"))
