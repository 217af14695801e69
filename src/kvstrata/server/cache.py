"""/cache: usage, explanation of cache misses, precision changes, clearing and pinning.

Handles HTTP and the salts of callers; the engine side is engine/cache_api.py. A plain key sees, changes, pins and
clears only entries under its own salts; an admin key, or any caller of a server without keys, all entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from kvstrata.server.auth import owner_in, salt_of
from kvstrata.server.cache_words import (
    ClearAnswer,
    ClearAsked,
    ExplainAnswer,
    PinAnswer,
    ProgressAnswer,
    PromptAsked,
    RequantizeAnswer,
    RequantizeAsked,
    Under,
    UsageAnswer,
    explain_answer,
    held_answer,
    progress_answer,
    requantize_answer,
    session_found,
    usage_answer,
)
from kvstrata.server.conversation.body import body_of, read_aside, read_body, validated
from kvstrata.server.conversation.prompt import ChatPrompt
from kvstrata.server.errors import answers
from kvstrata.server.forgetting import forget_texts
from kvstrata.server.openai.ask import job_of_chat, job_of_completion
from kvstrata.server.openai.schema import ChatAsked, CompletionAsked
from kvstrata.server.service import Service, service_of
from kvstrata.server.sessions.registry import Visit
from kvstrata.server.sessions.session import Parted, Session
from kvstrata.sizes import Size
from kvstrata.text.tokenizer import ids_text

T = TypeVar("T")
AskedT = TypeVar("AskedT", bound=BaseModel)

router = APIRouter(prefix="/cache", tags=["Cache"])

ASKED = (PromptAsked, ClearAsked, RequantizeAsked)
# Tokens of context on each side of the point where the match ends.
AROUND_TOKENS = 12
# Timeout of a lookup on the disk or the shared tier.
EXPLAIN_S = 5.0
# Timeout of the disk for what makes a removal durable.
DURABLE_S = 10.0


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    ids: TokenIds  # the same as an array for the engine's thread: converting a long prompt takes a while
    salt: str
    key_salt: str  # the salt of the caller's key, without cache_salt
    made: ChatPrompt | None = None  # of a chat
    session: Session | None = None  # the session of the prompt
    visit: Visit | None = None  # None: the prompt was taken from the session itself


@router.get("/usage", summary="What is held, where and at which precision", responses=answers(401, 503))
async def usage(request: Request) -> UsageAnswer:
    service, owner = service_of(request), owner_in(request.scope)
    held = await ask_cache(service, lambda cache: cache.usage(owner))
    return usage_answer(held, under=whose(owner), pin_quota_bytes=_quota_bytes(held, owner, service.pin_quota))


@router.post(
    "/requantize",
    summary="Change the precision of what is cached",
    responses=answers(400, 401, 413, 503),
    openapi_extra=body_of(RequantizeAsked),
)
async def requantize(request: Request) -> RequantizeAnswer:
    asked = await _read(request, RequantizeAsked)
    change = _change(asked, request.scope)

    begun = await ask_cache(service_of(request), lambda cache: cache.begin_requantize(change))
    done = await _result_of(begun)
    return requantize_answer(done.result, held_answer(done.usage), under=whose(change.owner))


@router.get("/requantize", summary="How far the last change has come", responses=answers(400, 401, 503))
async def requantize_progress(request: Request) -> ProgressAnswer:
    owner = owner_in(request.scope)
    return progress_answer(await ask_cache(service_of(request), lambda cache: cache.requantize_progress(owner)))


@router.delete("/requantize", summary="Stop the change; what is done stays", responses=answers(400, 401, 503))
async def cancel_requantize(request: Request) -> ProgressAnswer:
    owner = owner_in(request.scope)
    return progress_answer(await ask_cache(service_of(request), lambda cache: cache.cancel_requantize(owner)))


@router.post(
    "/explain",
    summary="How much of a prompt is cached, and why not more",
    responses=answers(400, 401, 404, 413, 503),
    openapi_extra=body_of(PromptAsked),
)
async def explain(request: Request) -> ExplainAnswer:
    service = service_of(request)
    prompt = await _prompt(request)
    explained, parted = await _explain(service, prompt), await _parted(service, prompt)
    at = explained.at_token
    return explain_answer(
        explained,
        before=_text(service, prompt.tokens[max(0, at - AROUND_TOKENS) : at]),
        after=_text(service, prompt.tokens[at : at + AROUND_TOKENS]),
        instead=[_text(service, run) for run in explained.instead],
        made=prompt.made,
        session=session_found(prompt.session, parted),
    )


@router.post(
    "/clear",
    summary="Drop what is stored and not in use",
    responses=answers(400, 401, 413, 503),
    openapi_extra=body_of(ClearAsked),
)
async def clear(request: Request) -> ClearAnswer:
    asked = await _read(request, ClearAsked)
    if asked.tier is None and asked.salt is None:
        message = "Say what to clear: a tier, 'hot' (memory), 'disk' or 'all', or a salt. Nothing was removed."
        raise InvalidRequest(message, param="tier")
    tier = asked.tier or "all"
    owner = owner_in(request.scope)
    salt = None if asked.salt is None else salt_of(request.scope, asked.salt)

    service = service_of(request)
    left = await ask_cache(service, lambda cache: cache.clear(salt, tier, owner=owner))
    await forget_texts(service, salt, owner, tier)
    await wait_for_removals(service)
    cleared = left.cleared
    return {"tier": tier, "bytes": cleared.nbytes, "tokens": cleared.tokens, "bytes_left": left.left_bytes}


@router.post(
    "/pin",
    summary="Keep what is stored of a prompt, whatever else has to go",
    responses=answers(400, 401, 404, 413, 503),
    openapi_extra=body_of(PromptAsked),
)
async def pin(request: Request) -> PinAnswer:
    service, owner = service_of(request), owner_in(request.scope)
    prompt = await _prompt(request)

    quota = None if owner is None else service.pin_quota.of
    num_tokens = await ask_cache(service, lambda cache: cache.pin(prompt.ids, prompt.salt, quota))
    return {"prompt_tokens": len(prompt.tokens), "tokens": num_tokens}


@router.post(
    "/unpin",
    summary="Let it go again when room is needed",
    responses=answers(400, 401, 404, 413, 503),
    openapi_extra=body_of(PromptAsked),
)
async def unpin(request: Request) -> PinAnswer:
    prompt = await _prompt(request)
    num_tokens = await ask_cache(service_of(request), lambda cache: cache.unpin(prompt.ids, prompt.salt))
    return {"prompt_tokens": len(prompt.tokens), "tokens": num_tokens}


def require_engine(service: Service) -> None:
    if not service.engine.alive:
        raise Unavailable("The engine has stopped. Restart the server; its log says why.")


async def ask_cache(service: Service, question: Callable[[CacheApi], T]) -> T:
    """Run `question` on the engine's thread and return its result."""
    require_engine(service)
    return await _result_of(service.engine.ask_cache(question))


