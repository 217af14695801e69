"""Response types of OpenAI's chat and completions APIs, as the OpenAPI document shows them and the code builds them.

Typed dictionaries rather than models: an event is sent for every token, so building one must be cheap.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from kvstrata.engine.request import TokenUsage

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
    reasoning_content: NotRequired[str]  # the name that many servers use; OpenAI's chat API has none
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
    # Anthropic's names for the same, so that its clients can read the list too.
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelAnswer]
    has_more: bool
    first_id: str
    last_id: str


def token_usage_answer(usage: TokenUsage) -> TokenUsageAnswer:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
