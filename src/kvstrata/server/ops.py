"""Routes for operators: /health, /metrics and /props."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from typing_extensions import TypedDict

from kvstrata import __version__
from kvstrata.errors import Unavailable
from kvstrata.metrics import CONTENT_TYPE
from kvstrata.server.auth import owner_in
from kvstrata.server.cache import ask_cache
from kvstrata.server.cache_words import HeldAnswer, TargetAnswer, held_answer, target_answer, usage_answer
from kvstrata.server.conversation.job import default_sampling
from kvstrata.server.errors import answers
from kvstrata.server.service import Service, service_of

router = APIRouter(tags=["Operation"])


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
    service.metrics.sessions.set(len(service.sessions))
    # A scrape is answered even if the engine has stopped: monitoring is needed most then.
    with contextlib.suppress(Unavailable):
        # Sums over all keys, for every caller: they show amounts, not content.
        held = await ask_cache(service, lambda cache: cache.usage())
        tiers = usage_answer(held, under="all", pin_quota_bytes=None)["tiers"]
        service.metrics.set_cache(tiers, held.counters, hot_budget_bytes=held.hot_budget_bytes)
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/props", summary="What is served, how, and why so", responses=answers(401, 503))
async def props(request: Request) -> dict[str, Any]:
    service = service_of(request)
    owner = owner_in(request.scope)
    usage = await ask_cache(service, lambda cache: cache.usage(owner))
    return properties(service, target_answer(usage), held_answer(usage))


def properties(service: Service, target: TargetAnswer, held: HeldAnswer) -> dict[str, Any]:
    loaded = service.loaded
    engine = service.engine.props()
    return {
        "version": __version__,
        "model": {
            "name": service.name,
            "names": sorted(service.names),
            "identity": loaded.fingerprint,
            "dtype": loaded.dtype,
            "weight_bytes": loaded.weight_bytes,
            "weights": loaded.weights or "as in the files",
            "vocab_size": loaded.vocab_size,
            "context_tokens": service.context_tokens,
            "chat_template": service.template.exists,
            "tools": service.form.calls,
            "thinking": service.form.thinks,
        },
        "sampling": _sampling(service),
        "kv_events": _events(service),
        **engine,
        "kv": {**engine["kv"], **target, "target": target, "held": held},
        "state": dataclasses.asdict(service.engine.state()),
        "draining": service.door.closed,
    }


def _events(service: Service) -> dict[str, Any] | None:
    """Return the addresses at which routers receive KV events, or None."""
    publisher = service.publisher
    if publisher is None:
        return None
    return {
        "publish": publisher.publish_url,
        "replay": publisher.replay_url,
        "topic": publisher.topic,
        "block_tokens": publisher.block_tokens,
    }


def _sampling(service: Service) -> dict[str, Any]:
    """Return the default sampling settings, and which of them come from the model's generation_config.json."""
    used = default_sampling(service)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {**{name: getattr(used, name) for name in names}, "from_model": sorted(service.sampling.given())}
