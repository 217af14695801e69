"""The ASGI application: all routers and middleware.

Middleware runs in this order: request id, CORS, HEAD, key or host, body limits, then the route. A new API is a folder
(see api.py) and a line in `APIS`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstrata import __version__
from kvstrata.server import dashboard, status, tokenize
from kvstrata.server.anthropic import endpoints as anthropic
from kvstrata.server.api import Api
from kvstrata.server.cache import conversations, history, sessions, transfer
from kvstrata.server.cache import endpoints as cache
from kvstrata.server.cache.schema import ClearRequest, PromptQuery, RequantizeRequest
from kvstrata.server.http.access import RequireKey, RequireKnownHost
from kvstrata.server.http.body_limit import BodyLimits, BoundBodyMemory, DecompressBody, LimitBody
from kvstrata.server.http.errors import install_handlers
from kvstrata.server.openai import endpoints as openai
from kvstrata.server.request_log import REQUEST_ID, TraceRequests
from kvstrata.server.responses import endpoints as responses
from kvstrata.server.state import ServerState

CACHE = Api(
    ("/cache",),
    (cache.router, transfer.router, sessions.router, conversations.router, history.router),
    (PromptQuery, ClearRequest, RequantizeRequest),
    parsers=cache.PARSERS,
)
APIS = (openai.API, anthropic.API, responses.API, tokenize.API, CACHE)
# Paths that are cheap to answer; others have no HEAD, because the computed body would be discarded.
HEAD_PATHS = dashboard.OPEN_PATHS | {"/health", "/v1/models", "/metrics", "/openapi.json"}
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
# Headers that a web page may read.
EXPOSED_HEADERS = (
    REQUEST_ID.decode(), "x-kvstrata-cached-tokens", "x-kvstrata-miss", "x-kvstrata-max-tokens",
    "x-kvstrata-schema-ignored", "x-kvstrata-tokens", "retry-after",
)  # fmt: skip


def create_app(state: ServerState) -> FastAPI:
    """Return the application with its access checks and body limits."""
    app = FastAPI(title="kvstrata", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    for router in (*(router for api in APIS for router in api.routers), status.router, dashboard.router):
        app.include_router(router)
    install_handlers(app, {prefix: api.error_body for api in APIS for prefix in api.prefixes})
    # The middleware that is added last runs first.
    limits = BodyLimits(state.http_limits, {transfer.IMPORT_PATH: state.engine.transfer.limit_bytes})
    app.add_middleware(BoundBodyMemory, limits=limits)
    app.add_middleware(DecompressBody, limits=limits)
    app.add_middleware(LimitBody, limits=limits)
    if state.keys:
        app.add_middleware(RequireKey, keys=state.keys)
    else:
        app.add_middleware(RequireKnownHost, names=state.hosts, origins=state.origins)
    _document_bodies(app, needs_key=bool(state.keys))
    return app


def wrap_app(app: ASGIApp, state: ServerState, *, cors: bool = True) -> ASGIApp:
    """Return the application with its outermost middleware, which also sees the response that FastAPI gives to an
    unexpected exception. `cors`: False behind a fleet's router, which handles it."""
    app = AnswerHead(app)
    return TraceRequests(allow_origins(app, state.origins) if cors else app, state.request_log)


def allow_origins(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """Return an application that browsers may call from pages of these origins, or of all (*). Credentials such as
    cookies are never allowed; all headers are: a header can do no more than the body."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=CORS_METHODS,
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=EXPOSED_HEADERS,
    )


class AnswerHead:
    """Middleware for HEAD requests: runs the GET handler and drops the body. Health checks, proxies and browsers send
    HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or scope["path"] not in HEAD_PATHS:
            return await self.app(scope, receive, send)

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        return await self.app({**scope, "method": "GET"}, receive, without_body)


def _document_bodies(app: FastAPI, *, needs_key: bool) -> None:
    """Add the schemas of request bodies to the OpenAPI document: bodies are read by hand (http/json_body.py), so
    FastAPI does not know them."""
    bodies = (schema for api in APIS for schema in api.schemas)
    _, schemas = models_json_schema(
        [(each, "validation") for each in bodies], ref_template="#/components/schemas/{model}"
    )
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(schemas["$defs"])
        if needs_key:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # pyright: ignore[reportAttributeAccessIssue]
