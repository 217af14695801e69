"""What a client may ask for, in Anthropic's words.

Knows types and ranges; fields that are not named here are ignored, and null means the default. Does not know what this
server can do: turns.py and ask.py refuse that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kvstrata.server.conversation.body import Asked, Items

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
INT64 = 2**63


class Marked(Asked):
    """What may carry a mark for Anthropic's cache (cache_control.py): with a ttl, 5m or 1h, the prompt is pinned for so
    long. Of any form: it is never refused."""

    cache_control: Any = None


class TextBlock(Marked):
    type: Literal["text"]
    text: str


class ThinkingBlock(Marked):
    """Its signature is not looked at: it is this server's own, or another's that cannot be checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Marked):
    type: Literal["redacted_thinking"]


class DocumentBlock(Marked):
    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any] | None = None


class ToolReferenceBlock(Marked):
    """In the result of a client's search for tools: one that it has found."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolChangeBlock(Marked):
    """In a system message: a tool is offered, or no longer, from here on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: dict[str, Any]


class OtherBlock(Marked):
    """An image, or whatever else there is: taken so that the refusal can name it."""

    type: str


def _block_kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) and kind in _KINDS else "other"


_RESULT_KINDS = frozenset({"text", "document", "tool_reference"})
_KINDS = _RESULT_KINDS | {
    "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_addition", "tool_removal",
}  # fmt: skip


def _result_block_kind(block: Any) -> str:
    kind = _block_kind(block)
    return kind if kind in _RESULT_KINDS else "other"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_result_block_kind),
]


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ToolReferenceBlock, Tag("tool_reference")]
    | Annotated[ToolChangeBlock, Tag("tool_addition")]
    | Annotated[ToolChangeBlock, Tag("tool_removal")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_block_kind),
]


class TurnAsked(Asked):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block] | None = Field(None, description="Only a system message may be without")


class ToolAsked(Marked):
    """One that the client runs has an `input_schema`. Those without are Anthropic's own; `type` tells which."""

    type: str | None = None
    name: str | None = Field(None, min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceAsked(Asked):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With type tool")
    disable_parallel_tool_use: bool | None = None


class ThinkingAsked(Asked):
    # Not a list of words: new ones come, and what is not known here is left to the model.
    type: str = Field(description="enabled, disabled, adaptive, ...")


class FormatAsked(Asked):
    type: Literal["json_schema"]
    # `schema` is a method of every pydantic model.
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Asked):
    effort: str | None = Field(None, description="low, medium, high, ...")
    format: FormatAsked | None = None


# Each is searched for in the whole reply, and prepared where the request arrives: long ones would hold up others.
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class PromptAsked(Asked):
    """What makes the prompt: all that counting needs."""

    model: str | None = Field(None, description="Left out: the one that is served")
    messages: Items[TurnAsked] = Field(min_length=1)
    system: str | Items[Block] | None = None
    tools: Items[ToolAsked] | None = None
    tool_choice: ToolChoiceAsked | None = None
    thinking: ThinkingAsked | None = None
    output_config: OutputConfig | None = None


class CountAsked(PromptAsked):
    pass


class MessagesAsked(PromptAsked, Marked):
    max_tokens: int = Field(ge=1, description="A bound: what the context leaves may be less")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64, description="0 or -1: off")
    stop_sequences: Items[StopSequence] | None = Field(None, max_length=MAX_STOPS)
    output_format: FormatAsked | None = Field(None, description="The older name of output_config.format")
    cache_salt: str | None = Field(None, description="Requests with different salts never share cached state")
