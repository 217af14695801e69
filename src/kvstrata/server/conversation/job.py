"""Translation of a conversation to engine requests, the same for every API.

Refuses what this model or server cannot do, with the reason. Pure except for the tokenizer; runs on a worker thread,
because rendering and tokenizing a long prompt and compiling a grammar take a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.types import Scope

from kvstrata.engine.cache_api import as_ids
from kvstrata.engine.request import Request, Sampling
from kvstrata.errors import InvalidRequest, ModelNotFound
from kvstrata.grammar.compiler import Grammar
from kvstrata.server.auth import salt_of
from kvstrata.server.conversation.chat import Chat, Wanted
from kvstrata.server.conversation.constraints import grammar_of
from kvstrata.server.conversation.lengths import reply_tokens
from kvstrata.server.conversation.prompt import ChatPrompt, chat_prompt, tools_told
from kvstrata.server.replay.noting import Noting
from kvstrata.server.service import Service
from kvstrata.server.sessions.names import Name, name_of_chat, name_of_text
from kvstrata.server.sessions.registry import Visit
from kvstrata.text.reply_events import ReplyParser
from kvstrata.text.reply_parser import PlainParser
from kvstrata.text.tokenizer import ids_text
from kvstrata.text.tool_calls.answer_text import OfferedTools

CLAMPED = "x-kvstrata-max-tokens"
IGNORED = "x-kvstrata-schema-ignored"
MAX_HEADER_CHARS = 500


@dataclass(frozen=True)
class Job:
    """A client's request, ready for the engine. The `n` choices of a prompt are adjacent."""

    id: str
    requests: tuple[Request, ...]
    readers: tuple[ReplyParser, ...]  # one for each request
    n: int = 1
    one_call: bool = False  # a reply ends after its first call
    notes: Mapping[str, str] = field(default_factory=dict)  # notes in the miss header, after the reason (miss.py)
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt: ChatPrompt | None = None  # of a chat
    noting: Noting | None = None  # None: replies are not recorded
    visits: tuple[Visit, ...] = ()  # of sessions, one for each prompt


def chat_job(service: Service, chat: Chat, scope: Scope, job_id: str) -> Job:
    check_model(service, chat.model)
    if chat.wanted.n > service.max_prompts:
        raise InvalidRequest(f"n: {chat.wanted.n} replies in one request; at most {service.max_prompts}.", param="n")
    made = chat_prompt(service, chat, scope)
    prompt = made.ids
    tools = tools_told(chat)
    form = service.form
    before_answer = form.before_answer(prompt, is_call=chat.choice.mode == "required")
    thinks_unseen = form.thinks_unseen(prompt)
    salt = salt_of(scope, chat.wanted.cache_salt)
    grammar = grammar_of(service, chat, salt, after_thinking=bool(before_answer), thinks_unseen=thinks_unseen)
    request = _request(service, chat.wanted, scope, prompt, param="messages")
    request = replace(
        request,
        resume_at=made.resume_at,
        pin=made.pin,
        stop_ids=service.ending_ids,
        break_ids=form.break_ids,
        grammar=grammar,
        grammar_after=before_answer if grammar else (),
    )
    at_once = grammar is not None and thinks_unseen
    readers = [form.parser(prompt, tools, answers_at_once=at_once) for _ in range(chat.wanted.n)]
    job = _job(job_id, [request], chat.wanted, readers)
    headers = {**job.headers, **_ignored(grammar if chat.wanted.constraint else None)}
    one_call = bool(tools) and not chat.choice.parallel
    noting = _noting(service, request)
    job = replace(job, one_call=one_call, headers=headers, prompt=made, notes=made.notes, noting=noting)
    return _visiting(service, job, [name_of_chat(scope, chat)])


def text_job(service: Service, prompts: Sequence[tuple[int, ...]], wanted: Wanted, scope: Scope, job_id: str) -> Job:
    """Return the job of a plain completion, with one or more prompts."""
    constraint, salt = wanted.constraint, salt_of(scope, wanted.cache_salt)
    grammar = service.grammars.compile(constraint, salt=salt, param=wanted.constraint_param) if constraint else None
    requests = [
        replace(_request(service, wanted, scope, prompt, param="prompt"), continues_prompt=True, grammar=grammar)
        for prompt in prompts
    ]
    readers = [PlainParser(OfferedTools(())) for _ in range(len(prompts) * wanted.n)]
    job = _job(job_id, requests, wanted, readers)
    return _visiting(service, job, [name_of_text(scope, wanted.cache_key, prompt) for prompt in prompts])


