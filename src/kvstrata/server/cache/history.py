"""/cache/history: figures, requests and events of the last hour, so that a newly opened dashboard can draw them.

Sums of slots and events cover all keys, as in /metrics: they show amounts, never content. A request is shown only to
its own key and to admin keys.
"""

from __future__ import annotations

import math
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from kvstrata.errors import InvalidRequest
from kvstrata.server.cache.endpoints import whose
from kvstrata.server.cache.schema import MEANINGS, DivergenceResponse, Under, divergence_response
from kvstrata.server.chat.writer import json_bytes
from kvstrata.server.history import CacheEvent, HistorySlot
from kvstrata.server.http.access import owner_of_scope
from kvstrata.server.http.errors import error_responses
from kvstrata.server.request_log import LoggedRequest, rounded
from kvstrata.server.state import state_of

router = APIRouter(prefix="/cache/history", tags=["Cache"])

PARAMETERS = [
    {
        "name": "since",
        "in": "query",
        "description": "Only what is newer: seconds since the epoch, such as an earlier answer's now",
        "schema": {"type": "number"},
    }
]


class HistoryTier(TypedDict):
    bytes: int
    tokens: int
    by_precision: dict[str, int]


class SlotResponse(TypedDict):
    """Figures of one slot. `time`: its start. Sampled values are null if they were unknown at its end, and in the
    current slot."""

    time: float
    requests: int
    failed: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    tokens_per_s: float | None
    running: int | None
    waiting: int | None
    budget_bytes: int | None
    running_bytes: int | None
    tiers: dict[str, HistoryTier] | None


class LoggedRequestResponse(TypedDict):
    """A finished request. `id`: its x-request-id; `session`: a key that /cache/explain and /cache/sessions accept;
    `miss`: a code for the reason of the cache miss; `meaning`: the same as a sentence."""

    id: str
    time: float
    path: str
    status: int
    error: str | None
    stream: bool
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int
    miss: str | None
    meaning: str | None
    divergence: DivergenceResponse | None
    session: str | None
    first_token_s: float | None
    tokens_per_s: float | None
    seconds: float


class CacheEventResponse(TypedDict):
    time: float
    kind: str
    name: str
    count: int
    text: str


class HistoryResponse(TypedDict):
    """The history, oldest first. `under`: the owners of `requests`; slots and events cover the whole server."""

    under: Under
    now: float
    slot_s: float
    slots: list[SlotResponse]
    requests: list[LoggedRequestResponse]
    events: list[CacheEventResponse]


@router.get(
    "",
    summary="The last hour: figures, requests and events",
    responses={200: {"model": HistoryResponse}, **error_responses(400, 401)},
    openapi_extra={"parameters": PARAMETERS},
    response_model=None,
)
async def history(request: Request) -> Response:
    request_log, owner = state_of(request).request_log, owner_of_scope(request.scope)
    since_s = _since(request.query_params.get("since"))
    seen = [
        recent for recent in request_log.requests if owner in (None, recent.owner) and recent.trace.ended_s > since_s
    ]
    answer: HistoryResponse = {
        "under": whose(owner),
        "now": request_log.history.now_s(),
        "slot_s": request_log.history.slot_s,
        "slots": [_slot(slot) for slot in request_log.history.since(since_s)],
        "requests": [_request(recent) for recent in seen],
        "events": [_event(event) for event in request_log.history.events if event.time_s > since_s],
    }
    # An hour may take half a megabyte of JSON, so it is encoded on a worker thread.
    return Response(await to_thread.run_sync(json_bytes, answer), media_type="application/json")


def _since(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidRequest("since: seconds since the epoch, such as an answer's now.", param="since")
    return seconds


def _slot(slot: HistorySlot) -> SlotResponse:
    sample, (p50_s, p95_s) = slot.sample, slot.first_token_percentiles()
    tiers: dict[str, Any] | None = None if sample is None else dict(sample.tiers)
    return {
        "time": slot.start_s,
        "requests": slot.requests,
        "failed": slot.failed,
        "cancelled": slot.cancelled,
        "prompt_tokens": slot.prompt_tokens,
        "cached_tokens": slot.cached_tokens,
        "first_token_p50_s": rounded(p50_s),
        "first_token_p95_s": rounded(p95_s),
        "tokens_per_s": rounded(slot.tokens_per_s),
        "running": None if sample is None else sample.running,
        "waiting": None if sample is None else sample.waiting,
        "budget_bytes": None if sample is None else sample.budget_bytes,
        "running_bytes": None if sample is None else sample.running_bytes,
        "tiers": tiers,
    }


def _request(recent: LoggedRequest) -> LoggedRequestResponse:
    trace = recent.trace
    generation = trace.generation
    return {
        "id": trace.id,
        "time": trace.began_s,
        "path": trace.path,
        "status": trace.status,
        "error": trace.error or None,
        "stream": generation is not None and generation.is_stream,
        "prompt_tokens": generation.prompt_tokens if generation else None,
        "cached_tokens": trace.cached_tokens,
        "completion_tokens": trace.completion_tokens,
        "miss": trace.miss or None,
        "meaning": _meaning(trace.miss),
        "divergence": divergence_response(generation.divergence) if generation else None,
        "session": (generation.session or None) if generation else None,
        "first_token_s": rounded(trace.first_token_s),
        "tokens_per_s": rounded(trace.tokens_per_s),
        "seconds": round(trace.seconds, 4),
    }


def _meaning(miss: str) -> str | None:
    """Return the explanations of a request's miss codes; a request with several prompts may have several."""
    return " ".join(MEANINGS[word] for word in miss.split(",") if word in MEANINGS) or None


def _event(event: CacheEvent) -> CacheEventResponse:
    return {
        "time": event.time_s,
        "kind": event.kind,
        "name": event.name,
        "count": event.count,
        "text": event.text,
    }
