"""/cache/sessions: sessions, and how much of each conversation is cached.

The engine's thread counts cached tokens in slices (`prefix_cache/conversation_list.py`), and the list is streamed slice
by slice: no engine step and no other request waits for a long list.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from typing_extensions import TypedDict

from kvstrata.engine.cache_api import CachedConversation, SessionCounts
from kvstrata.errors import InvalidRequest
from kvstrata.server.cache.endpoints import EXPLAIN_S, ask_cache, find_session, require_engine, whose
from kvstrata.server.cache.schema import DivergenceResponse, Under, divergence_response
from kvstrata.server.chat.writer import json_bytes
from kvstrata.server.http.access import owner_of_scope
from kvstrata.server.http.errors import error_responses
from kvstrata.server.sessions import RecognisedBy, Session
from kvstrata.server.state import ServerState, state_of

router = APIRouter(prefix="/cache/sessions", tags=["Cache"])

# Engine time per slice.
SLICE_S = 0.0003
# Pause between slices, so that an engine step is delayed by at most one slice and by no encoding of the list.
PAUSE_S = 0.005
# Sessions prepared per batch, on the event loop.
READY_AT_ONCE = 128
DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000


class SessionTokensResponse(TypedDict):
    """Tokens in memory by precision."""

    k: dict[str, int]
    v: dict[str, int]


class SessionResponse(TypedDict):
    """A session. `tokens`: length of its longest remembered conversation, prompt and reply; `held`: how many of those
    each tier has cached. `key` identifies the session when other keys have one with the same id."""

    id: str
    key: str
    recognised_by: RecognisedBy
    created: float
    last_use: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    tokens: int
    held: dict[str, int]
    precision: SessionTokensResponse
    pinned: bool
    divergence: DivergenceResponse | None


class SessionList(TypedDict):
    """A page of sessions. `total`: number of sessions of the caller's key; `next_before`: value of `before` for the
    next page, or null at the end."""

    under: Under
    total: int
    next_before: float | None
    sessions: list[SessionResponse]


def _parameter(name: str, kind: str, what: str, **bounds: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": what, "schema": {"type": kind, **bounds}}


PARAMETERS = [
    _parameter("limit", "integer", "How many", default=DEFAULT_LIMIT, minimum=1, maximum=MAX_LIMIT),
    _parameter("before", "number", "Only sessions whose last_use is earlier than this"),
]


@router.get(
    "",
    summary="Requests that belong together, the last used first",
    responses={200: {"model": SessionList}, **error_responses(400, 401, 503)},
    openapi_extra={"parameters": PARAMETERS},
    response_model=None,
)
async def list_sessions(request: Request) -> StreamingResponse:
    state, owner = state_of(request), owner_of_scope(request.scope)
    limit, before_s = _limit(request.query_params.get("limit")), _before(request.query_params.get("before"))
    require_engine(state)  # a streamed list cannot report a stopped engine later
    found = await to_thread.run_sync(state.sessions.newest_sessions, owner, limit + 1, before_s)
    shown = found[:limit]
    head = {
        "under": whose(owner),
        "total": state.sessions.num_sessions(owner),
        "next_before": shown[-1].last_use_s if len(found) > limit else None,
    }
    return StreamingResponse(_written(state, head, shown), media_type="application/json")


@router.get("/{session_id}", summary="One session", responses=error_responses(400, 401, 404, 503))
async def get_session(request: Request, session_id: str) -> SessionResponse:
    state = state_of(request)
    session = find_session(state, session_id, owner_of_scope(request.scope))
    found = [answer async for counted in _counted(state, [session]) for answer in counted]
    return found[0]


async def _written(state: ServerState, head: dict[str, Any], sessions: Sequence[Session]) -> AsyncIterator[bytes]:
    yield json_bytes(head)[:-1] + b',"sessions":['
    separator = b""
    for start in range(0, len(sessions), READY_AT_ONCE):
        async for counted in _counted(state, sessions[start : start + READY_AT_ONCE]):
            if counted:
                yield separator + json_bytes(counted)[1:-1]
                separator = b","
    yield b"]}"


async def _counted(state: ServerState, sessions: Sequence[Session]) -> AsyncIterator[list[SessionResponse]]:
    """Yield the session responses slice by slice, leaving the interpreter to others while the engine or the disk
    works."""
    counts = SessionCounts([(session.salt, session.key) for session in sessions])
    num_done = 0
    while num_done < len(sessions):
        counted = await ask_cache(state, lambda cache: cache.count_sessions(counts, SLICE_S))
        lookup = counted.on_disk
        if not lookup.is_done:
            await to_thread.run_sync(lookup.wait, EXPLAIN_S)
        next_ones = sessions[num_done : num_done + len(counted.conversations)]
        on_disk = lookup.answer or (None,) * len(next_ones)
        yield [_answer(*each) for each in zip(next_ones, counted.conversations, on_disk, strict=True)]
        num_done += len(next_ones)
        if num_done < len(sessions):
            await asyncio.sleep(PAUSE_S)


def _answer(session: Session, holding: CachedConversation, disk_tokens: int | None) -> SessionResponse:
    return {
        "id": session.id,
        "key": session.key,
        "recognised_by": session.recognised_by,
        "created": session.created_s,
        "last_use": session.last_use_s,
        "requests": session.num_requests,
        "prompt_tokens": session.prompt_tokens,
        "cached_tokens": session.cached_tokens,
        "hit_rate": session.hit_rate,
        "tokens": holding.num_ids,
        "held": {"hot": holding.tokens, **({} if disk_tokens is None else {"disk": disk_tokens})},
        "precision": {"k": dict(holding.k), "v": dict(holding.v)},
        "pinned": holding.is_pinned,
        "divergence": divergence_response(session.divergence),
    }


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit: a number from 1 to {MAX_LIMIT}.", param="limit")
    return int(text)


def _before(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidRequest("before: seconds since the epoch, such as an answer's next_before.", param="before")
    return seconds
