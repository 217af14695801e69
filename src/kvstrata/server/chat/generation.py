"""Translation of a chat to engine requests, the same for every API: sampling, limits, grammar, session.

Refuses what this model or server cannot do, with the reason. Pure except for the tokenizer; runs on a worker thread,
because rendering and tokenizing a long prompt and compiling a grammar take a while.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.types import Scope

from kvstrata.engine.cache_api import as_ids
from kvstrata.engine.request import Request, Sampling
from kvstrata.errors import InvalidRequest, ModelNotFound, QueueFull
from kvstrata.grammar.compiler import Grammar
from kvstrata.grammar.constraint import Constraint
from kvstrata.grammar.tool_grammar import CallForm, tool_call_grammar
from kvstrata.server.chat.prompt import RenderedPrompt
from kvstrata.server.chat.request import ChatRequest, GenerationParams, TextRequest, Tool
from kvstrata.server.http.access import salt_of
from kvstrata.server.sessions import SessionName, SessionVisit, name_chat_session, name_text_session
from kvstrata.server.state import ServerState
from kvstrata.text.reply_events import ReplyEvent, ReplyParser
from kvstrata.text.reply_parser import PlainParser
from kvstrata.text.tokenizer import encode_prompt, ids_text
from kvstrata.text.tool_calls.answer_text import OfferedTools

CLAMPED = "x-kvstrata-max-tokens"
IGNORED = "x-kvstrata-schema-ignored"
MAX_HEADER_CHARS = 500


def reply_grammar(
    state: ServerState, chat: ChatRequest, salt: str, *, after_thinking: bool, thinks_unseen: bool
) -> Grammar | None:
    """Return the grammar of the reply, or None if it is unconstrained. `thinks_unseen`: the reply begins with thinking,
    and no token marks its end."""
    if chat.choice.mode == "required":
        return _required(state, chat, salt)
    constraint, tools = chat.params.constraint, chat.tools if chat.choice.mode == "auto" else ()
    if constraint is None:
        is_described = bool(tools) and not state.reply_format.shows_tools and not thinks_unseen
        return _optional_grammar(state, tools, salt, several=chat.choice.parallel) if is_described else None
    if tools and not state.reply_format.has_channels:
        forms = _forms(state, tools)
        constraint = _calls(
            state, forms, chat.params.constraint_param, several=chat.choice.parallel, otherwise=constraint
        )
    elif after_thinking:
        constraint = replace(constraint, padded=True)
    return state.grammars.compile(constraint, salt=salt, param=chat.params.constraint_param)


def _required(state: ServerState, chat: ChatRequest, salt: str) -> Grammar:
    if chat.params.constraint is not None:
        raise InvalidRequest(
            f"{chat.params.constraint_param}: not together with a tool_choice that requires a call: the reply is then "
            "that call.",
            param=chat.params.constraint_param,
        )
    name = chat.choice.name
    tools = [tool for tool in chat.tools if not name or tool["function"]["name"] == name]
    constraint = _calls(state, _forms(state, tools), "tools", several=chat.choice.parallel and not name)
    try:
        return state.grammars.compile(constraint, salt=salt, param="tools")
    except InvalidRequest as error:
        message = f"A call to one of {len(tools)} tools cannot be required. {error.message}"
        raise InvalidRequest(message, param="tools") from error


def _optional_grammar(state: ServerState, tools: Sequence[Tool], salt: str, *, several: bool) -> Grammar | None:
    """Return the grammar for a model whose template has no tools: a reply that begins like a call must be one."""
    try:
        constraint = _calls(state, _forms(state, tools), "tools", several=several, or_text=True)
        return state.grammars.compile(constraint, salt=salt, param="tools")
    except (InvalidRequest, QueueFull):
        # The client asked for no grammar, so this one is optional: the model may write a call without it.
        return None


def _calls(state: ServerState, forms: Sequence[CallForm], param: str, **options: Any) -> Constraint:
    try:
        return tool_call_grammar(forms, state.grammars.pieces, **options)
    except ValueError as error:
        raise InvalidRequest(f"{param}: cannot be used: {error}.", param=param) from error


def _forms(state: ServerState, tools: Sequence[Tool]) -> list[CallForm]:
    forms: list[CallForm] = []
    for tool in tools:
        function = tool["function"]
        before, after = state.reply_format.call_text(function["name"]) or _bare(function["name"])
        forms.append((before, function.get("parameters") or {"type": "object"}, after))
    return forms


def _bare(name: str) -> tuple[str, str]:
    """Return the plain JSON form of a call, for a template whose own form is not JSON. The reply parsers accept it
    too."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}"


