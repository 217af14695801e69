"""What is answered, in Anthropic's words: the types that the OpenAPI document shows and the code builds."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from kvstrata.engine.request import TokenUsage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(TypedDict):
    """The three inputs add up to the prompt."""

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
    """What was computed counts as plain input. Writing to the cache has no price here, and nobody asks for it: a number
    of its own would only tell clients that bill by these names of a cost that is none."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
