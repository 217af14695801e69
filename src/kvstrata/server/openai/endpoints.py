"""Routes of OpenAI's chat, completions and models."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Scope

from kvstrata.errors import InvalidRequest, ModelNotFound
from kvstrata.server.api import Api
from kvstrata.server.chat.generation import Generation, build_chat_generation, build_text_generation
from kvstrata.server.chat.serving import GenerationResponse
from kvstrata.server.http.errors import error_responses
from kvstrata.server.http.json_body import document_body, parse_json, read
from kvstrata.server.openai.request import parse_chat, parse_completion
from kvstrata.server.openai.response import ChatChoice, CompletionChoice, OpenAIWriter, envelope
from kvstrata.server.openai.schema import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    ModelList,
    ModelResponse,
    SamplingFields,
)
from kvstrata.server.state import ServerState, state_of

router = APIRouter(prefix="/v1", tags=["OpenAI"])

# Paths that clients try and this server does not support. A 404 would look like a wrong address.
NOT_SERVED = (
    "/embeddings", "/images/generations", "/images/edits", "/images/variations", "/audio/speech",
    "/audio/transcriptions", "/audio/translations",
)  # fmt: skip


def answered_by(answer: Any) -> dict[int | str, dict[str, Any]]:
    # The `data` of each event is a chunk as JSON, or [DONE].
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream = {"text/event-stream": {"schema": event}}
    whole = {"model": answer, "description": "The reply; with `stream` as server-sent events", "content": stream}
    return {200: whole, **error_responses(400, 401, 404, 408, 413, 429, 503)}


@router.post(
    "/chat/completions",
    summary="The next message of a chat",
    responses=answered_by(ChatCompletionResponse),
    openapi_extra=document_body(ChatCompletionRequest),
)
async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    asked, generation = await read(request, read_chat)
    return GenerationResponse(state, generation, chat_writer(state, asked, generation), stream=bool(asked.stream))


@router.post(
    "/completions",
    summary="The continuation of one or more texts",
    responses=answered_by(CompletionResponse),
    openapi_extra=document_body(CompletionRequest),
)
async def completions(request: Request) -> Response:
    state = state_of(request)
    asked, generation = await read(request, read_completion)
    choices = [CompletionChoice(index, state.loaded.tokenizer) for index in range(len(generation.requests))]
    writer = OpenAIWriter(
        envelope(state, generation.id, "text_completion"), choices, include_usage=_include_usage(asked)
    )
    return GenerationResponse(state, generation, writer, stream=bool(asked.stream))


@router.get("/models", summary="The model that is served", responses=error_responses(401))
async def list_models(request: Request) -> ModelList:
    state = state_of(request)
    only = _model(state)
    return {"object": "list", "data": [only], "has_more": False, "first_id": only["id"], "last_id": only["id"]}


@router.get("/models/{model:path}", summary="One model", responses=error_responses(401, 404))
async def get_model(request: Request, model: str) -> ModelResponse:
    state = state_of(request)
    if not state.answers_to(model):
        raise ModelNotFound(f"The model '{model[:200]}' is not served here; this is '{state.name}'.", param="model")
    return _model(state)


async def _not_served(request: Request) -> Response:
    raise InvalidRequest(
        f"{request.url.path}: this server writes text and takes text. It has no embeddings, images or sound.",
        code="not_supported",
    )


for _path in NOT_SERVED:
    router.add_api_route(_path, _not_served, methods=["POST"], include_in_schema=False)


def read_chat(state: ServerState, body: bytes, scope: Scope) -> tuple[ChatCompletionRequest, Generation]:
    asked = parse_json(ChatCompletionRequest, body, state.limits.max_items)
    return asked, build_chat_generation(state, parse_chat(asked), scope, f"chatcmpl-{uuid.uuid4().hex}")


def read_completion(state: ServerState, body: bytes, scope: Scope) -> tuple[CompletionRequest, Generation]:
    asked = parse_json(CompletionRequest, body, state.limits.max_items)
    return asked, build_text_generation(state, parse_completion(asked), scope, f"cmpl-{uuid.uuid4().hex}")


def chat_writer(state: ServerState, asked: ChatCompletionRequest, generation: Generation) -> OpenAIWriter:
    kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    choices = [ChatChoice(index, state.loaded.tokenizer) for index in range(len(generation.requests))]
    return OpenAIWriter(envelope(state, generation.id, kind), choices, include_usage=_include_usage(asked))


def _include_usage(asked: SamplingFields) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_usage)


def _model(state: ServerState) -> ModelResponse:
    return {
        "id": state.name,
        "object": "model",
        "created": state.started,
        "owned_by": "kvstrata",
        "max_model_len": state.limits.context_tokens,
        "type": "model",
        "display_name": state.name,
        "created_at": datetime.fromtimestamp(state.started, UTC).isoformat(),
    }


API = Api(
    ("/v1",),
    (router,),
    (ChatCompletionRequest, CompletionRequest),
    parsers={
        "/v1/chat/completions": lambda body: parse_chat(parse_json(ChatCompletionRequest, body)),
        "/v1/completions": lambda body: parse_completion(parse_json(CompletionRequest, body)),
    },
)
