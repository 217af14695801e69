"""Translation of chat and completions bodies to requests. Refuses fields that are not supported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.constraint import Constraint
from kvstrata.server.chat.request import (
    ChatRequest,
    GenerationParams,
    TextRequest,
    ThinkingParams,
    ToolChoice,
    pin_for_retention,
)
from kvstrata.server.openai.schema import (
    ChatCompletionRequest,
    ChatOtherPart,
    CompletionRequest,
    Message,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
)

NOT_DONE = ("functions", "function_call", "audio", "web_search_options")
NAMED_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip

# The constraint on a reply, and the request field that sets it.
Limited = tuple[Constraint | None, str]


def parse_completion(asked: CompletionRequest) -> TextRequest:
    """Return the prompts and parameters of a completion. Raises InvalidRequest for what is not supported."""
    _check_completion(asked)
    params = _params(asked, asked.max_tokens, asked.logprobs, _structured(asked.structured_outputs))
    return TextRequest(_prompts(asked.prompt), params, asked.model)


def parse_chat(asked: ChatCompletionRequest) -> ChatRequest:
    """Return the chat of a request. Raises InvalidRequest for a request that no model can serve here."""
    _check_chat(asked)
    limit = asked.max_completion_tokens or asked.max_tokens
    num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    return ChatRequest(
        messages=messages_of(asked.messages),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in asked.tools or ()),
        choice=_choice(asked),
        thinking=ThinkingParams(effort=asked.reasoning_effort),
        template_kwargs=asked.chat_template_kwargs or {},
        params=_params(asked, limit, num_logprobs, _constraint(asked)),
        model=asked.model,
        pin=pin_for_retention(asked.prompt_cache_retention),
    )


def _params(
    asked: SamplingFields, max_tokens: int | None, num_logprobs: int | None, limited: Limited
) -> GenerationParams:
    named = {name: getattr(asked, name) for name in NAMED_SAMPLING}
    return GenerationParams(
        sampling={**named, "num_logprobs": num_logprobs},
        logit_bias=asked.logit_bias or {},
        max_tokens=max_tokens,
        stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        n=asked.n or 1,
        constraint=limited[0],
        constraint_param=limited[1],
        cache_salt=asked.cache_salt,
        cache_key=asked.prompt_cache_key,
    )


def _check_common(asked: SamplingFields) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options: only allowed with stream = true.", param="stream_options")


def _check_chat(asked: ChatCompletionRequest) -> None:
    _check_common(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs = true.", param="top_logprobs")
    for name in NOT_DONE:
        if getattr(asked, name) is not None:
            raise InvalidRequest(f"{name}: not supported by this server. Leave it out.", param=name)


def _check_completion(asked: CompletionRequest) -> None:
    _check_common(asked)
    if asked.echo:
        raise InvalidRequest("echo: not supported; put the prompt before the text yourself.", param="echo")
    if asked.suffix:
        raise InvalidRequest("suffix: not supported; leave it out.", param="suffix")
    if asked.best_of not in (None, 1):
        raise InvalidRequest("best_of: only 1 is supported.", param="best_of")


def _choice(asked: ChatCompletionRequest) -> ToolChoice:
    parallel = asked.parallel_tool_calls is not False
    choice = asked.tool_choice or "auto"
    names = {tool.function.name for tool in asked.tools or ()}
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise InvalidRequest(
                f"tool_choice: '{choice.function.name[:80]}' is not among the tools of this request.",
                param="tool_choice",
            )
        return ToolChoice("required", choice.function.name, parallel)
    if choice == "required" and not names:
        raise InvalidRequest("tool_choice: 'required' needs tools.", param="tool_choice")
    return ToolChoice(choice, parallel=parallel)


def _constraint(asked: ChatCompletionRequest) -> Limited:
    structured, formatted = _structured(asked.structured_outputs), _format(asked.response_format)
    if structured[0] and formatted[0]:
        raise InvalidRequest(
            "structured_outputs: not together with response_format. Send one of them.", param="structured_outputs"
        )
    return structured if structured[0] else formatted


def _format(asked: ResponseFormat | None) -> Limited:
    if asked is None or asked.type == "text":
        return None, ""
    if asked.type == "json_object":
        return Constraint.json_object(), "response_format"
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format: type json_schema needs json_schema.schema.", param="response_format.json_schema"
        )
    strict = bool(asked.json_schema.strict)
    return Constraint.json_schema(asked.json_schema.schema_, strict=strict), "response_format.json_schema"


def _structured(asked: StructuredOutputs | None) -> Limited:
    if asked is None:
        return None, ""
    names = {"json_": "json", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    given = [name for name in names if getattr(asked, name) not in (None, False)]
    if len(given) != 1:
        message = f"structured_outputs: give exactly one of {', '.join(names.values())}."
        raise InvalidRequest(message, param="structured_outputs")
    value, param = getattr(asked, given[0]), f"structured_outputs.{names[given[0]]}"
    makes: dict[str, Callable[[Any], Constraint]] = {
        "json_": lambda schema: Constraint.json_schema(_schema(schema, param), strict=False),
        "json_object": lambda _: Constraint.json_object(),
        "regex": Constraint.regex,
        "choice": Constraint.choice,
        "grammar": Constraint.lark,
    }
    return makes[given[0]](value), param


def _schema(value: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{param}: neither an object nor the text of one.", param=param)
    return parsed


def messages_of(asked: Sequence[Message]) -> list[dict[str, Any]]:
    known: set[str] = set()  # ids of calls so far
    for index, message in enumerate(asked):
        if message.role == "tool" and message.tool_call_id is not None and message.tool_call_id not in known:
            raise InvalidRequest(
                f"messages.{index}.tool_call_id: '{message.tool_call_id[:80]}' is the id of no call before it. Send "
                "the call along with its result.",
                param=f"messages.{index}.tool_call_id",
            )
        known |= {call.id for call in message.tool_calls or ()}
    return [_message(message, f"messages.{index}") for index, message in enumerate(asked)]


def _message(message: Message, where: str) -> dict[str, Any]:
    """Return a message for the template. Raises InvalidRequest with the position of unsupported content."""
    if message.content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content: a {message.role} message needs content.", param=f"{where}.content")
    for part in message.content if isinstance(message.content, list) else ():
        if isinstance(part, ChatOtherPart):
            raise InvalidRequest(
                f"{where}.content: a part of type {part.type} is not supported; this server takes text.",
                param=f"{where}.content",
            )
    return message.model_dump(exclude_none=True)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [part for part in prompt if not isinstance(part, int)]
