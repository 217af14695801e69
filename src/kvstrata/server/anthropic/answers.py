"""Response types of Anthropic's Messages API, as the OpenAPI document shows them and the code builds them."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from kvstrata.engine.request import TokenUsage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(TypedDict):
    """Token counts of a message. The three input counts add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextAnswer(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingAnswer(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseAnswer(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer


class MessagesAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockAnswer]
    stop_reason: StopReason | None  # None: at the start of a stream
    stop_sequence: str | None
    usage: MessageUsage


class CountAnswer(TypedDict):
    input_tokens: int


class MessagesErrorBody(TypedDict):
    type: str
    message: str


class MessagesErrorAnswer(TypedDict):
    type: Literal["error"]
    error: MessagesErrorBody


def message_usage(usage: TokenUsage) -> MessageUsage:
    """Return the token counts in Anthropic's form. Computed tokens count as plain input, and cache writes are always 0:
    writing to the cache costs nothing here, and clients that compute a bill from these names would charge for it."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