async def wait_for_removals(service: Service) -> None:
    """Wait until a removal survives a crash: a client that is told of it must not see the blocks again."""
    wait = await ask_cache(service, lambda cache: cache.wait_for_removals)
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


async def _explain(service: Service, prompt: Prompt) -> Explanation:
    explained = await _explain_under(service, prompt.ids, prompt.salt)
    if explained.ends_because in ("complete", "foreign") or prompt.salt == prompt.key_salt:
        return explained
    unsalted = await _explain_under(service, prompt.ids, prompt.key_salt)
    if unsalted.cached_tokens <= explained.cached_tokens:
        return explained
    return replace(explained, ends_because="salt", at_token=explained.cached_tokens, instead=(), num_instead=0)


async def _explain_under(service: Service, ids: TokenIds, salt: str) -> Explanation:
    """Explain a lookup under one salt. Lower tiers are queried on their own threads, each for at most EXPLAIN_S, so no
    engine step waits for them."""
    lookup = await ask_cache(service, lambda cache: cache.look_up_on_disk(ids, salt))
    shared = await ask_cache(service, lambda cache: cache.look_up_in_shared(ids, salt))
    await to_thread.run_sync(lookup.wait, EXPLAIN_S)
    await to_thread.run_sync(shared.wait, EXPLAIN_S)
    return await ask_cache(service, lambda cache: cache.explain(ids, salt, lookup.answer, shared.answer))


