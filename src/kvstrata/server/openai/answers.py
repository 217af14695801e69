"""What is answered, in OpenAI's words: the types that the OpenAPI document shows and the code builds.

Typed dictionaries rather than models: an event goes out for every token, so building one must cost next to nothing.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from kvstrata.engine.request import TokenUsage

# Many clients end a line of a stream at these too, in the middle of an event. Below U+0020 json escapes by itself.
SEPARATORS = {"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}

Finish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class TokenUsageAnswer(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class FunctionAnswer(TypedDict):
    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    index: NotRequired[int]  # in streams
    id: str
    type: Literal["function"]
    function: FunctionAnswer


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]  # as many servers call it; OpenAI's chat has no name for it
    tool_calls: NotRequired[list[ToolCallAnswer]]


class ChatChoiceAnswer(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatAnswer(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceAnswer]
    usage: TokenUsageAnswer


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoiceAnswer(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish


class CompletionAnswer(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceAnswer]
    usage: TokenUsageAnswer


class ModelAnswer(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelAnswer]


def token_usage_answer(usages: list[TokenUsage]) -> TokenUsageAnswer:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def json_bytes(answer: Any) -> bytes:
    # "replace": a model may write half a surrogate pair into a tool call, which no UTF-8 can carry.
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for separator, escaped in SEPARATORS.items():
        text = text.replace(separator, escaped)
    return text.encode("utf-8", "replace")
