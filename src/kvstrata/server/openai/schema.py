"""Request bodies of OpenAI's chat and completions APIs.

Checks types and ranges; unknown fields are ignored, and null means the default. Requests that are valid but that this
model or server cannot serve are refused by ask.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from kvstrata.server.conversation.body import Asked, Items, JsonText

MAX_STOPS = 64
MAX_CHOICES = 128
MAX_STOP_CHARS = 1024
INT64 = 2**63


class StreamOptions(Asked):
    include_usage: bool | None = None


class TextPart(Asked):
    type: Literal["text"]
    text: str


class RefusalPart(Asked):
    type: Literal["refusal"]
    refusal: str


class OtherPart(Asked):
    """An image, audio clip or file; accepted here so that the refusal can name the type."""

    type: Literal["image_url", "input_audio", "file", "video_url"]


Part = Annotated[TextPart | RefusalPart | OtherPart, Field(discriminator="type")]


class CalledFunction(Asked):
    name: str = Field(min_length=1)
    arguments: str


class ToolCallMade(Asked):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCallMade] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionOffered(Asked):
    # Additional fields of a function are passed to the template.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolOffered(Asked):
    type: Literal["function"]
    function: FunctionOffered


# Bounded: each is compiled on arrival and searched for in the whole reply; long ones would delay other requests.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class JsonSchemaFormat(Asked):
    # `schema` is a method of every pydantic model.
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Asked):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema")


class StructuredOutputs(Asked):
    """A constraint in vLLM's form: exactly one of these fields."""

    json_: dict[str, Any] | JsonText | None = Field(None, alias="json", description="A JSON schema")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1)
    choice: Items[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1, description="In Lark's form")


class NamedFunction(Asked):
    name: str = Field(min_length=1)


class NamedTool(Asked):
    type: Literal["function"]
    function: NamedFunction


class SamplingAsked(Asked):
    model: str | None = Field(None, description="Left out: the one that is served")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, fail_fast=True, description="Token id to what is added to its logit"
    )
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices; the prompt is computed once for all")
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(None, description="Requests with different salts never share cached state")
    prompt_cache_key: str | None = Field(None, description="Requests with the same one are a session")


class ChatAsked(SamplingAsked):
    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Items[ToolOffered] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = Field(None, description="none, minimal, low, medium, high, ...")
    prompt_cache_retention: str | None = Field(None, description="24h: the prompt is pinned for so long, in the quota")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Handed to the chat template as they are")
    # Fields of OpenAI's API that are not supported: refused rather than ignored.
    functions: Items[Any] | None = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


TokenId = Annotated[int, Field(ge=0, lt=INT64)]


def _tag_of_prompt(prompt: Any) -> str:
    """Return the kind of a prompt by its first item, so that a long list is validated as one kind only."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "ids" if isinstance(first, int) else "several ids" if isinstance(first, list) else "texts"


AnyPrompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Items[str], Tag("texts")]
    | Annotated[Items[TokenId], Tag("ids")]
    | Annotated[Items[Items[TokenId]], Tag("several ids")],
    Discriminator(_tag_of_prompt),
]


class CompletionAsked(SamplingAsked):
    prompt: AnyPrompt
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