async def _parted(service: Service, prompt: Prompt) -> Parted | None:
    visit = prompt.visit
    if visit is None:
        return None
    key, digest = visit.key, visit.name.digest
    return visit.parted(await ask_cache(service, lambda cache: cache.divergence(prompt.salt, key, digest, prompt.ids)))


def _quota_bytes(held: CacheUsage, owner: str | None, pin_quota: Size) -> int | None:
    """Return how many bytes an owner may pin, or None without a limit."""
    return None if owner is None or not held.can_share else pin_quota.of(held.hot_budget_bytes)


def whose(owner: str | None) -> Under:
    return "all" if owner is None else "key"


# Run on the event loop; bodies are read on worker threads.


async def _read(request: Request, schema: type[AskedT]) -> AskedT:
    return await read_aside(request, lambda _service, body, _scope: read_body(schema, body))


async def _prompt(request: Request) -> Prompt:
    return await read_aside(request, read_prompt)


def read_prompt(service: Service, body: bytes, scope: Scope) -> Prompt:
    """Return the tokens that /v1 would compute for the same prompt, made by the same code."""
    asked = read_body(PromptAsked, body, service.max_items)
    given = [name for name in ("messages", "prompt", "tokens", "session") if getattr(asked, name) is not None]
    if len(given) != 1:
        sent = f"{' and '.join(given)} came together" if given else "there is none of them"
        raise InvalidRequest(
            f"The prompt must be one of messages, prompt, tokens and session; {sent}.",
            param=given[-1] if given else None,
        )
    if asked.session is not None:
        return _remembered(service, asked.session, owner_in(scope))
    ids = asked.tokens if asked.prompt is None else asked.prompt
    request = {
        **asked.model_dump(exclude_none=True, exclude={"tokens", "session"}),
        "model": asked.model or service.name,
    }
    if asked.messages is None:
        job = job_of_completion(
            service, validated(CompletionAsked, {**request, "prompt": ids}, service.max_items), scope
        )
    else:
        job = job_of_chat(service, validated(ChatAsked, request, service.max_items), scope)
    visit, asked_for = job.visits[0], job.requests[0]
    ids = as_ids(asked_for.prompt) if asked_for.prompt_ids is None else asked_for.prompt_ids
    return Prompt(asked_for.prompt, ids, visit.salt, salt_of(scope, None), job.prompt, visit.session, visit)


def _remembered(service: Service, id: str, owner: str | None) -> Prompt:
    """Return the prompt of a session's longest conversation. Runs on a worker thread and waits for the engine."""
    session = find_session(service, id, owner)
    longest = service.engine.ask_cache(lambda cache: cache.longest_conversation(session.salt, session.key)).result()
    if longest is None:
        raise SessionNotFound(
            f"What was sent in session '{session.id}' is not remembered any more. Send the prompt itself.",
            param="session",
        )
    return Prompt(tuple(longest.ids.tolist()), longest.ids, session.salt, session.owner, session=session)


def find_session(service: Service, id: str, owner: str | None) -> Session:
    found = service.sessions.find(id, owner)
    if found is None:
        raise SessionNotFound(
            f"No session '{id[:80]}' is known. GET /cache/sessions lists those that are, for their own key.",
            param="session",
        )
    return found


def _change(asked: RequantizeAsked, scope: Scope) -> PrecisionChange:
    k, v = _precision(asked, "k", "ctk"), _precision(asked, "v", "ctv")
    if k is None and v is None:
        raise InvalidRequest("Say what to change: k, v or both, e.g. planes:4.", param="k")
    return PrecisionChange(
        k=k,
        v=v,
        scope=asked.scope,
        salt=None if asked.salt is None else salt_of(scope, asked.salt),
        owner=owner_in(scope),
        sequence=asked.sequence,
        dry_run=asked.dry_run,
        force=asked.force,
    )


def _precision(asked: RequantizeAsked, name: str, llama_name: str) -> Codec | None:
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


def _text(service: Service, tokens: tuple[int, ...]) -> str:
    return ids_text(service.loaded.tokenizer, tokens)