@dataclass(frozen=True)
class Generation:
    """A client's request, ready for the engine. The `n` choices of a prompt are adjacent."""

    id: str
    requests: tuple[Request, ...]
    parsers: tuple[ReplyParser, ...]  # one for each request
    n: int = 1
    one_call: bool = False  # a reply ends after its first call
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt: RenderedPrompt | None = None  # of a chat
    record_reply: Callable[[Sequence[int], Iterable[ReplyEvent]], None] | None = None  # token ids and their events
    visits: tuple[SessionVisit, ...] = ()  # of sessions, one for each prompt


def build_chat_generation(state: ServerState, chat: ChatRequest, scope: Scope, generation_id: str) -> Generation:
    """Render a chat and translate it. Raises RequestError for what this model or server cannot do."""
    check_model(state, chat.model)
    params = chat.params
    if params.n > state.max_prompts:
        raise InvalidRequest(f"n: {params.n} replies in one request; at most {state.max_prompts}.", param="n")
    salt = salt_of(scope, params.cache_salt)
    rendered = state.renderer.render(chat, salt)
    ids, reply_format = rendered.ids, state.reply_format
    before_answer = reply_format.before_answer(ids, is_call=chat.choice.mode == "required")
    thinks_unseen = reply_format.thinks_unseen(ids)
    grammar = reply_grammar(state, chat, salt, after_thinking=bool(before_answer), thinks_unseen=thinks_unseen)
    request = replace(
        _request(state, params, salt, ids, param="messages"),
        resume_at=rendered.resume_at,
        pin=rendered.pin,
        stop_ids=state.ending_ids,
        break_ids=reply_format.break_ids,
        grammar=grammar,
        grammar_after=before_answer if grammar else (),
    )
    at_once = grammar is not None and thinks_unseen
    tools = chat.tools_in_prompt
    parsers = [reply_format.parser(ids, tools, answers_at_once=at_once) for _ in range(params.n)]
    generation = _generation(state, generation_id, [request], params, parsers, [name_chat_session(scope, chat)])
    return replace(
        generation,
        one_call=bool(tools) and not chat.choice.parallel,
        headers={**generation.headers, **_ignored(grammar if params.constraint else None)},
        prompt=rendered,
        record_reply=partial(state.replies.record_reply, salt, ids) if state.replies is not None else None,
    )


def build_text_generation(state: ServerState, text: TextRequest, scope: Scope, generation_id: str) -> Generation:
    """Tokenize one or more prompts of a plain completion and translate them."""
    check_model(state, text.model)
    params, prompts = text.params, _encode_prompts(state, text)
    constraint, salt = params.constraint, salt_of(scope, params.cache_salt)
    grammar = state.grammars.compile(constraint, salt=salt, param=params.constraint_param) if constraint else None
    requests = [
        replace(_request(state, params, salt, prompt, param="prompt"), continues_prompt=True, grammar=grammar)
        for prompt in prompts
    ]
    parsers = [PlainParser(OfferedTools(())) for _ in range(len(prompts) * params.n)]
    names = [name_text_session(scope, params.cache_key, prompt) for prompt in prompts]
    return _generation(state, generation_id, requests, params, parsers, names)


