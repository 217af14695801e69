"""/tokenize and /detokenize, named as in vLLM: the same token ids that /v1 would compute, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.types import Scope
from typing_extensions import TypedDict

from kvstrata.errors import InvalidRequest
from kvstrata.server.conversation.body import Asked, Items, body_of, read, read_body
from kvstrata.server.conversation.chat import Chat, ThinkingWanted
from kvstrata.server.conversation.job import check_model
from kvstrata.server.conversation.lengths import require_possible_text
from kvstrata.server.conversation.prompt import chat_prompt
from kvstrata.server.conversation.wire import json_response
from kvstrata.server.errors import Shape, answers
from kvstrata.server.openai.ask import messages_of
from kvstrata.server.openai.schema import Message, TokenId, ToolOffered
from kvstrata.server.service import Service
from kvstrata.text.tokenizer import decode_ids, encode_prompt, encode_rendered, require_unicode, token_text

router = APIRouter(tags=["Tokens"])


class TokenizeAsked(Asked):
    """A prompt or messages to tokenize; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="With prompt. Left out: true")
    messages: Items[Message] | None = Field(None, min_length=1)
    tools: Items[ToolOffered] | None = Field(None, description="With messages")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="With messages")
    reasoning_effort: str | None = Field(None, description="With messages")
    return_token_strs: bool | None = None


class DetokenizeAsked(Asked):
    model: str | None = None
    tokens: Items[TokenId]


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    prompt: str


ASKED = (TokenizeAsked, DetokenizeAsked)
ERROR_SHAPES: dict[str, Shape] = {}


@router.post(
    "/tokenize",
    summary="Token ids of a prompt or of messages",
    response_model=TokenizeAnswer,
    responses=answers(400, 401, 404, 408, 413, 429, 503),
    openapi_extra=body_of(TokenizeAsked),
)
async def tokenize(request: Request) -> Response:
    return await read(request, _tokenized)


@router.post(
    "/detokenize",
    summary="The text of token ids",
    response_model=DetokenizeAnswer,
    responses=answers(400, 401, 404, 408, 413, 429, 503),
    openapi_extra=body_of(DetokenizeAsked),
)
async def detokenize(request: Request) -> Response:
    return await read(request, _detokenized)


def _tokenized(service: Service, body: bytes, scope: Scope) -> Response:
    asked = read_body(TokenizeAsked, body, service.max_items)
    check_model(service, asked.model)
    ids = _ids(service, asked, scope)
    texts = [token_text(service.loaded.tokenizer, id) for id in ids] if asked.return_token_strs else None
    answer: TokenizeAnswer = {
        "count": len(ids),
        "max_model_len": service.context_tokens,
        "tokens": list(ids),
        "token_strs": texts,
    }
    return json_response(answer)


def _ids(service: Service, asked: TokenizeAsked, scope: Scope) -> tuple[int, ...]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if asked.prompt is not None:
        require_possible_text(service, asked.prompt)
        if asked.add_special_tokens is not False:
            return encode_prompt(service.loaded.tokenizer, asked.prompt)
        require_unicode(asked.prompt, param="prompt")
        return encode_rendered(service.loaded.tokenizer, asked.prompt)
    chat = Chat(
        messages=messages_of(asked.messages or ()),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in asked.tools or ()),
        thinking=ThinkingWanted(effort=asked.reasoning_effort),
        template_kwargs=asked.chat_template_kwargs or {},
    )
    return chat_prompt(service, chat, scope).ids


def _detokenized(service: Service, body: bytes, _scope: Scope) -> Response:
    asked = read_body(DetokenizeAsked, body, service.max_items)
    check_model(service, asked.model)
    beyond = next((token for token in asked.tokens if token >= service.loaded.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"tokens: {beyond} is not a token id of this model; they go from 0 to {service.loaded.vocab_size - 1}.",
            param="tokens",
        )
    answer: DetokenizeAnswer = {"prompt": decode_ids(service.loaded.tokenizer, asked.tokens)}
    return json_response(answer)
