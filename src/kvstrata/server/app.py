"""The ASGI app: all routers and middleware. Middleware runs in this order: request id, CORS, key or host, body limits,
then the route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp

from kvstrata import __version__
from kvstrata.server import (
    cache,
    cache_conversations,
    cache_history,
    cache_move,
    cache_sessions,
    dashboard,
    errors,
    ops,
    tokenizing,
)
from kvstrata.server.anthropic import endpoints as anthropic
from kvstrata.server.auth import RequireKey
from kvstrata.server.cors import Cors
from kvstrata.server.head import Head
from kvstrata.server.hosts import RequireHost
from kvstrata.server.inflate import Inflate
from kvstrata.server.journal.watch import WatchRequests
from kvstrata.server.limits import BodyLimits, BoundBodyMemory, LimitBody
from kvstrata.server.openai import endpoints as openai
from kvstrata.server.responses import endpoints as responses
from kvstrata.server.service import Service

# Each implements one API: routes, request bodies and error format.
WIRES = (openai, anthropic, responses, tokenizing)


def front(service: Service) -> ASGIApp:
    """Return the app with its outermost middleware, which also sees the response that FastAPI gives to an unexpected
    exception."""
    return WatchRequests(Cors(Head(create_app(service)), service.origins), service.journal)


def behind_front(service: Service) -> ASGIApp:
    """Return the app for a replica behind a fleet's router, which handles CORS itself."""
    return WatchRequests(Head(create_app(service)), service.journal)


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="kvstrata", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for wire in WIRES:
        app.include_router(wire.router)
    app.include_router(cache.router)
    app.include_router(cache_move.router)
    app.include_router(cache_sessions.router)
    app.include_router(cache_conversations.router)
    app.include_router(cache_history.router)
    app.include_router(ops.router)
    app.include_router(dashboard.router)
    errors.install(app, {path: shape for wire in WIRES for path, shape in wire.ERROR_SHAPES.items()})
    # The middleware that is added last runs first.
    limits = BodyLimits(service.bounds, {cache_move.IMPORT_PATH: service.engine.transfer.limit_bytes})
    app.add_middleware(BoundBodyMemory, limits=limits)
    app.add_middleware(Inflate, limits=limits)
    app.add_middleware(LimitBody, limits=limits)
    if service.keys:
        app.add_middleware(RequireKey, keys=service.keys)
    else:
        app.add_middleware(RequireHost, names=service.hosts, origins=service.origins)
    _document_bodies(app, needs_key=bool(service.keys))
    return app


def _document_bodies(app: FastAPI, *, needs_key: bool) -> None:
    """Add the schemas of request bodies to the OpenAPI document: bodies are read by hand (see conversation/body.py), so
    FastAPI does not know them."""
    asked = (*(each for wire in WIRES for each in wire.ASKED), *cache.ASKED)
    _, schemas = models_json_schema(
        [(each, "validation") for each in asked], ref_template="#/components/schemas/{model}"
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
