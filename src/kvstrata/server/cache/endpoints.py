"""/cache: usage, explanation of cache misses, precision changes, clearing and pinning.

Handles HTTP and the salts of callers; the engine side is engine/cache_api.py. A plain key sees, changes, pins and
clears only entries under its own salts; an admin key, or any caller of a server without keys, all entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.types import Scope

from kvstrata.engine.cache_api import (
    CacheApi,
    CacheUsage,
    Codec,
    Explanation,
    PrecisionChange,
    TokenIds,
    as_ids,
    parse_precision,
)
from kvstrata.errors import ConfigError, InvalidRequest, SessionNotFound, Unavailable
from kvstrata.server.api import PromptParser
from kvstrata.server.cache.schema import (
    ClearRequest,
    ClearResponse,
    ExplainResponse,
    PinResponse,
    ProgressResponse,
    PromptQuery,
    RequantizeRequest,
    RequantizeResponse,
    Under,
    UsageResponse,
    explain_response,
    held_response,
    progress_response,
    requantize_response,
    session_found,
    usage_response,
)
from kvstrata.server.chat.generation import build_chat_generation, build_text_generation
from kvstrata.server.chat.prompt import RenderedPrompt
from kvstrata.server.chat.request import ChatRequest, TextRequest
from kvstrata.server.http.access import owner_of_scope, salt_of
from kvstrata.server.http.body_limit import MIN_VALUES
from kvstrata.server.http.errors import error_responses
from kvstrata.server.http.json_body import document_body, parse_json, read_aside, validated
from kvstrata.server.openai.request import parse_chat, parse_completion
from kvstrata.server.openai.schema import ChatCompletionRequest, CompletionRequest
from kvstrata.server.sessions import Session, SessionDivergence, SessionVisit
from kvstrata.server.state import ServerState, forget_texts, state_of
from kvstrata.sizes import Size
from kvstrata.text.tokenizer import ids_text

T = TypeVar("T")

RequestT = TypeVar("RequestT", bound=BaseModel)

router = APIRouter(prefix="/cache", tags=["Cache"])


# Tokens of context on each side of the point where the match ends.
AROUND_TOKENS = 12
# Timeout of a lookup on the disk or the shared tier.
EXPLAIN_S = 5.0
# Timeout of the disk for what makes a removal durable.
DURABLE_S = 10.0


@dataclass(frozen=True)
class QueriedPrompt:
    tokens: tuple[int, ...]
    ids: TokenIds  # the same as an array for the engine's thread: converting a long prompt takes a while
    salt: str
    key_salt: str  # the salt of the caller's key, without cache_salt
    made: RenderedPrompt | None = None  # of a chat
    session: Session | None = None  # the session of the prompt
    visit: SessionVisit | None = None  # None: the prompt was taken from the session itself


@router.get("/usage", summary="Memory that the cache uses, by tier and precision", responses=error_responses(401, 503))
async def usage(request: Request) -> UsageResponse:
    state, owner = state_of(request), owner_of_scope(request.scope)
    held = await ask_cache(state, lambda cache: cache.usage(owner))
    return usage_response(held, under=whose(owner), pin_quota_bytes=_quota_bytes(held, owner, state.pin_quota))


@router.post(
    "/requantize",
    summary="Change the precision of what is cached",
    responses=error_responses(400, 401, 413, 503),
    openapi_extra=document_body(RequantizeRequest),
)
async def requantize(request: Request) -> RequantizeResponse:
    asked = await _read(request, RequantizeRequest)
    change = _change(asked, request.scope)

    begun = await ask_cache(state_of(request), lambda cache: cache.begin_requantize(change))
    done = await _result_of(begun)
    return requantize_response(done.result, held_response(done.usage), under=whose(change.owner))


@router.get("/requantize", summary="Progress of the last change of precision", responses=error_responses(400, 401, 503))
async def requantize_progress(request: Request) -> ProgressResponse:
    owner = owner_of_scope(request.scope)
    return progress_response(await ask_cache(state_of(request), lambda cache: cache.requantize_progress(owner)))


@router.delete(
    "/requantize",
    summary="Cancel the change of precision; changed spans stay",
    responses=error_responses(400, 401, 503),
)
async def cancel_requantize(request: Request) -> ProgressResponse:
    owner = owner_of_scope(request.scope)
    return progress_response(await ask_cache(state_of(request), lambda cache: cache.cancel_requantize(owner)))


@router.post(
    "/explain",
    summary="How much of a prompt is cached, and why not more",
    responses=error_responses(400, 401, 404, 413, 503),
    openapi_extra=document_body(PromptQuery),
)
async def explain(request: Request) -> ExplainResponse:
    state = state_of(request)
    prompt = await _prompt(request)
    explained, divergence = await _explain(state, prompt), await _divergence(state, prompt)
    at = explained.at_token
    return explain_response(
        explained,
        before=_text(state, prompt.tokens[max(0, at - AROUND_TOKENS) : at]),
        after=_text(state, prompt.tokens[at : at + AROUND_TOKENS]),
        instead=[_text(state, run) for run in explained.instead],
        made=prompt.made,
        session=session_found(prompt.session, divergence),
    )


@router.post(
    "/clear",
    summary="Clear the cache, or one tier or salt of it",
    responses=error_responses(400, 401, 413, 503),
    openapi_extra=document_body(ClearRequest),
)
async def clear(request: Request) -> ClearResponse:
    asked = await _read(request, ClearRequest)
    if asked.tier is None and asked.salt is None:
        message = "Say what to clear: a tier, 'hot' (memory), 'disk' or 'all', or a salt. Nothing was removed."
        raise InvalidRequest(message, param="tier")
    tier = asked.tier or "all"
    owner = owner_of_scope(request.scope)
    salt = None if asked.salt is None else salt_of(request.scope, asked.salt)

    state = state_of(request)
    left = await ask_cache(state, lambda cache: cache.clear(salt, tier, owner=owner))
    await forget_texts(state, salt, owner, tier)
    await wait_for_removals(state)
    cleared = left.cleared
    return {"tier": tier, "bytes": cleared.nbytes, "tokens": cleared.tokens, "bytes_left": left.left_bytes}


@router.post(
    "/pin",
    summary="Pin the cached KV of a prompt: it is not evicted",
    responses=error_responses(400, 401, 404, 413, 503),
    openapi_extra=document_body(PromptQuery),
)
async def pin(request: Request) -> PinResponse:
    state, owner = state_of(request), owner_of_scope(request.scope)
    prompt = await _prompt(request)

    quota = None if owner is None else state.pin_quota.of
    num_tokens = await ask_cache(state, lambda cache: cache.pin(prompt.ids, prompt.salt, quota))
    return {"prompt_tokens": len(prompt.tokens), "tokens": num_tokens}


@router.post(
    "/unpin",
    summary="Unpin the cached KV of a prompt",
    responses=error_responses(400, 401, 404, 413, 503),
    openapi_extra=document_body(PromptQuery),
)
async def unpin(request: Request) -> PinResponse:
    prompt = await _prompt(request)
    num_tokens = await ask_cache(state_of(request), lambda cache: cache.unpin(prompt.ids, prompt.salt))
    return {"prompt_tokens": len(prompt.tokens), "tokens": num_tokens}


def require_engine(state: ServerState) -> None:
    if not state.engine.alive:
        raise Unavailable("The engine has stopped. Restart the server; its log says why.")


async def ask_cache(state: ServerState, question: Callable[[CacheApi], T]) -> T:
    """Run `question` on the engine's thread and return its result."""
    require_engine(state)
    return await _result_of(state.engine.ask_cache(question))