def _noting(service: Service, request: Request) -> Noting | None:
    if service.replies is None:
        return None
    return Noting(service.replies, service.form, request.salt, request.prompt, service.ending_ids)


def _job(job_id: str, requests: Sequence[Request], wanted: Wanted, readers: Sequence[ReplyParser]) -> Job:
    """Return the job with `n` choices for each prompt. `requests`: one for each prompt."""
    least = min(request.max_tokens for request in requests)
    is_clamped = wanted.max_tokens is not None and least < wanted.max_tokens
    headers = {CLAMPED: str(least)} if is_clamped else {}
    choices = [_choice(request, index) for request in requests for index in range(wanted.n)]
    named = [replace(request, id=f"{job_id}-{index}") for index, request in enumerate(choices)]
    return Job(job_id, tuple(named), tuple(readers), wanted.n, headers=headers)


def _visiting(service: Service, job: Job, names: Sequence[Name]) -> Job:
    """Return the job with its requests assigned to sessions. `names`: the session name of each prompt."""
    firsts = job.requests[:: job.n]
    prompts = [as_ids(request.prompt) for request in firsts]
    text_of = partial(ids_text, service.loaded.tokenizer)
    visits = tuple(
        service.sessions.visit(request.salt, name, text_of) for request, name in zip(firsts, names, strict=True)
    )
    requests = [
        replace(
            request,
            session=visits[place // job.n].key,
            conversation_digest=visits[place // job.n].name.digest,
            is_first_choice=place % job.n == 0,
            prompt_ids=prompts[place // job.n],
        )
        for place, request in enumerate(job.requests)
    ]
    return replace(job, requests=tuple(requests), visits=visits)


def _ignored(grammar: Grammar | None) -> dict[str, str]:
    """Return the header that lists the ignored parts of a schema that is not strict."""
    if grammar is None or not grammar.ignored:
        return {}
    text = " ".join("; ".join(grammar.ignored).split())
    return {IGNORED: text.encode("ascii", "replace").decode()[:MAX_HEADER_CHARS]}


def _choice(request: Request, index: int) -> Request:
    """Return the request of one choice. Each choice gets its own seed; with the same seed all choices would be
    equal."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=seed + index))


def _request(service: Service, wanted: Wanted, scope: Scope, prompt: tuple[int, ...], *, param: str) -> Request:
    max_tokens = reply_tokens(service, len(prompt), wanted.max_tokens, param=param)
    is_as_asked = max_tokens == wanted.max_tokens
    return Request(
        id="",
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(service, wanted),
        stop=wanted.stop,
        stop_ids=service.loaded.eos_ids,
        open_ended=not (wanted.reserves and is_as_asked),
        salt=salt_of(scope, wanted.cache_salt),
    )


def _sampling(service: Service, wanted: Wanted) -> Sampling:
    given = {name: value for name, value in wanted.sampling.items() if value is not None}
    sampling = replace(default_sampling(service), **given, logit_bias=_logit_bias(service, wanted.logit_bias))
    return replace(sampling, top_k=min(max(sampling.top_k, 0), service.loaded.vocab_size))


def default_sampling(service: Service) -> Sampling:
    """Return the sampling settings of a request that sets none."""
    return Sampling(**service.sampling.given())  # pyright: ignore[reportArgumentType]


def _logit_bias(service: Service, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text, value in bias.items():
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < service.loaded.vocab_size):
            raise InvalidRequest(
                f"logit_bias: '{text[:40]}' is not a token id of this model; they go from 0 to "
                f"{service.loaded.vocab_size - 1}.",
                param="logit_bias",
            )
        pairs.append((int(text), value))
    return tuple(pairs)


def check_model(service: Service, name: str | None) -> None:
    """Raise ModelNotFound if the model is not served here. No name, or an empty one as some clients send it, means the
    served model."""
    if name and not service.answers_to(name):
        raise ModelNotFound(
            f"The model '{name[:200]}' is not served here; this is '{service.name}'. GET /v1/models lists it. "
            "--any-model-name answers to every name.",
            param="model",
        )
