"""Request bodies and response types of Anthropic's Messages API.

Bodies: types and ranges are checked; unknown fields are ignored, and null means the default. Requests that are valid
but cannot be served here are refused by request.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from kvstrata.engine.request import TokenUsage
from kvstrata.server.http.json_body import Items, RequestModel

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
INT64 = 2**63


class Marked(RequestModel):
    """An object with an optional `cache_control` (request.py): with a ttl of 5m or 1h, the prompt is pinned for
    that time. Any value is accepted."""

    cache_control: Any = None


class TextBlock(Marked):
    type: Literal["text"]
    text: str


class ThinkingBlock(Marked):
    """Thinking of an earlier reply. The signature is not checked: it is this server's own, or another server's that
    cannot be verified."""

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
    """A tool that a client's tool search found, as part of its result."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolChangeBlock(Marked):
    """A block of a system message that adds or removes a tool from this point on."""

    type: Literal["tool_addition", "tool_removal"]
    tool: dict[str, Any]


class OtherBlock(Marked):
    """A block of an unsupported type, such as an image; accepted here so that the refusal can name the type."""

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


class TurnMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | Items[Block] | None = Field(None, description="Only a system message may be without")


class OfferedTool(Marked):
    """A tool that a request offers. Tools that the client runs have an `input_schema`; Anthropic's own have none and
    are identified by `type`."""

    type: str | None = None
    name: str | None = Field(None, min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With type tool")
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(RequestModel):
    # Any string: new types appear, and an unknown one leaves the choice to the model.
    type: str = Field(description="enabled, disabled, adaptive, ...")


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    # `schema` is a method of every pydantic model.
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: str | None = Field(None, description="low, medium, high, ...")
    format: OutputFormat | None = None


# Bounded: each is compiled on arrival and searched for in the whole reply; long ones would delay other requests.
StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class MessagesPrompt(RequestModel):
    """The part of a request that makes the prompt; token counting needs nothing else."""

    model: str | None = Field(None, description="Left out: the one that is served")
    messages: Items[TurnMessage] = Field(min_length=1)
    system: str | Items[Block] | None = None
    tools: Items[OfferedTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


class CountTokensRequest(MessagesPrompt):
    pass


class MessagesRequest(MessagesPrompt, Marked):
    max_tokens: int = Field(ge=1, description="A bound: what the context leaves may be less")
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64, description="0 or -1: off")
    stop_sequences: Items[StopSequence] | None = Field(None, max_length=MAX_STOPS)
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format")
    cache_salt: str | None = Field(None, description="Requests with different salts never share cached state")


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(TypedDict):
    """Token counts of a message. The three input counts add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlockResponse(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlockResponse(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockResponse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockResponse = TextBlockResponse | ThinkingBlockResponse | ToolUseBlockResponse


class MessagesResponse(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockResponse]
    stop_reason: StopReason | None  # None: at the start of a stream
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensResponse(TypedDict):
    input_tokens: int


class MessagesErrorBody(TypedDict):
    type: str
    message: str


class MessagesErrorResponse(TypedDict):
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
