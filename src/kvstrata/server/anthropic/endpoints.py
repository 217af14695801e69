"""Routes of Anthropic's Messages API."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response
from starlette.types import Scope

from kvstrata.server.anthropic.request import ignored_tools, parse_messages, parse_prompt
from kvstrata.server.anthropic.response import MessagesWriter, messages_error, messages_error_responses
from kvstrata.server.anthropic.schema import CountTokensRequest, CountTokensResponse, MessagesRequest, MessagesResponse
from kvstrata.server.api import Api
from kvstrata.server.chat.generation import Generation, build_chat_generation, check_model
from kvstrata.server.chat.request import GenerationParams
from kvstrata.server.chat.serving import GenerationResponse
from kvstrata.server.http.access import salt_of
from kvstrata.server.http.json_body import document_body, parse_json, read, read_aside
from kvstrata.server.state import ServerState, state_of

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_MESSAGE = {
    "model": MessagesResponse,
    "description": "The reply; with `stream` as server-sent events",
    "content": {"text/event-stream": {"schema": _EVENT}},
}


@router.post(
    "",
    summary="The next message of a chat, as Anthropic's API has it",
    responses={200: _MESSAGE, **messages_error_responses(400, 401, 404, 408, 413, 429, 503)},
    openapi_extra=document_body(MessagesRequest),
)
async def messages(request: Request) -> Response:
    state = state_of(request)
    asked, generation = await read(request, _read_messages)
    return GenerationResponse(
        state, generation, MessagesWriter(generation.id, asked.model or state.name), stream=bool(asked.stream)
    )


@router.post(
    "/count_tokens",
    summary="How many tokens a prompt has",
    responses=messages_error_responses(400, 401, 404, 408, 413, 503),
    openapi_extra=document_body(CountTokensRequest),
)
async def count_tokens(request: Request) -> CountTokensResponse:
    return {"input_tokens": await read_aside(request, _count_tokens)}


def _read_messages(state: ServerState, body: bytes, scope: Scope) -> tuple[MessagesRequest, Generation]:
    asked = parse_json(MessagesRequest, body, state.limits.max_items)
    state.ignored_tools.log_tools(ignored_tools(asked))
    return asked, build_chat_generation(state, parse_messages(asked), scope, f"msg_{uuid.uuid4().hex[:24]}")


def _count_tokens(state: ServerState, body: bytes, scope: Scope) -> int:
    """Return the number of tokens of the prompt that /v1/messages would make of the same body."""
    asked = parse_json(CountTokensRequest, body, state.limits.max_items)
    check_model(state, asked.model)
    chat = parse_prompt(asked, GenerationParams())
    return len(state.renderer.render(chat, salt_of(scope, None)).ids)


API = Api(
    ("/v1/messages",),
    (router,),
    (MessagesRequest, CountTokensRequest),
    error_body=messages_error,
    error_event="error",
    parsers={"/v1/messages": lambda body: parse_messages(parse_json(MessagesRequest, body))},
)
