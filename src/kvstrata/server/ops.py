"""What operators look at: /health, /metrics, /props, and a page that says where to go."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from typing_extensions import TypedDict

from kvstrata import __version__
from kvstrata.errors import Unavailable
from kvstrata.metrics import CONTENT_TYPE
from kvstrata.server.errors import answers
from kvstrata.server.service import Service, service_of

router = APIRouter(tags=["Operation"])

PAGE = """<!doctype html><meta charset="utf-8"><title>kvstrata</title>
<h1>kvstrata</h1><p>This is a local LLM server. Point an OpenAI client at <code>/v1</code>.</p>
<ul><li><a href="/v1/models">models</a><li><a href="/props">properties</a><li><a href="/metrics">metrics</a>
<li><a href="/health">health</a><li><a href="/docs">the whole interface</a></ul>
"""


class Health(TypedDict):
    status: Literal["ok"]


@router.get("/health", summary="Whether requests are taken", responses=answers(503))
async def health(request: Request) -> Health:
    if service_of(request).door.closed:
        raise Unavailable("The server is shutting down.")
    if not service_of(request).engine.alive:
        raise Unavailable("The engine has stopped. Restart the server; its log says why.")
    return {"status": "ok"}


METRICS_DOC: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get(
    "/metrics", summary="For Prometheus", response_class=Response, responses={**METRICS_DOC, **answers(401)}
)  # fmt: skip
async def metrics(request: Request) -> Response:
    service = service_of(request)
    state = service.engine.state()
    service.metrics.set_load(
        running=state.running,
        waiting=state.waiting,
        kv_bytes=state.kv_bytes,
        kv_budget_bytes=state.kv_budget_bytes,
        active_bytes=state.active_bytes,
        peak_bytes=state.peak_bytes,
    )
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/props", summary="What is served, how, and why so", responses=answers(401))
async def props(request: Request) -> dict[str, Any]:
    return properties(service_of(request))


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def index() -> HTMLResponse:
    return HTMLResponse(PAGE)


def properties(service: Service) -> dict[str, Any]:
    loaded = service.loaded
    return {
        "version": __version__,
        "model": {
            "name": service.name,
            "names": sorted(service.names),
            "identity": loaded.fingerprint,
            "dtype": loaded.dtype,
            "weight_bytes": loaded.weight_bytes,
            "vocab_size": loaded.vocab_size,
            "context_tokens": service.context_tokens,
            "chat_template": service.template.exists,
            "tools": service.template.has_tools,
        },
        **service.engine.props(),
        "state": dataclasses.asdict(service.engine.state()),
        "draining": service.door.closed,
    }
