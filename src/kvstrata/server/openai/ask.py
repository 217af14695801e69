"""From a body to requests that the engine takes.

Knows what this model and server can do, and refuses the rest with the reason. Pure but for the tokenizer; runs in a
worker thread, because a long prompt takes a while to render and tokenize.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.types import Scope

from kvstrata.engine.request import Request, Sampling
from kvstrata.errors import ContextTooLong, InvalidRequest, ModelNotFound
from kvstrata.server.auth import salt_of
from kvstrata.server.openai.lengths import require_possible_chat, require_possible_text
from kvstrata.server.openai.schema import ChatAsked, CompletionAsked, Message, OtherPart, SamplingAsked
from kvstrata.server.service import Service
from kvstrata.text.tokens import encode_text

AskedT = TypeVar("AskedT", bound=BaseModel)

NOT_DONE = ("functions", "function_call", "audio", "web_search_options")


@dataclass(frozen=True)
class Job:
    """What a client asked for, ready for the engine."""

    id: str
    requests: tuple[Request, ...]  # one for each choice of the answer
    stream: bool
    include_usage: bool
    tools: tuple[dict[str, Any], ...] = ()  # not empty: look for calls in the reply


def read_body(schema: type[AskedT], body: bytes) -> AskedT:
    try:
        asked = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", code="invalid_json") from None
    return validated(schema, asked)


def validated(schema: type[AskedT], asked: Any) -> AskedT:
    try:
        return schema.model_validate(asked)
    except ValidationError as error:
        raise _invalid(asked, error.errors(include_url=False, include_input=False, include_context=False)) from None


def chat_job(service: Service, body: bytes, scope: Scope) -> Job:
    return chat_job_of(service, read_body(ChatAsked, body), scope)


def chat_job_of(service: Service, asked: ChatAsked, scope: Scope) -> Job:
    _check_model(service, asked.model)
    _check_chat(service, asked)
    tools = _tools(service, asked)
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(asked.messages)]
    require_possible_chat(service, asked.messages)
    ids = service.template.render(messages, tools=list(tools) or None, template_kwargs=asked.chat_template_kwargs)
    job_id = f"chatcmpl-{uuid.uuid4().hex}"
    (request,) = _requests(service, asked, scope, job_id, [ids])
    if service.engine.resumes_at_marks:
        places = service.template.boundaries(
            messages, list(tools) or None, template_kwargs=asked.chat_template_kwargs, prompt=ids
        )
        request = replace(request, resume_at=places)
    return Job(job_id, (request,), bool(asked.stream), _include_usage(asked), tools)


def completion_job(service: Service, body: bytes, scope: Scope) -> Job:
    return completion_job_of(service, read_body(CompletionAsked, body), scope)


def completion_job_of(service: Service, asked: CompletionAsked, scope: Scope) -> Job:
    _check_model(service, asked.model)
    _check_completion(asked)
    job_id = f"cmpl-{uuid.uuid4().hex}"
    requests = _requests(service, asked, scope, job_id, _prompts(service, asked))
    return Job(job_id, requests, bool(asked.stream), _include_usage(asked))


def _requests(
    service: Service,
    asked: ChatAsked | CompletionAsked,
    scope: Scope,
    job_id: str,
    prompts: Sequence[tuple[int, ...]],
) -> tuple[Request, ...]:
    sampling, limit = _sampling(service, asked), asked.reply_tokens
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    # Plain completions show a reply as the model writes it, marks and all.
    harmony = service.harmony if isinstance(asked, ChatAsked) else None
    return tuple(
        Request(
            id=f"{job_id}-{index}",
            prompt=prompt,
            max_tokens=_max_tokens(service, asked, prompt, limit),
            sampling=sampling,
            stop=stop,
            stop_ids=service.loaded.eos_ids | (harmony.ending if harmony else frozenset()),
            break_ids=harmony.ids if harmony else frozenset(),
            open_ended=limit is None,
            continues_prompt=isinstance(asked, CompletionAsked),
            salt=salt_of(scope, asked.cache_salt),
        )
        for index, prompt in enumerate(prompts)
    )


def _max_tokens(service: Service, asked: SamplingAsked, prompt: tuple[int, ...], limit: int | None) -> int:
    context, num_prompt = service.context_tokens, len(prompt)
    if num_prompt >= context:
        raise ContextTooLong(
            f"The prompt has {num_prompt} tokens and the context holds {context}, the reply included. "
            "Send a shorter prompt.",
            param="messages" if isinstance(asked, ChatAsked) else "prompt",
        )
    if limit is not None and num_prompt + limit > context:
        raise ContextTooLong(
            f"The prompt has {num_prompt} tokens and {limit} are asked for, {num_prompt + limit} together; the context "
            f"holds {context}. Send a shorter prompt or ask for at most {context - num_prompt} tokens.",
            param="max_tokens",
        )
    return limit if limit is not None else context - num_prompt


def _sampling(service: Service, asked: ChatAsked | CompletionAsked) -> Sampling:
    asked_for = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": None if asked.top_k is None else max(asked.top_k, 0),
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
    }
    given = {name: value for name, value in asked_for.items() if value is not None}
    sampling = replace(
        default_sampling(service),
        **given,
        logit_bias=_logit_bias(service, asked.logit_bias or {}),
        seed=asked.seed,
        num_logprobs=asked.num_logprobs,
    )
    return replace(sampling, top_k=min(sampling.top_k, service.loaded.vocab_size))


def default_sampling(service: Service) -> Sampling:
    """Of a request that says nothing of it."""
    return Sampling(**service.sampling.given())  # pyright: ignore[reportArgumentType]


def _logit_bias(service: Service, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
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


def _check_model(service: Service, name: str | None) -> None:
    """Left out, or empty as some clients send it: the one that is served."""
    if name and name not in service.names:
        raise ModelNotFound(
            f"The model '{name[:200]}' is not served here; this is '{service.name}'. GET /v1/models lists it.",
            param="model",
        )


def _check_common(asked: SamplingAsked) -> None:
    if asked.n not in (None, 1):
        raise InvalidRequest("n: only 1 is supported. Send the request several times.", param="n")
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options: only allowed with stream = true.", param="stream_options")


def _check_chat(service: Service, asked: ChatAsked) -> None:
    _check_common(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs = true.", param="top_logprobs")
    if asked.response_format is not None and asked.response_format.type != "text":
        raise InvalidRequest(
            f"response_format: '{asked.response_format.type[:40]}' is not supported yet, only 'text'. Ask for the "
            "format in the prompt.",
            param="response_format",
        )
    for name in NOT_DONE:
        if getattr(asked, name) is not None:
            raise InvalidRequest(f"{name}: not supported by this server. Leave it out.", param=name)
    if not service.template.exists:
        raise InvalidRequest(
            "This model has no chat template. Use POST /v1/completions with a prompt, or serve an instruct model.",
            code="no_chat_template",
        )


def _check_completion(asked: CompletionAsked) -> None:
    _check_common(asked)
    if asked.echo:
        raise InvalidRequest("echo: not supported; put the prompt before the text yourself.", param="echo")
    if asked.suffix:
        raise InvalidRequest("suffix: not supported; leave it out.", param="suffix")
    if asked.best_of not in (None, 1):
        raise InvalidRequest("best_of: only 1 is supported.", param="best_of")


def _tools(service: Service, asked: ChatAsked) -> tuple[dict[str, Any], ...]:
    """The tools that the model is told of; none with tool_choice 'none'."""
    if asked.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice: only 'auto' and 'none' are supported.", param="tool_choice")
    if not asked.tools:
        return ()
    if not service.template.has_tools:
        raise InvalidRequest(
            "tools: this model's chat template has no place for them. Leave them out, or serve a model made for tools.",
            param="tools",
        )
    if asked.tool_choice == "none":
        return ()
    if not (service.harmony or service.loaded.tokenizer.tool_parser or service.template.has_bare_calls):
        raise InvalidRequest(
            "tools: this server cannot read calls in the form that this model's chat template gives them. Leave them "
            "out, or serve another model made for tools.",
            param="tools",
        )
    return tuple(tool.model_dump(exclude_none=True) for tool in asked.tools)


def _message(message: Message, where: str) -> dict[str, Any]:
    """Checked where the client can be told the place; the template brings it into its own shape."""
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content: a {message.role} message needs content.", param=f"{where}.content")
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, OtherPart):
            raise InvalidRequest(
                f"{where}.content: a part of type {part.type} is not supported; this server takes text.",
                param=f"{where}.content",
            )
    return message.model_dump(exclude_none=True)


def _prompts(service: Service, asked: CompletionAsked) -> list[tuple[int, ...]]:
    prompts = _as_list(asked.prompt)
    if len(prompts) > service.max_prompts:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts in one request; at most {service.max_prompts}.", param="prompt"
        )
    ids = [_prompt_ids(service, prompt) for prompt in prompts]
    if not ids or not all(ids):
        raise InvalidRequest("prompt: must not be empty.", param="prompt")
    return ids


def _as_list(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if not isinstance(part, int)]


def _prompt_ids(service: Service, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        require_possible_text(service, prompt)
        return encode_text(service.loaded.tokenizer, prompt)
    beyond = next((token for token in prompt if token >= service.loaded.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"prompt: {beyond} is not a token id of this model; they go from 0 to {service.loaded.vocab_size - 1}.",
            param="prompt",
        )
    return tuple(prompt)


def _include_usage(asked: SamplingAsked) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_usage)


def _invalid(asked: object, details: list[ErrorDetails]) -> InvalidRequest:
    """Of a union's branches the one that got furthest is what the client meant."""
    paths = [_path(asked, detail) for detail in details]
    furthest = max(paths, key=len)
    reasons = dict.fromkeys(detail["msg"] for path, detail in zip(paths, details, strict=True) if path == furthest)
    param = ".".join(furthest)
    reason = ", or: ".join(reasons)
    return InvalidRequest(f"{param}: {reason}." if param else f"{reason}.", param=param or None)


def _path(asked: object, detail: ErrorDetails) -> list[str]:
    """`messages, 0, role` from pydantic's location, which also names the branches of unions."""
    path: list[str] = []
    here: Any = asked
    for key in detail["loc"]:
        if (isinstance(here, dict) and key in here) or (isinstance(here, list) and isinstance(key, int)):
            here = here[key]  # pyright: ignore[reportArgumentType, reportCallIssue]
        elif detail["type"] != "missing" or key != detail["loc"][-1]:
            continue
        path.append(str(key))
    return path
