"""Response types of /v1/responses, as the OpenAPI document shows them, and the fields that each response repeats."""

from __future__ import annotations

import time
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kvstrata.engine.request import Sampling, TokenUsage
from kvstrata.server.responses.schema import FunctionTool, ResponseAsked

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningAnswer(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCallAnswer(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomCallAnswer(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


OutputAnswer = MessageAnswer | ReasoningAnswer | FunctionCallAnswer | CustomCallAnswer


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class UsageAnswer(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class FailedAnswer(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: FailedAnswer | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputAnswer]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: UsageAnswer | None
    user: str | None


class DeletedAnswer(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def opening(asked: ResponseAsked, response_id: str, model: str, defaults: Sampling) -> ResponseAnswer:
    """Return the response at its start, with empty output. Most of its fields repeat the request."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": asked.reasoning.model_dump() if asked.reasoning else {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": defaults.temperature if asked.temperature is None else asked.temperature,
        "text": _text(asked),
        "tool_choice": _choice(asked),
        "tools": [_tool(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": defaults.top_p if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }


def usage_answer(usage: TokenUsage) -> UsageAnswer:
    """Return the token counts. Reasoning tokens and cache writes are not counted separately and are always 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text(asked: ResponseAsked) -> dict[str, Any]:
    form = asked.text.format if asked.text else None
    told: dict[str, Any] = {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}}
    if asked.text and asked.text.verbosity:
        told["verbosity"] = asked.text.verbosity
    return told


def _choice(asked: ResponseAsked) -> Any:
    choice = asked.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as the response repeats it. Like OpenAI, it always contains a function's `parameters` and
    `strict`."""
    always = {"parameters": None, "strict": None} if isinstance(tool, FunctionTool) else {}
    return {**always, **tool.model_dump(exclude_unset=True)}
