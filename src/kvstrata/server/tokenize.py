"""/tokenize and /detokenize, named as in vLLM: the same token ids that /v1 would compute, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.types import Scope
from typing_extensions import TypedDict

from kvstrata.errors import InvalidRequest
from kvstrata.server.api import Api
from kvstrata.server.chat.generation import check_model
from kvstrata.server.chat.request import ChatRequest, ThinkingParams
from kvstrata.server.chat.writer import json_response
from kvstrata.server.http.access import salt_of
from kvstrata.server.http.errors import error_responses
from kvstrata.server.http.json_body import Items, RequestModel, document_body, parse_json, read
from kvstrata.server.openai.request import messages_of
from kvstrata.server.openai.schema import Message, TokenId, ToolOffered
from kvstrata.server.state import ServerState
from kvstrata.text.tokenizer import decode_ids, encode_prompt, encode_rendered, require_unicode, token_text

router = APIRouter(tags=["Tokens"])


class TokenizeRequest(RequestModel):
    """A prompt or messages to tokenize; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="With prompt. Left out: true")
    messages: Items[Message] | None = Field(None, min_length=1)
    tools: Items[ToolOffered] | None = Field(None, description="With messages")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="With messages")
    reasoning_effort: str | None = Field(None, description="With messages")
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Items[TokenId]


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


@router.post(
    "/tokenize",
    summary="Token ids of a prompt or of messages",
    response_model=TokenizeResponse,
    responses=error_responses(400, 401, 404, 408, 413, 429, 503),
    openapi_extra=document_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    return await read(request, _tokenized)


@router.post(
    "/detokenize",
    summary="The text of token ids",
    response_model=DetokenizeResponse,
    responses=error_responses(400, 401, 404, 408, 413, 429, 503),
    openapi_extra=document_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    return await read(request, _detokenized)


def _tokenized(state: ServerState, body: bytes, scope: Scope) -> Response:
    asked = parse_json(TokenizeRequest, body, state.limits.max_items)
    check_model(state, asked.model)
    ids = _ids(state, asked, scope)
    texts = [token_text(state.loaded.tokenizer, id) for id in ids] if asked.return_token_strs else None
    answer: TokenizeResponse = {
        "count": len(ids),
        "max_model_len": state.limits.context_tokens,
        "tokens": list(ids),
        "token_strs": texts,
    }
    return json_response(answer)


def _ids(state: ServerState, asked: TokenizeRequest, scope: Scope) -> tuple[int, ...]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if asked.prompt is not None:
        state.limits.check_chars(len(asked.prompt), param="prompt")
        if asked.add_special_tokens is not False:
            return encode_prompt(state.loaded.tokenizer, asked.prompt)
        require_unicode(asked.prompt, param="prompt")
        return encode_rendered(state.loaded.tokenizer, asked.prompt)
    chat = ChatRequest(
        messages=messages_of(asked.messages or ()),
        tools=tuple(tool.model_dump(exclude_none=True) for tool in asked.tools or ()),
        thinking=ThinkingParams(effort=asked.reasoning_effort),
        template_kwargs=asked.chat_template_kwargs or {},
    )
    return state.renderer.render(chat, salt_of(scope, None)).ids


def _detokenized(state: ServerState, body: bytes, _scope: Scope) -> Response:
    asked = parse_json(DetokenizeRequest, body, state.limits.max_items)
    check_model(state, asked.model)
    beyond = next((token for token in asked.tokens if token >= state.loaded.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"tokens: {beyond} is not a token id of this model; they go from 0 to {state.loaded.vocab_size - 1}.",
            param="tokens",
        )
    answer: DetokenizeResponse = {"prompt": decode_ids(state.loaded.tokenizer, asked.tokens)}
    return json_response(answer)


API = Api(("/tokenize", "/detokenize"), (router,), (TokenizeRequest, DetokenizeRequest))
