"""/cache/conversations: lists cached conversations, pins, unpins and drops one of them.

The engine thread takes a snapshot of memory in slices, threads of the tiers answer lookups, and a worker thread makes
the list (`prefix_cache/conversation_list.py`). The answers contain no text of a prompt.
"""

from __future__ import annotations

import asyncio
import time

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from kvstrata.engine.cache_api import (
    ConversationListing,
    ConversationPart,
    ConversationSnapshot,
    ConversationTokens,
    ListedConversation,
)
from kvstrata.errors import ConversationNotFound, InvalidRequest
from kvstrata.server.cache.endpoints import EXPLAIN_S, ask_cache, wait_for_removals, whose
from kvstrata.server.cache.schema import PinResponse, Under
from kvstrata.server.cache.sessions import PAUSE_S, SLICE_S
from kvstrata.server.chat.writer import json_bytes
from kvstrata.server.http.access import owner_of_scope
from kvstrata.server.http.errors import error_responses
from kvstrata.server.http.json_body import require_json
from kvstrata.server.state import ServerState, state_of

router = APIRouter(prefix="/cache/conversations", tags=["Cache"])

# Sessions whose conversations are listed even if memory no longer has them.
MAX_SESSIONS = 64


class ConversationPartResponse(TypedDict):
    """Tokens in one precision. `tier`: the tier that they are read from: hot (memory), disk or remote; `also`: the
    other tiers that have a copy."""

    tokens: int
    tier: str
    k: str
    v: str
    bytes: int
    also: list[str]
    pinned: bool


class ConversationResponse(TypedDict):
    """A cached conversation. `parts` begin at `starts_at`: the tokens before are shared with the conversation `above`,
    which has their parts. `tokens`: all of its tokens. `left_behind`: its session has continued on another branch, so
    it is evicted first."""

    id: str
    session: str | None
    above: str | None
    starts_at: int
    tokens: int
    parts: list[ConversationPartResponse]
    pinned: bool
    running: bool
    left_behind: bool
    last_use: float


class ConversationList(TypedDict):
    """Cached conversations: the last used comes last, below the one that it shares tokens with. `has_more`: older ones
    were left out."""

    under: Under
    has_more: bool
    conversations: list[ConversationResponse]


class DropResponse(TypedDict):
    """Tokens and bytes that were dropped, or would be. `kept_because`: the reason why nothing is dropped, pinned or
    running."""

    id: str
    dry_run: bool
    tokens: int
    bytes: int
    disk_tokens: int
    disk_bytes: int
    kept_because: str


@router.get(
    "",
    summary="Cached conversations",
    responses={200: {"model": ConversationList}, **error_responses(401, 503)},
    response_model=None,
)
async def list_conversations(request: Request) -> Response:
    state, owner = state_of(request), owner_of_scope(request.scope)
    listing = await _make_listing(state, owner)
    await _look_up_on_tiers(state, listing)
    answer = await to_thread.run_sync(_answer, state, owner, listing)
    return Response(answer, media_type="application/json")


@router.post(
    "/{id}/pin",
    summary="Pin a conversation: it is not evicted",
    responses=error_responses(400, 401, 403, 404, 503),
)
async def pin(request: Request, id: str) -> PinResponse:
    require_json(request)
    state, owner = state_of(request), owner_of_scope(request.scope)
    found = await _find(state, owner, id)
    quota = None if owner is None else state.pin_quota.of
    num_tokens = await ask_cache(state, lambda cache: cache.pin(found.ids, found.salt, quota))
    return {"prompt_tokens": len(found.ids), "tokens": num_tokens}


@router.post("/{id}/unpin", summary="Unpin a conversation", responses=error_responses(400, 401, 404, 503))
async def unpin(request: Request, id: str) -> PinResponse:
    require_json(request)
    state, owner = state_of(request), owner_of_scope(request.scope)
    found = await _find(state, owner, id)
    num_tokens = await ask_cache(state, lambda cache: cache.unpin(found.ids, found.salt))
    return {"prompt_tokens": len(found.ids), "tokens": num_tokens}


