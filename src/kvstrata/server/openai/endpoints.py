"""Routes of OpenAI's chat, completions and models. Assigns a job, a wire and documentation to each path."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from kvstrata.errors import InvalidRequest, ModelNotFound
from kvstrata.server.conversation.body import body_of, read
from kvstrata.server.conversation.job import Job
from kvstrata.server.conversation.reply import Reply
from kvstrata.server.errors import Shape, answers
from kvstrata.server.openai.answers import ChatAnswer, CompletionAnswer, ModelAnswer, ModelList
from kvstrata.server.openai.ask import read_chat, read_completion
from kvstrata.server.openai.schema import ChatAsked, CompletionAsked, SamplingAsked
from kvstrata.server.openai.wires import ChatChoice, CompletionChoice, OpenAIWire, envelope
from kvstrata.server.service import Service, service_of

router = APIRouter(prefix="/v1", tags=["OpenAI"])

ASKED = (ChatAsked, CompletionAsked)
ERROR_SHAPES: dict[str, Shape] = {}  # the server's own
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
    return {200: whole, **answers(400, 401, 404, 408, 413, 429, 503)}


@router.post(
    "/chat/completions",
    summary="The next message of a chat",
    responses=answered_by(ChatAnswer),
    openapi_extra=body_of(ChatAsked),
)
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    asked, job = await read(request, read_chat)
    return Reply(service, job, chat_wire(service, asked, job), stream=bool(asked.stream))


@router.post(
    "/completions",
    summary="The continuation of one or more texts",
    responses=answered_by(CompletionAnswer),
    openapi_extra=body_of(CompletionAsked),
)
async def completions(request: Request) -> Response:
    service = service_of(request)
    asked, job = await read(request, read_completion)
    choices = [CompletionChoice(index, service.loaded.tokenizer) for index in range(len(job.requests))]
    wire = OpenAIWire(envelope(service, job.id, "text_completion"), choices, include_usage=_include_usage(asked))
    return Reply(service, job, wire, stream=bool(asked.stream))


@router.get("/models", summary="The model that is served", responses=answers(401))
async def list_models(request: Request) -> ModelList:
    service = service_of(request)
    only = _model(service)
    return {"object": "list", "data": [only], "has_more": False, "first_id": only["id"], "last_id": only["id"]}


@router.get("/models/{model:path}", summary="One model", responses=answers(401, 404))
async def get_model(request: Request, model: str) -> ModelAnswer:
    service = service_of(request)
    if not service.answers_to(model):
        raise ModelNotFound(f"The model '{model[:200]}' is not served here; this is '{service.name}'.", param="model")
    return _model(service)


async def _not_served(request: Request) -> Response:
    raise InvalidRequest(
        f"{request.url.path}: this server writes text and takes text. It has no embeddings, images or sound.",
        code="not_supported",
    )


for _path in NOT_SERVED:
    router.add_api_route(_path, _not_served, methods=["POST"], include_in_schema=False)


def chat_wire(service: Service, asked: ChatAsked, job: Job) -> OpenAIWire:
    kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    choices = [ChatChoice(index, service.loaded.tokenizer) for index in range(len(job.requests))]
    return OpenAIWire(envelope(service, job.id, kind), choices, include_usage=_include_usage(asked))


def _include_usage(asked: SamplingAsked) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_usage)


def _model(service: Service) -> ModelAnswer:
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvstrata",
        "max_model_len": service.context_tokens,
        "type": "model",
        "display_name": service.name,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
    }