async def wait_for_removals(state: ServerState) -> None:
    """Wait until a removal survives a crash: a client that got the answer must not see the blocks again."""
    wait = await ask_cache(state, lambda cache: cache.wait_for_removals)
    if not await to_thread.run_sync(wait, DURABLE_S):
        raise Unavailable(
            f"It was removed, but the disk did not confirm it within {DURABLE_S:.0f} s: after a crash it may come "
            "back. Send the request again."
        )


async def _result_of(answer: Future[T]) -> T:
    try:
        return await asyncio.wrap_future(answer)
    except ConfigError as error:
        # The layers of this model do not support the requested precision.
        raise InvalidRequest(str(error)) from None


async def _explain(state: ServerState, prompt: QueriedPrompt) -> Explanation:
    explained = await _explain_under(state, prompt.ids, prompt.salt)
    if explained.ends_because in ("complete", "foreign") or prompt.salt == prompt.key_salt:
        return explained
    unsalted = await _explain_under(state, prompt.ids, prompt.key_salt)
    if unsalted.cached_tokens <= explained.cached_tokens:
        return explained
    return replace(explained, ends_because="salt", at_token=explained.cached_tokens, instead=(), num_instead=0)


async def _explain_under(state: ServerState, ids: TokenIds, salt: str) -> Explanation:
    """Explain a lookup under one salt. Lower tiers are queried on their own threads, each for at most EXPLAIN_S, so no
    engine step waits for them."""
    lookup = await ask_cache(state, lambda cache: cache.look_up_on_disk(ids, salt))
    shared = await ask_cache(state, lambda cache: cache.look_up_in_shared(ids, salt))
    await to_thread.run_sync(lookup.wait, EXPLAIN_S)
    await to_thread.run_sync(shared.wait, EXPLAIN_S)
    return await ask_cache(state, lambda cache: cache.explain(ids, salt, lookup.answer, shared.answer))


async def _divergence(state: ServerState, prompt: QueriedPrompt) -> SessionDivergence | None:
    visit = prompt.visit
    if visit is None:
        return None
    key, digest = visit.key, visit.name.digest
    return visit.describe_divergence(
        await ask_cache(state, lambda cache: cache.divergence(prompt.salt, key, digest, prompt.ids))
    )


def _quota_bytes(held: CacheUsage, owner: str | None, pin_quota: Size) -> int | None:
    """Return how many bytes an owner may pin, or None without a limit."""
    return None if owner is None or not held.can_share else pin_quota.of(held.hot_budget_bytes)


