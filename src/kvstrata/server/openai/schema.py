"""Request bodies and response types of OpenAI's chat and completions APIs.

Bodies: types and ranges are checked; unknown fields are ignored, and null means the default. Response types are
dictionaries rather than models: an event is sent for every token, so building one must be cheap.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from kvstrata.engine.request import TokenUsage
from kvstrata.server.http.json_body import Items, JsonText, RequestModel

MAX_STOPS = 64
MAX_CHOICES = 128
MAX_STOP_CHARS = 1024
INT64 = 2**63


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class ChatTextPart(RequestModel):
    type: Literal["text"]
    text: str


class ChatRefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


class ChatOtherPart(RequestModel):
    """An image, audio clip or file; accepted here so that the refusal can name the type."""

    type: Literal["image_url", "input_audio", "file", "video_url"]


Part = Annotated[ChatTextPart | ChatRefusalPart | ChatOtherPart, Field(discriminator="type")]


class CalledFunction(RequestModel):
    name: str = Field(min_length=1)
    arguments: str


class ToolCallMade(RequestModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCallMade] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionOffered(RequestModel):
    # Additional fields of a function are passed to the template.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolOffered(RequestModel):
    type: Literal["function"]
    function: FunctionOffered


# Bounded: each is compiled on arrival and searched for in the whole reply; long ones would delay other requests.
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class JsonSchemaFormat(RequestModel):
    # `schema` is a method of every pydantic model.
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema")


class StructuredOutputs(RequestModel):
    """A constraint in vLLM's form: exactly one of these fields."""

    json_: dict[str, Any] | JsonText | None = Field(None, alias="json", description="A JSON schema")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1)
    choice: Items[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1, description="In Lark's form")


class NamedFunction(RequestModel):
    name: str = Field(min_length=1)


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class SamplingFields(RequestModel):
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


class ChatCompletionRequest(SamplingFields):
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


class CompletionRequest(SamplingFields):
    prompt: AnyPrompt
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


Finish = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionUsage(TypedDict):
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


class CalledFunctionResponse(TypedDict):
    name: str
    arguments: str


class ToolCallResponse(TypedDict):
    index: NotRequired[int]  # in streams
    id: str
    type: Literal["function"]
    function: CalledFunctionResponse


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]  # the name that many servers use; OpenAI's chat API has none
    tool_calls: NotRequired[list[ToolCallResponse]]


class ChatChoiceResponse(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceResponse]
    usage: CompletionUsage


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoiceResponse(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoiceResponse]
    usage: CompletionUsage


class ModelResponse(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    # Anthropic's names for the same, so that its clients can read the list too.
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelResponse]
    has_more: bool
    first_id: str
    last_id: str


def completion_usage(usage: TokenUsage) -> CompletionUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
