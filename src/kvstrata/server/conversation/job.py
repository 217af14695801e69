"""From a conversation to requests that the engine takes, whatever wire it came by.

Knows what this model and server can do, and refuses the rest with the reason. Pure but for the tokenizer; runs in a
worker thread, because a long prompt takes a while to render and tokenize, and a grammar to compile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.types import Scope

from kvstrata.engine.cache import as_ids
from kvstrata.engine.request import Request, Sampling
from kvstrata.errors import InvalidRequest, ModelNotFound
from kvstrata.grammar.grammars import Grammar
from kvstrata.server.auth import salt_of
from kvstrata.server.conversation.chat import Chat, Wanted
from kvstrata.server.conversation.constraints import grammar_of
from kvstrata.server.conversation.lengths import reply_tokens, require_possible_chat
from kvstrata.server.service import Service
from kvstrata.server.sessions.names import Name, name_of_chat, name_of_text
from kvstrata.server.sessions.registry import Visit
from kvstrata.text.calls.offered import Offered
from kvstrata.text.events import ReplyReader
from kvstrata.text.reply_form import PlainReader
from kvstrata.text.tokens import ids_text

CLAMPED = "x-kvstrata-max-tokens"
IGNORED = "x-kvstrata-schema-ignored"
MAX_HEADER_CHARS = 500


@dataclass(frozen=True)
class Job:
    """What a client asked for, ready for the engine. The `n` choices of a prompt stand one after the other."""

    id: str
    requests: tuple[Request, ...]
    readers: tuple[ReplyReader, ...]  # one for each request
    n: int = 1
    one_call: bool = False  # a reply ends with its first call
    notes: Mapping[str, str] = field(default_factory=dict)  # what the answer says beside why it missed (miss.py)
    headers: Mapping[str, str] = field(default_factory=dict)
    visits: tuple[Visit, ...] = ()  # of sessions, one for each prompt


def chat_job(service: Service, chat: Chat, scope: Scope, job_id: str) -> Job:
    check_model(service, chat.model)
    if chat.wanted.n > service.max_prompts:
        raise InvalidRequest(f"n: {chat.wanted.n} replies in one request; at most {service.max_prompts}.", param="n")
    prompt, resume_at = chat_prompt(service, chat)
    tools = tools_told(chat)
    form = service.form
    before_answer = form.before_answer(prompt, is_call=chat.choice.mode == "required")
    thinks_unseen = form.thinks_unseen(prompt)
    grammar = grammar_of(service, chat, after_thinking=bool(before_answer), thinks_unseen=thinks_unseen)
    request = _request(service, chat.wanted, scope, prompt, param="messages")
    request = replace(
        request,
        resume_at=resume_at,
        stop_ids=service.loaded.eos_ids | form.ending_ids,
        break_ids=form.break_ids,
        grammar=grammar,
        grammar_after=before_answer if grammar else (),
    )
    at_once = grammar is not None and thinks_unseen
    readers = [form.reader(prompt, tools, answers_at_once=at_once) for _ in range(chat.wanted.n)]
    job = _job(job_id, [request], chat.wanted, readers)
    headers = {**job.headers, **_ignored(grammar if chat.wanted.constraint else None)}
    job = _visiting(service, job, [name_of_chat(scope, chat)])
    return replace(job, one_call=bool(tools) and not chat.choice.parallel, headers=headers)


def chat_prompt(service: Service, chat: Chat) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids, and where later requests are likely to part from them."""
    template = service.template
    if not template.exists:
        raise InvalidRequest(
            "This model has no chat template. Use POST /v1/completions with a prompt, or serve an instruct model.",
            code="no_chat_template",
        )
    require_possible_chat(service, chat.messages)
    switched = service.thinking.switch(chat.thinking.effort, chat.thinking.enabled)
    variables = {**switched, **chat.template_kwargs} or None
    tools = list(tools_told(chat)) or None
    prompt = template.render(chat.messages, tools=tools, template_kwargs=variables)
    if not service.engine.resumes_at_marks:
        return prompt, ()
    return prompt, template.boundaries(chat.messages, tools, template_kwargs=variables, prompt=prompt)


def tools_told(chat: Chat) -> tuple[dict[str, object], ...]:
    """The tools that the model is told of; none where it must not call any."""
    return () if chat.choice.mode == "none" else chat.tools


def text_job(service: Service, prompts: Sequence[tuple[int, ...]], wanted: Wanted, scope: Scope, job_id: str) -> Job:
    """Of plain texts that are to be continued."""
    constraint = wanted.constraint
    grammar = service.grammars.compile(constraint, param=wanted.constraint_param) if constraint else None
    requests = [
        replace(_request(service, wanted, scope, prompt, param="prompt"), continues_prompt=True, grammar=grammar)
        for prompt in prompts
    ]
    readers = [PlainReader(Offered(())) for _ in range(len(prompts) * wanted.n)]
    job = _job(job_id, requests, wanted, readers)
    return _visiting(service, job, [name_of_text(scope, wanted.cache_key, prompt) for prompt in prompts])


def _job(job_id: str, requests: Sequence[Request], wanted: Wanted, readers: Sequence[ReplyReader]) -> Job:
    """`requests`: one for each prompt."""
    least = min(request.max_tokens for request in requests)
    is_clamped = wanted.max_tokens is not None and least < wanted.max_tokens
    headers = {CLAMPED: str(least)} if is_clamped else {}
    choices = [_choice(request, index) for request in requests for index in range(wanted.n)]
    named = [replace(request, id=f"{job_id}-{index}") for index, request in enumerate(choices)]
    return Job(job_id, tuple(named), tuple(readers), wanted.n, headers=headers)


def _visiting(service: Service, job: Job, names: Sequence[Name]) -> Job:
    """`names`: of the sessions that the prompts belong to."""
    firsts = job.requests[:: job.n]
    tokenizer = service.loaded.tokenizer
    visits = tuple(
        service.sessions.visit(request.salt, name, as_ids(request.prompt), partial(ids_text, tokenizer))
        for request, name in zip(firsts, names, strict=True)
    )
    requests = [replace(request, session=visits[place // job.n].key) for place, request in enumerate(job.requests)]
    parted = visits[0].parted if len(visits) == 1 else None
    notes = {**job.notes, **(parted.notes if parted else {})}
    return replace(job, requests=tuple(requests), visits=visits, notes=notes)


def _ignored(grammar: Grammar | None) -> dict[str, str]:
    """What a schema that is not strict asks for and does not get."""
    if grammar is None or not grammar.ignored:
        return {}
    text = " ".join("; ".join(grammar.ignored).split())
    return {IGNORED: text.encode("ascii", "replace").decode()[:MAX_HEADER_CHARS]}


def _choice(request: Request, index: int) -> Request:
    """With one seed for all of them, all would be the same."""
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
    """Of a request that says nothing of it."""
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
    """Left out, or empty as some clients send it: the one that is served."""
    if name and not service.answers_to(name):
        raise ModelNotFound(
            f"The model '{name[:200]}' is not served here; this is '{service.name}'. GET /v1/models lists it. "
            "--any-model-name answers to every name.",
            param="model",
        )
