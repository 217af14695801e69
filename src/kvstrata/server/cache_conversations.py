"""/cache/conversations: what is held, conversation by conversation, and what can be done with one of them.

Knows HTTP and whose conversations are whose. What memory holds is told by the engine's thread in slices, what lies on
the disk by a thread of the tier; how it is drawn is in `strata.py`. No text of a prompt is told.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from kvstrata.engine.cache_api import ConversationSnapshot, RememberedConversation, TrackedConversation
from kvstrata.errors import ConversationNotFound, InvalidRequest
from kvstrata.server.auth import owner_in
from kvstrata.server.cache import EXPLAIN_S, ask_cache, whose
from kvstrata.server.cache_sessions import PAUSE_S, SLICE_S
from kvstrata.server.cache_words import PinAnswer, Under
from kvstrata.server.conversation.body import require_json
from kvstrata.server.conversation.wire import json_bytes
from kvstrata.server.errors import answers
from kvstrata.server.service import Service, service_of
from kvstrata.server.strata import Drawing, Part, Row, note_disk, note_shared, parts_of

router = APIRouter(prefix="/cache/conversations", tags=["Cache"])

# Sessions whose conversations are looked for on other tiers.
MAX_SESSIONS = 64
# The disk is asked about, at once and in all: hashing these takes some milliseconds.
SLICE_TOKENS, MAX_TOKENS = 1 << 16, 1 << 17
# Conversations that the shared store is asked for: each is a question over the network.
MAX_SHARED = 16


class StrataPart(TypedDict):
    """Tokens in one precision. `tier`: where they are read from: hot (memory), disk or remote; `also`: the tiers that
    have a copy."""

    tokens: int
    tier: str
    k: str
    v: str
    bytes: int
    also: list[str]
    pinned: bool


class ConversationAnswer(TypedDict):
    """`parts` begin at `starts_at`: what comes before is the first so many tokens of the conversation `above`, and is
    told there. `tokens`: of all of it. `left_behind`: its session has gone on elsewhere, so it goes first."""

    id: str
    session: str | None
    above: str | None
    starts_at: int
    tokens: int
    parts: list[StrataPart]
    pinned: bool
    running: bool
    left_behind: bool
    last_use: float


class ConversationList(TypedDict):
    """What was used last comes last, below what it shares tokens with. `has_more`: older ones were left out."""

    under: Under
    has_more: bool
    conversations: list[ConversationAnswer]


class DropAnswer(TypedDict):
    """What has gone, or would go. `kept_because`: nothing, because it is pinned or running."""

    id: str
    dry_run: bool
    tokens: int
    bytes: int
    disk_tokens: int
    disk_bytes: int
    kept_because: str


@dataclass(frozen=True)
class Looked:
    drawing: Drawing
    has_more: bool


@router.get(
    "",
    summary="What is held, conversation by conversation",
    responses={200: {"model": ConversationList}, **answers(401, 503)},
    response_model=None,
)
async def list_conversations(request: Request) -> Response:
    service, owner = service_of(request), owner_in(request.scope)
    looked = await _look(service, owner)
    precision = await _ask_tiers(service, looked.drawing)
    answer = await to_thread.run_sync(_answer, service, owner, looked, precision)
    return Response(answer, media_type="application/json")


@router.post(
    "/{id}/pin",
    summary="Keep a conversation in memory, whatever else has to go",
    responses=answers(400, 401, 403, 404, 503),
)
async def pin(request: Request, id: str) -> PinAnswer:
    require_json(request)
    service, owner = service_of(request), owner_in(request.scope)
    found = await _find(service, owner, id)
    quota = None if owner is None else service.pin_quota.of
    num_tokens = await ask_cache(service, lambda cache: cache.pin(found.ids, found.salt, quota))
    return {"prompt_tokens": len(found.ids), "tokens": num_tokens}


@router.post("/{id}/unpin", summary="Let it go again when room is needed", responses=answers(400, 401, 404, 503))
async def unpin(request: Request, id: str) -> PinAnswer:
    require_json(request)
    service, owner = service_of(request), owner_in(request.scope)
    found = await _find(service, owner, id)
    num_tokens = await ask_cache(service, lambda cache: cache.unpin(found.ids, found.salt))
    return {"prompt_tokens": len(found.ids), "tokens": num_tokens}


@router.delete(
    "/{id}",
    summary="Drop what no other conversation has of it, in memory and on the disk",
    responses=answers(400, 401, 404, 503),
    openapi_extra={
        "parameters": [
            {
                "name": "dry_run",
                "in": "query",
                "description": "Only tell what would go",
                "schema": {"type": "string", "enum": ["true", "false"], "default": "false"},
            }
        ]
    },
)
async def drop(request: Request, id: str) -> DropAnswer:
    service, owner = service_of(request), owner_in(request.scope)
    is_dry = _dry_run(request.query_params.get("dry_run", "false"))
    found = await _find(service, owner, id)
    dropped = await ask_cache(service, lambda cache: cache.drop_conversation(found.ids, found.salt, is_dry=is_dry))
    await to_thread.run_sync(dropped.on_disk.wait, EXPLAIN_S)
    removed = dropped.on_disk.answer
    return {
        "id": id,
        "dry_run": is_dry,
        "tokens": dropped.tokens,
        "bytes": dropped.nbytes,
        "disk_tokens": removed.num_tokens,
        "disk_bytes": removed.disk_bytes,
        "kept_because": dropped.kept_because,
    }


async def _look(service: Service, owner: str | None) -> Looked:
    """At memory and at what is remembered of sessions."""
    strata = ConversationSnapshot(owner)
    while not (await ask_cache(service, lambda cache: cache.list_conversations(strata, SLICE_S))).is_done:
        await asyncio.sleep(PAUSE_S)
    tracked = await ask_cache(service, lambda cache: cache.newest_conversations(owner, MAX_SESSIONS))
    drawing = await to_thread.run_sync(_drawing, strata, tracked)
    return Looked(drawing, strata.has_more)


async def _find(service: Service, owner: str | None, id: str) -> RememberedConversation:
    looked = await _look(service, owner)
    found = await to_thread.run_sync(looked.drawing.find, id)
    if found is None:
        raise ConversationNotFound(
            f"No conversation '{id[:80]}' is held. GET /cache/conversations lists those that are, for their own key. "
            "One that goes on gets another id."
        )
    return found


async def _ask_tiers(service: Service, drawing: Drawing) -> str:
    """What other tiers have of what is drawn. Tells the precision that the shared one keeps."""
    rows = await to_thread.run_sync(_newest_first, drawing)
    asked = [row.conversation() for row in rows]
    at, num_left = 0, MAX_TOKENS
    while at < len(rows) and num_left > 0:
        taken = _slice(asked[at:])
        chosen = asked[at : at + taken]
        lookup = await ask_cache(service, lambda cache, chosen=chosen: cache.locate_on_disk(chosen))
        await to_thread.run_sync(lookup.wait, EXPLAIN_S)
        for row, runs in zip(rows[at:], lookup.answer, strict=False):
            note_disk(row, runs)
        if not lookup.answer:  # there is no disk, or it does not answer
            break
        num_left -= sum(len(each.ids) for each in chosen)
        at += taken
    missing = [
        (row, each)
        for row, each in zip(rows, asked, strict=True)
        if row.last.stratum is None and row.last.disk_end < row.last.end - 1
    ][:MAX_SHARED]
    lookup, precision = await ask_cache(service, lambda cache: cache.locate_in_shared([each for _, each in missing]))
    await to_thread.run_sync(lookup.wait, EXPLAIN_S)
    for (row, _), num_tokens in zip(missing, lookup.answer, strict=False):
        note_shared(row, num_tokens)
    return precision


def _slice(asked: list[RememberedConversation]) -> int:
    """How many of them the disk is asked about at once."""
    taken, num_tokens = 0, 0
    while taken < len(asked) and (not taken or num_tokens + len(asked[taken].ids) <= SLICE_TOKENS):
        num_tokens += len(asked[taken].ids)
        taken += 1
    return taken


# In a worker thread.


def _drawing(strata: ConversationSnapshot, tracked: list[TrackedConversation]) -> Drawing:
    drawing = Drawing(strata.runs)
    for each in tracked:
        drawing.add(RememberedConversation(each.salt, each.ids), each.session, each.unused_s)
    return drawing


def _newest_first(drawing: Drawing) -> list[Row]:
    return sorted(drawing.rows(), key=lambda row: row.last.unused_s)


def _answer(service: Service, owner: str | None, looked: Looked, shared_precision: str) -> bytes:
    looked.drawing.forget_what_is_nowhere()
    now_s = time.time()
    rows = [_row(service, owner, row, parts_of(row, shared_precision), now_s) for row in looked.drawing.rows()]
    answer: ConversationList = {"under": whose(owner), "has_more": looked.has_more, "conversations": rows}
    return json_bytes(answer)


def _row(service: Service, owner: str | None, row: Row, parts: list[Part], now_s: float) -> ConversationAnswer:
    last = row.last
    session = service.sessions.find(last.session, owner) if last.session else None
    strata = [piece.stratum for piece in row.pieces if piece.stratum is not None]
    return {
        "id": row.id,
        "session": session.id if session else None,
        "above": row.above.id if row.above else None,
        "starts_at": row.starts_at,
        "tokens": last.end,
        "parts": [_part(part) for part in parts],
        "pinned": bool(strata) and strata[-1].is_pinned,
        "running": bool(strata) and strata[-1].is_running,
        "left_behind": last.is_left_behind,
        "last_use": now_s - last.unused_s,
    }


def _part(part: Part) -> StrataPart:
    return {
        "tokens": part.tokens,
        "tier": part.tier,
        "k": part.k,
        "v": part.v,
        "bytes": part.nbytes,
        "also": list(part.also),
        "pinned": part.is_pinned,
    }


def _dry_run(text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequest("dry_run: true or false.", param="dry_run")
    return text == "true"
