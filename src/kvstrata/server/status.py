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
from kvstrata.server.cache.endpoints import ask_cache
from kvstrata.server.cache.schema import HeldResponse, TargetResponse, held_response, target_response, usage_response
from kvstrata.server.chat.generation import default_sampling
from kvstrata.server.http.access import owner_of_scope
from kvstrata.server.http.errors import error_responses
from kvstrata.server.state import ServerState, state_of

router = APIRouter(tags=["Operation"])


class Health(TypedDict):
    status: Literal["ok"]


@router.get("/health", summary="Health: 200 where the server accepts requests", responses=error_responses(503))
async def health(request: Request) -> Health:
    if state_of(request).drain_gate.is_closed:
        raise Unavailable("The server is shutting down.")
    if not state_of(request).engine.alive:
        raise Unavailable("The engine has stopped. Restart the server; its log says why.")
    return {"status": "ok"}


METRICS_DOC: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get(
    "/metrics", summary="For Prometheus", response_class=Response, responses={**METRICS_DOC, **error_responses(401)}
)  # fmt: skip
async def metrics(request: Request) -> Response:
    state = state_of(request)
    load = state.engine.state()
    state.metrics.set_load(
        running=load.running,
        waiting=load.waiting,
        kv_bytes=load.kv_bytes,
        kv_budget_bytes=load.kv_budget_bytes,
        active_bytes=load.active_bytes,
        peak_bytes=load.peak_bytes,
    )
    state.metrics.sessions.set(len(state.sessions))
    # A scrape is answered even if the engine has stopped: monitoring is needed most then.
    with contextlib.suppress(Unavailable):
        # Sums over all keys, for every caller: they show amounts, not content.
        held = await ask_cache(state, lambda cache: cache.usage())
        tiers = usage_response(held, under="all", pin_quota_bytes=None)["tiers"]
        state.metrics.set_cache(tiers, held.counters, hot_budget_bytes=held.hot_budget_bytes)
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


@router.get("/props", summary="The model, the engine and the settings in effect", responses=error_responses(401, 503))
async def props(request: Request) -> dict[str, Any]:
    state = state_of(request)
    owner = owner_of_scope(request.scope)
    usage = await ask_cache(state, lambda cache: cache.usage(owner))
    return properties(state, target_response(usage), held_response(usage))


def properties(state: ServerState, target: TargetResponse, held: HeldResponse) -> dict[str, Any]:
    loaded = state.loaded
    engine = state.engine.props()
    return {
        "version": __version__,
        "model": {
            "name": state.name,
            "names": sorted(state.names),
            "identity": loaded.fingerprint,
            "dtype": loaded.dtype,
            "weight_bytes": loaded.weight_bytes,
            "weights": loaded.weights or "as in the files",
            "vocab_size": loaded.vocab_size,
            "context_tokens": state.limits.context_tokens,
            "chat_template": state.template.exists,
            "tools": state.reply_format.calls,
            "thinking": state.reply_format.thinks,
        },
        "sampling": _sampling(state),
        "kv_events": _events(state),
        **engine,
        "kv": {**engine["kv"], **target, "target": target, "held": held},
        "state": dataclasses.asdict(state.engine.state()),
        "draining": state.drain_gate.is_closed,
    }


def _events(state: ServerState) -> dict[str, Any] | None:
    """Return the addresses at which routers receive KV events, or None."""
    publisher = state.publisher
    if publisher is None:
        return None
    return {
        "publish": publisher.publish_url,
        "replay": publisher.replay_url,
        "topic": publisher.topic,
        "block_tokens": publisher.block_tokens,
    }


def _sampling(state: ServerState) -> dict[str, Any]:
    """Return the default sampling settings, and which of them come from the model's generation_config.json."""
    used = default_sampling(state)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {**{name: getattr(used, name) for name in names}, "from_model": sorted(state.sampling.given())}
