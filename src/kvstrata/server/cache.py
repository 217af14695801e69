"""/cache: what is held, why a prompt is found only so far, and what to do about it.

Knows HTTP and whose salt is whose. Every answer is given by the engine's thread between two steps. A plain key sees,
changes, pins and clears what is under its own salts; an admin key, or any caller where there are no keys, everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.types import Scope

from kvstrata.codecs.registry import parse
from kvstrata.config import Size
from kvstrata.engine.loop import Loop
from kvstrata.errors import ConfigError, InvalidRequest, Unavailable
from kvstrata.index.ids import TokenIds, as_ids
from kvstrata.server.auth import owner_in, salt_of
from kvstrata.server.cache_words import (
    ClearAnswer,
    ClearAsked,
    ExplainAnswer,
    HeldAnswer,
    PinAnswer,
    ProgressAnswer,
    PromptAsked,
    RequantizeAnswer,
    RequantizeAsked,
    TargetAnswer,
    Under,
    UsageAnswer,
    explain_answer,
    held_answer,
    progress_answer,
    requantize_answer,
    usage_answer,
)
from kvstrata.server.errors import answers
from kvstrata.server.openai.ask import chat_job, completion_job, read_body
from kvstrata.server.openai.endpoints import body_of, require_json
from kvstrata.server.service import Service, service_of
from kvstrata.store.report import Explanation
from kvstrata.store.requantize import Change, Changed
from kvstrata.store.store import Cleared, Store
from kvstrata.text.tokens import token_bytes

T = TypeVar("T")

router = APIRouter(prefix="/cache", tags=["Cache"])

ASKED = (PromptAsked, ClearAsked, RequantizeAsked)
# Tokens on each side of the place where a match ends.
AROUND_TOKENS = 12
# For what the disk has to say about a prompt, at most.
EXPLAIN_S = 5.0
WITHOUT_STORE: HeldAnswer = {"k": {}, "v": {}}


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    ids: TokenIds  # the same, as the engine's thread wants them: making these of a long prompt takes a while
    salt: str
    key_salt: str  # the caller's without cache_salt


@router.get("/usage", summary="What is held, where and at which precision", responses=answers(401, 503))
async def usage(request: Request) -> UsageAnswer:
    service, owner = service_of(request), owner_in(request.scope)
    return await ask(service, lambda loop: usage_of(loop, owner, service.pin_quota))


@router.post(
    "/requantize",
    summary="Change the precision of what is cached",
    responses=answers(400, 401, 413, 503),
    openapi_extra=body_of(RequantizeAsked),
)
async def requantize(request: Request) -> RequantizeAnswer:
    asked = await _read(request, RequantizeAsked)
    change = _change(asked, request.scope)

    def question(loop: Loop) -> tuple[Changed, HeldAnswer]:
        store = _store(loop)
        if change.scope == "disk":
            _require_tier(loop, "disk", param="scope")
        return loop.requantize(change), held_answer(store.usage(change.owner))

    return requantize_answer(*await ask(service_of(request), question), under=_under(change.owner))


@router.get("/requantize", summary="How far the last change has come", responses=answers(400, 401, 503))
async def requantize_progress(request: Request) -> ProgressAnswer:
    owner = owner_in(request.scope)
    return progress_answer(await ask(service_of(request), lambda loop: loop.requantize_progress(owner)))


@router.delete("/requantize", summary="Stop the change; what is done stays", responses=answers(400, 401, 503))
async def cancel_requantize(request: Request) -> ProgressAnswer:
    owner = owner_in(request.scope)
    return progress_answer(await ask(service_of(request), lambda loop: loop.cancel_requantize(owner)))


@router.post(
    "/explain",
    summary="How much of a prompt is cached, and why not more",
    responses=answers(400, 401, 404, 413, 503),
    openapi_extra=body_of(PromptAsked),
)
async def explain(request: Request) -> ExplainAnswer:
    service = service_of(request)
    prompt = await _prompt(request)
    explained = await _explain(service, prompt)
    at = explained.at_token
    return explain_answer(
        explained,
        before=_text(service, prompt.tokens[max(0, at - AROUND_TOKENS) : at]),
        after=_text(service, prompt.tokens[at : at + AROUND_TOKENS]),
        instead=[_text(service, run) for run in explained.instead],
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

    def question(loop: Loop) -> tuple[Cleared, int]:
        _require_tier(loop, tier, param="tier")
        cleared = _store(loop).clear(salt, tier, owner=owner)
        return cleared, sum(left.nbytes for name, left in loop.usage(owner).tiers.items() if tier in ("all", name))

    cleared, left_bytes = await ask(service_of(request), question)
    return {"tier": tier, "bytes": cleared.nbytes, "tokens": cleared.tokens, "bytes_left": left_bytes}


@router.post(
    "/pin",
    summary="Keep what is stored of a prompt, whatever else has to go",
    responses=answers(400, 401, 404, 413, 503),
    openapi_extra=body_of(PromptAsked),
)
async def pin(request: Request) -> PinAnswer:
    service, owner = service_of(request), owner_in(request.scope)
    prompt = await _prompt(request)

    def question(loop: Loop) -> int:
        store = _store(loop)
        return store.pin(prompt.ids, prompt.salt, _quota_bytes(store, owner, service.pin_quota))

    return {"prompt_tokens": len(prompt.tokens), "tokens": await ask(service, question)}


@router.post(
    "/unpin",
    summary="Let it go again when room is needed",
    responses=answers(400, 401, 404, 413, 503),
    openapi_extra=body_of(PromptAsked),
)
async def unpin(request: Request) -> PinAnswer:
    prompt = await _prompt(request)
    num_tokens = await ask(service_of(request), lambda loop: _store(loop).unpin(prompt.ids, prompt.salt))
    return {"prompt_tokens": len(prompt.tokens), "tokens": num_tokens}


async def ask(service: Service, question: Callable[[Loop], T]) -> T:
    if not service.engine.alive:
        raise Unavailable("The engine has stopped. Restart the server; its log says why.")
    try:
        return await asyncio.wrap_future(service.engine.ask(question))
    except ConfigError as error:
        # A precision that this model's layers cannot be stored in.
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
    """The disk answers on a thread of its own, for at most so long, and no step waits for it."""
    lookup = await ask(service, lambda loop: None if loop.store is None else loop.store.ask_disk(ids, salt))
    is_answered = lookup is not None and await to_thread.run_sync(lookup.wait, EXPLAIN_S)
    on_disk = lookup.answer if lookup is not None and is_answered else None

    def question(loop: Loop) -> Explanation:
        if loop.store is None:
            return Explanation(len(ids), 0, {}, "foreign", 0)
        return loop.store.explain(ids, salt, on_disk)

    return await ask(service, question)


# On the engine's thread.


def usage_of(loop: Loop, owner: str | None, pin_quota: Size) -> UsageAnswer:
    return usage_answer(
        loop.usage(owner),
        target_of(loop),
        held_of(loop, owner),
        under=_under(owner),
        pin_quota_bytes=None if loop.store is None else _quota_bytes(loop.store, owner, pin_quota),
    )


def target_of(loop: Loop) -> TargetAnswer:
    """What new tokens are stored as."""
    if loop.store is None:
        return {"k": "raw", "v": "raw"}
    target = loop.store.precision.target
    return {"k": target.k, "v": target.v}


def held_of(loop: Loop, owner: str | None) -> HeldAnswer:
    return held_answer(loop.store.usage(owner)) if loop.store is not None else WITHOUT_STORE


def _quota_bytes(store: Store, owner: str | None, pin_quota: Size) -> int | None:
    """What an owner may pin; None: there is no limit."""
    return None if owner is None else pin_quota.of(store.options.hot_bytes)


def _under(owner: str | None) -> Under:
    return "all" if owner is None else "key"


def _store(loop: Loop) -> Store:
    if loop.store is None:
        raise InvalidRequest(
            "This model brings caches of its own kind, which cannot be shared: nothing is stored. GET /props shows its "
            "layers.",
            code="no_store",
        )
    return loop.store


def _require_tier(loop: Loop, tier: str, *, param: str) -> None:
    tiers = loop.usage().tiers
    if tier != "all" and tier not in tiers:
        raise InvalidRequest(f"{param}: this server has no {tier} tier, only {', '.join(tiers)}.", param=param)


# On the event loop, and bodies on worker threads.


async def _read(request: Request, schema: type[T]) -> T:
    require_json(request)
    assert issubclass(schema, BaseModel)
    return await to_thread.run_sync(read_body, schema, await request.body())


async def _prompt(request: Request) -> Prompt:
    require_json(request)
    return await to_thread.run_sync(read_prompt, service_of(request), await request.body(), request.scope)


def read_prompt(service: Service, body: bytes, scope: Scope) -> Prompt:
    """The tokens that /v1 would make of it, by the same way."""
    asked = read_body(PromptAsked, body)
    given = [name for name in ("messages", "prompt", "tokens") if getattr(asked, name) is not None]
    if len(given) != 1:
        sent = f"{' and '.join(given)} came together" if given else "there is none of them"
        raise InvalidRequest(
            f"The prompt must be one of messages, prompt and tokens; {sent}.", param=given[-1] if given else None
        )
    ids = asked.tokens if asked.prompt is None else asked.prompt
    request: dict[str, Any] = {"model": asked.model or service.name, "prompt": ids, "tokens": None}
    body = asked.model_copy(update=request).model_dump_json(exclude_none=True).encode()
    job = (completion_job if asked.messages is None else chat_job)(service, body, scope)
    tokens = job.requests[0].prompt
    return Prompt(tokens, as_ids(tokens), job.requests[0].salt, salt_of(scope, None))


def _change(asked: RequantizeAsked, scope: Scope) -> Change:
    k, v = _precision(asked, "k", "ctk"), _precision(asked, "v", "ctv")
    if k is None and v is None:
        raise InvalidRequest("Say what to change: k, v or both, e.g. planes:4.", param="k")
    return Change(
        k=k,
        v=v,
        scope=asked.scope,
        salt=None if asked.salt is None else salt_of(scope, asked.salt),
        owner=owner_in(scope),
        sequence=asked.sequence,
        dry_run=asked.dry_run,
        force=asked.force,
    )


def _precision(asked: RequantizeAsked, name: str, llama_name: str) -> str | None:
    """By either word; a name that does not exist is refused with those that do."""
    words = {word: value for word in (name, llama_name) if (value := getattr(asked, word)) is not None}
    try:
        names = {word: parse(value).name for word, value in words.items()}
    except ConfigError as error:
        raise InvalidRequest(str(error)[:500], param=next(iter(words))) from None
    if len(set(names.values())) > 1:
        raise InvalidRequest(f"{name} and {llama_name} ask for different precisions. Send one.", param=llama_name)
    return next(iter(names.values()), None)


def _text(service: Service, tokens: tuple[int, ...]) -> str:
    return b"".join(token_bytes(service.loaded.tokenizer, token) for token in tokens).decode("utf-8", "replace")
