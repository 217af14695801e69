"""Request bodies and response types of OpenAI's Responses API, and the fields that each response repeats."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter
from typing_extensions import TypedDict

from kvstrata.engine.request import Sampling, TokenUsage
from kvstrata.server.http.json_body import Items, RequestModel

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


class TextPart(RequestModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


class OtherPart(RequestModel):
    """An image, audio clip or file; accepted here so that the refusal can name the type."""

    type: str


Part = Annotated[
    Annotated[TextPart, Tag("text_part")] | Annotated[RefusalPart, Tag("refusal")] | Annotated[OtherPart, Tag("other")],
    _by(_tag_of_part, "a part of a content"),
]


class Item(RequestModel):
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


class Offered(RequestModel):
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


class ChosenTool(RequestModel):
    """A tool that must be called. Without a name: a tool that runs elsewhere."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(RequestModel):
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


class Reasoning(RequestModel):
    effort: str | None = Field(None, description="none, minimal, low, medium, high, ...")
    summary: str | None = None


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    # `schema` is a method of every pydantic model.
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="With type json_schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(RequestModel):
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
    text: TextOptions | None = None
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


Status = Literal["in_progress", "completed", "incomplete", "failed"]

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(OutputTopLogprob):
    top_logprobs: list[OutputTopLogprob]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class MessageItemResponse(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItemResponse(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | None


class FunctionCallResponse(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomCallResponse(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


OutputItemResponse = MessageItemResponse | ReasoningItemResponse | FunctionCallResponse | CustomCallResponse


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class FailureDetails(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponsesResponse(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: FailureDetails | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItemResponse]
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
    usage: ResponsesUsage | None
    user: str | None


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def opening(asked: ResponsesRequest, response_id: str, model: str, defaults: Sampling) -> ResponsesResponse:
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


def responses_usage(usage: TokenUsage) -> ResponsesUsage:
    """Return the token counts. Reasoning tokens and cache writes are not counted separately and are always 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text(asked: ResponsesRequest) -> dict[str, Any]:
    form = asked.text.format if asked.text else None
    text: dict[str, Any] = {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}}
    if asked.text and asked.text.verbosity:
        text["verbosity"] = asked.text.verbosity
    return text


def _choice(asked: ResponsesRequest) -> Any:
    choice = asked.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_none=True)


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as the response repeats it. Like OpenAI, it always contains a function's `parameters` and
    `strict`."""
    always = {"parameters": None, "strict": None} if isinstance(tool, FunctionTool) else {}
    return {**always, **tool.model_dump(exclude_unset=True)}