def whose(owner: str | None) -> Under:
    return "all" if owner is None else "key"


# Run on the event loop; bodies are read on worker threads.


async def _read(request: Request, schema: type[RequestT]) -> RequestT:
    return await read_aside(request, lambda _state, body, _scope: parse_json(schema, body))


async def _prompt(request: Request) -> QueriedPrompt:
    return await read_aside(request, _read_prompt)


def _read_prompt(state: ServerState, body: bytes, scope: Scope) -> QueriedPrompt:
    """Return the tokens that /v1 would compute for the same prompt, made by the same code."""
    asked = parse_json(PromptQuery, body, state.limits.max_items)
    if asked.session is not None and asked.messages is None and asked.prompt is None and asked.tokens is None:
        return _session_prompt(state, asked.session, owner_of_scope(scope))
    parsed = parse_query(asked, asked.model or state.name, state.limits.max_items)
    if isinstance(parsed, ChatRequest):
        generation = build_chat_generation(state, parsed, scope, "query")
    else:
        generation = build_text_generation(state, parsed, scope, "query")
    visit, request = generation.visits[0], generation.requests[0]
    ids = as_ids(request.prompt) if request.prompt_ids is None else request.prompt_ids
    return QueriedPrompt(request.prompt, ids, visit.salt, salt_of(scope, None), generation.prompt, visit.session, visit)


def parse_query(asked: PromptQuery, model: str, max_items: int = MIN_VALUES) -> ChatRequest | TextRequest:
    """Return the prompt of a query, read as a request to /v1 with the same fields."""
    given = [name for name in ("messages", "prompt", "tokens", "session") if getattr(asked, name) is not None]
    if len(given) != 1:
        sent = f"{' and '.join(given)} came together" if given else "there is none of them"
        raise InvalidRequest(
            f"The prompt must be one of messages, prompt, tokens and session; {sent}.",
            param=given[-1] if given else None,
        )
    request = {**asked.model_dump(exclude_none=True, exclude={"tokens", "session"}), "model": model}
    if asked.messages is not None:
        return parse_chat(validated(ChatCompletionRequest, request, max_items))
    ids = asked.tokens if asked.prompt is None else asked.prompt
    return parse_completion(validated(CompletionRequest, {**request, "prompt": ids}, max_items))


def _session_prompt(state: ServerState, id: str, owner: str | None) -> QueriedPrompt:
    """Return the prompt of a session's longest conversation. Runs on a worker thread and waits for the engine."""
    session = find_session(state, id, owner)
    longest = state.engine.ask_cache(lambda cache: cache.longest_conversation(session.salt, session.key)).result()
    if longest is None:
        raise SessionNotFound(
            f"What was sent in session '{session.id}' is not remembered any more. Send the prompt itself.",
            param="session",
        )
    return QueriedPrompt(tuple(longest.ids.tolist()), longest.ids, session.salt, session.owner, session=session)


def find_session(state: ServerState, id: str, owner: str | None) -> Session:
    found = state.sessions.find_session(id, owner)
    if found is None:
        raise SessionNotFound(
            f"No session '{id[:80]}' is known. GET /cache/sessions lists those that are, for their own key.",
            param="session",
        )
    return found


def _change(asked: RequantizeRequest, scope: Scope) -> PrecisionChange:
    k, v = _precision(asked, "k", "ctk"), _precision(asked, "v", "ctv")
    if k is None and v is None:
        raise InvalidRequest("Say what to change: k, v or both, e.g. planes:4.", param="k")
    return PrecisionChange(
        k=k,
        v=v,
        scope=asked.scope,
        salt=None if asked.salt is None else salt_of(scope, asked.salt),
        owner=owner_of_scope(scope),
        sequence=asked.sequence,
        dry_run=asked.dry_run,
        force=asked.force,
    )


def _precision(asked: RequantizeRequest, name: str, llama_name: str) -> Codec | None:
    """Return the codec given under either name, kvstrata's or llama.cpp's. Raises InvalidRequest for an unknown
    precision."""
    words = {word: value for word in (name, llama_name) if (value := getattr(asked, word)) is not None}
    try:
        codecs = {word: parse_precision(value) for word, value in words.items()}
    except ConfigError as error:
        raise InvalidRequest(str(error)[:500], param=next(iter(words))) from None
    if len(set(codecs.values())) > 1:
        raise InvalidRequest(f"{name} and {llama_name} ask for different precisions. Send one.", param=llama_name)
    return next(iter(codecs.values()), None)


def _text(state: ServerState, tokens: tuple[int, ...]) -> str:
    return ids_text(state.loaded.tokenizer, tokens)


def _parse_prompt(body: bytes) -> ChatRequest | TextRequest:
    asked = parse_json(PromptQuery, body)
    return parse_query(asked, asked.model or "")


PARSERS: Mapping[str, PromptParser] = {f"/cache/{name}": _parse_prompt for name in ("explain", "pin", "unpin")}