@router.delete(
    "/{id}",
    summary="Drop a conversation from memory and disk, but not what others share",
    responses=error_responses(400, 401, 404, 503),
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
async def drop(request: Request, id: str) -> DropResponse:
    state, owner = state_of(request), owner_of_scope(request.scope)
    is_dry = _dry_run(request.query_params.get("dry_run", "false"))
    found = await _find(state, owner, id)
    dropped = await ask_cache(state, lambda cache: cache.drop_conversation(found.ids, found.salt, is_dry=is_dry))
    await to_thread.run_sync(dropped.on_disk.wait, EXPLAIN_S)
    removed = dropped.on_disk.answer
    if not is_dry:
        await wait_for_removals(state)
    return {
        "id": id,
        "dry_run": is_dry,
        "tokens": dropped.tokens,
        "bytes": dropped.nbytes,
        "disk_tokens": removed.num_tokens,
        "disk_bytes": removed.disk_bytes,
        "kept_because": dropped.kept_because,
    }


async def _make_listing(state: ServerState, owner: str | None) -> ConversationListing:
    """Join a snapshot of memory with the conversations of sessions."""
    snapshot = ConversationSnapshot(owner)
    while not (await ask_cache(state, lambda cache: cache.list_conversations(snapshot, SLICE_S))).is_done:
        await asyncio.sleep(PAUSE_S)
    tracked = await ask_cache(state, lambda cache: cache.newest_conversations(owner, MAX_SESSIONS))
    return await to_thread.run_sync(ConversationListing, snapshot, tracked)


async def _find(state: ServerState, owner: str | None, id: str) -> ConversationTokens:
    listing = await _make_listing(state, owner)
    found = await to_thread.run_sync(listing.find, id)
    if found is None:
        raise ConversationNotFound(
            f"No conversation '{id[:80]}' is held. GET /cache/conversations lists those that are, for their own key. "
            "One that goes on gets another id."
        )
    return found


async def _look_up_on_tiers(state: ServerState, listing: ConversationListing) -> None:
    """Record in a listing what the disk and the shared tier have of its conversations."""
    for batch in await to_thread.run_sync(listing.disk_batches):
        prompts = [conversation.prompt() for conversation in batch]
        on_disk = await ask_cache(state, lambda cache, prompts=prompts: cache.locate_on_disk(prompts))
        await to_thread.run_sync(on_disk.wait, EXPLAIN_S)
        if not on_disk.answer:  # there is no disk, or its lookup timed out
            break
        listing.record_on_disk(batch, on_disk.answer)
    batch = await to_thread.run_sync(listing.shared_batch)
    prompts = [conversation.prompt() for conversation in batch]
    in_shared, precision = await ask_cache(state, lambda cache: cache.locate_in_shared(prompts))
    await to_thread.run_sync(in_shared.wait, EXPLAIN_S)
    listing.record_in_shared(batch, in_shared.answer, precision)


def _answer(state: ServerState, owner: str | None, listing: ConversationListing) -> bytes:
    """Format a listing. Runs in a worker thread."""
    listing.remove_unavailable()
    now_s = time.time()
    conversations = [
        _conversation_answer(state, owner, each, listing.parts_of(each), now_s) for each in listing.conversations()
    ]
    answer: ConversationList = {
        "under": whose(owner),
        "has_more": listing.has_more,
        "conversations": conversations,
    }
    return json_bytes(answer)


def _conversation_answer(
    state: ServerState,
    owner: str | None,
    conversation: ListedConversation,
    parts: list[ConversationPart],
    now_s: float,
) -> ConversationResponse:
    session = state.sessions.find_session(conversation.session, owner) if conversation.session else None
    run = conversation.last_run
    return {
        "id": conversation.id,
        "session": session.id if session else None,
        "above": conversation.parent.id if conversation.parent else None,
        "starts_at": conversation.start,
        "tokens": conversation.num_tokens,
        "parts": [_part_answer(part) for part in parts],
        "pinned": run is not None and run.is_pinned,
        "running": run is not None and run.is_running,
        "left_behind": conversation.is_superseded,
        "last_use": now_s - conversation.unused_s,
    }


def _part_answer(part: ConversationPart) -> ConversationPartResponse:
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
