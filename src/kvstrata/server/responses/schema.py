"""Request bodies of /v1/responses.

Checks types and ranges; unknown fields are ignored, and null means the default. Items and tools of unknown types have
their own classes: such items are refused by name (turns.py), such tools are left out (tools.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from kvstrata.server.conversation.body import Asked, Items

ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
              "custom_tool_call_output", "item_reference")  # fmt: skip
TOOL_TYPES = ("function", "custom", "namespace")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _tag_of_part(part: Any) -> str | None:
    kind = _type_of(part)
    if kind in TEXT_PARTS:
        return "text_part"
    return "refusal" if kind == "refusal" else _other(kind)


def _tag_of_item(item: Any) -> str | None:
    """Return the kind of an item. Messages and references may omit `type`; an object with an id and no role is a
    reference."""
    kind = _type_of(item)
    if kind is None and isinstance(item, dict):
        return "item_reference" if "id" in item and "role" not in item else "message"
    return kind if kind in ITEM_TYPES else _other(kind)


def _tag_of_tool(tool: Any) -> str | None:
    kind = _type_of(tool)
    return kind if kind in TOOL_TYPES else _other(kind)


def _type_of(value: Any) -> Any:
    """Return the type of a JSON object that is validated or of a model that is serialized."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _other(kind: Any) -> str | None:
    return "other" if isinstance(kind, str) else None


def _by(tag_of: Any, what: str) -> Discriminator:
    return Discriminator(
        tag_of, custom_error_type="no_type", custom_error_message=f"must be {what}: an object that has a type"
    )


class TextPart(Asked):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(Asked):
    type: Literal["refusal"]
    refusal: str


class OtherPart(Asked):
    """An image, audio clip or file; accepted here so that the refusal can name the type."""

    type: str


Part = Annotated[
    Annotated[TextPart, Tag("text_part")] | Annotated[RefusalPart, Tag("refusal")] | Annotated[OtherPart, Tag("other")],
    _by(_tag_of_part, "a part of a content"),
]


class Item(Asked):
    id: str | None = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Items[Part] | None = None
    content: Items[Part] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str


class CustomCallItem(Item):
    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    namespace: str | None = None
    input: str


class OutputItem(Item):
    """The output of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[Part]


class ReferenceItem(Item):
    type: Literal["item_reference"] = "item_reference"
    id: str  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]


class OtherItem(Item):
    type: str


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    _by(_tag_of_item, "an item"),
]
# Validates stored items: those of requests, and those of responses, which have additional fields.
ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[AnyItem])


class Offered(Asked):
    # The response repeats additional fields of a tool.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)


class FunctionTool(Offered):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Offered):
    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Offered):
    type: Literal["custom"]
    name: str = Field(min_length=1)
    description: str | None = None
    format: CustomFormat | None = None


class OtherTool(Offered):
    """A tool that runs elsewhere: a search, an interpreter, an MCP server."""

    type: str


InnerTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[OtherTool, Tag("other")],
    _by(_tag_of_tool, "a tool"),
]


class NamespaceTool(Offered):
    type: Literal["namespace"]
    name: str = Field(min_length=1)
    tools: Items[InnerTool]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    _by(_tag_of_tool, "a tool"),
]


class ChosenTool(Asked):
    """A tool that must be called. Without a name: a tool that runs elsewhere."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(Asked):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[ChosenTool]


def _tag_of_choice(choice: Any) -> str | None:
    if isinstance(choice, str):
        return "mode"
    kind = _type_of(choice)
    return "allowed" if kind == "allowed_tools" else "chosen" if isinstance(kind, str) else None


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[ChosenTool, Tag("chosen")],
    _by(_tag_of_choice, "none, auto, required, or a choice of tools"),
]


class Reasoning(Asked):
    effort: str | None = Field(None, description="none, minimal, low, medium, high, ...")
    summary: str | None = None


class TextFormat(Asked):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    # `schema` is a method of every pydantic model.
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="With type json_schema")
    strict: bool | None = None


class TextAsked(Asked):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseAsked(Asked):
    model: str | None = Field(None, description="Left out: the one that is served")
    instructions: str | None = None
    input: str | Items[AnyItem] | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Items[str] | None = None
    store: bool | None = Field(None, description="Left out: kept for GET and previous_response_id, within bounds")
    previous_response_id: str | None = None
    text: TextAsked | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    cache_salt: str | None = Field(None, description="Requests with different salts never share cached state")
    prompt_cache_retention: str | None = Field(None, description="24h: the prompt is pinned for so long, in the quota")
    # Repeated in the response, without other effect.
    metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    # Fields of OpenAI's API that are not supported: refused rather than ignored.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