def _encode_prompts(state: ServerState, text: TextRequest) -> list[tuple[int, ...]]:
    num_replies = len(text.prompts) * text.params.n
    if num_replies > state.max_prompts:
        raise InvalidRequest(
            f"prompt: {num_replies} replies in one request; at most {state.max_prompts}. Send several requests.",
            param="prompt",
        )
    prompts = [_encode_prompt(state, prompt) for prompt in text.prompts]
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt: must not be empty.", param="prompt")
    return prompts


def _encode_prompt(state: ServerState, prompt: str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        state.limits.check_chars(len(prompt), param="prompt")
        return encode_prompt(state.loaded.tokenizer, prompt)
    beyond = next((token for token in prompt if token >= state.loaded.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"prompt: {beyond} is not a token id of this model; they go from 0 to {state.loaded.vocab_size - 1}.",
            param="prompt",
        )
    return tuple(prompt)


def _generation(
    state: ServerState,
    generation_id: str,
    requests: Sequence[Request],
    params: GenerationParams,
    parsers: Sequence[ReplyParser],
    names: Sequence[SessionName],
) -> Generation:
    """Return the generation with `n` choices for each prompt. `requests`, `names`: one for each prompt."""
    text_of = partial(ids_text, state.loaded.tokenizer)
    visits = [
        state.sessions.visit_session(request.salt, name, text_of) for request, name in zip(requests, names, strict=True)
    ]
    choices: list[Request] = []
    for request, visit in zip(requests, visits, strict=True):
        ids = as_ids(request.prompt)
        choices += [
            replace(
                _choice(request, index),
                id=f"{generation_id}-{len(choices) + index}",
                session=visit.key,
                conversation_digest=visit.name.digest,
                is_first_choice=index == 0,
                prompt_ids=ids,
            )
            for index in range(params.n)
        ]
    least = min(request.max_tokens for request in requests)
    is_clamped = params.max_tokens is not None and least < params.max_tokens
    headers = {CLAMPED: str(least)} if is_clamped else {}
    return Generation(generation_id, tuple(choices), tuple(parsers), params.n, headers=headers, visits=tuple(visits))


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


def _request(
    state: ServerState, params: GenerationParams, salt: str, prompt: tuple[int, ...], *, param: str
) -> Request:
    max_tokens = state.limits.reply_tokens(len(prompt), params.max_tokens, param=param)
    is_as_asked = max_tokens == params.max_tokens
    return Request(
        id="",
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(state, params),
        stop=params.stop,
        stop_ids=state.loaded.eos_ids,
        open_ended=not (params.reserves and is_as_asked),
        salt=salt,
    )


def _sampling(state: ServerState, params: GenerationParams) -> Sampling:
    given = {name: value for name, value in params.sampling.items() if value is not None}
    sampling = replace(default_sampling(state), **given, logit_bias=_logit_bias(state, params.logit_bias))
    return replace(sampling, top_k=min(max(sampling.top_k, 0), state.loaded.vocab_size))


def default_sampling(state: ServerState) -> Sampling:
    """Return the sampling settings of a request that sets none."""
    return Sampling(**state.sampling.given())  # pyright: ignore[reportArgumentType]


def _logit_bias(state: ServerState, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text, value in bias.items():
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < state.loaded.vocab_size):
            raise InvalidRequest(
                f"logit_bias: '{text[:40]}' is not a token id of this model; they go from 0 to "
                f"{state.loaded.vocab_size - 1}.",
                param="logit_bias",
            )
        pairs.append((int(text), value))
    return tuple(pairs)


def check_model(state: ServerState, name: str | None) -> None:
    """Raise ModelNotFound if the model is not served here. No name, or an empty one as some clients send it, means the
    served model."""
    if name and not state.answers_to(name):
        raise ModelNotFound(
            f"The model '{name[:200]}' is not served here; this is '{state.name}'. GET /v1/models lists it. "
            "--any-model-name answers to every name.",
            param="model",
        )
