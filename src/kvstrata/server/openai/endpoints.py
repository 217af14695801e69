"""OpenAI's paths. Knows which job, which choices and which documentation belong to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from kvstrata.errors import InvalidRequest, ModelNotFound
from kvstrata.server.errors import answers
from kvstrata.server.openai.answers import ChatAnswer, CompletionAnswer, ModelAnswer, ModelList
from kvstrata.server.openai.ask import Job, chat_job, completion_job
from kvstrata.server.openai.choices import ChatChoice, CompletionChoice
from kvstrata.server.openai.reply import Reply
from kvstrata.server.openai.schema import ChatAsked, CompletionAsked
from kvstrata.server.service import Service, service_of
from kvstrata.text.bare_calls import BareCallSplitter
from kvstrata.text.harmony import HarmonySplitter
from kvstrata.text.tools import Splitter, ToolCallSplitter, opens_thinking

router = APIRouter(prefix="/v1", tags=["OpenAI"])


def _answered_by(answer: Any) -> dict[int | str, dict[str, Any]]:
    # Of each event: `data` is a chunk as JSON, or [DONE].
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream = {"text/event-stream": {"schema": event}}
    whole = {"model": answer, "description": "The reply; with `stream` as server-sent events", "content": stream}
    return {200: whole, **answers(400, 401, 404, 408, 413, 429, 503)}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """The body is read by hand, in a worker thread and more strictly than FastAPI would; this documents it."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


@router.post(
    "/chat/completions",
    summary="The next message of a chat",
    responses=_answered_by(ChatAnswer),
    openapi_extra=body_of(ChatAsked),
)
async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    job = await _job(request, chat_job)
    return Reply(service, job, _chat_choices(service, job), "chat.completion")


@router.post(
    "/completions",
    summary="The continuation of one or more texts",
    responses=_answered_by(CompletionAnswer),
    openapi_extra=body_of(CompletionAsked),
)
async def completions(request: Request) -> Response:
    service = service_of(request)
    job = await _job(request, completion_job)
    choices = [CompletionChoice(index, service.loaded.tokenizer) for index in range(len(job.requests))]
    return Reply(service, job, choices, "text_completion")


@router.get("/models", summary="The model that is served", responses=answers(401))
async def list_models(request: Request) -> ModelList:
    return {"object": "list", "data": [_model(service_of(request))]}


@router.get("/models/{model:path}", summary="One model", responses=answers(401, 404))
async def get_model(request: Request, model: str) -> ModelAnswer:
    service = service_of(request)
    if model not in service.names:
        raise ModelNotFound(f"The model '{model[:200]}' is not served here; this is '{service.name}'.", param="model")
    return _model(service)


async def _job(request: Request, make: Callable[..., Job]) -> Job:
    require_json(request)
    engine = service_of(request).engine
    # A request that finds no room is told before its body is read, and again before a long prompt is tokenized.
    engine.require_room()
    # Not request.body(), which would keep the bytes as long as the reply takes.
    body = b"".join([chunk async for chunk in request.stream()])
    engine.require_room()
    return await to_thread.run_sync(make, service_of(request), body, request.scope)


def require_json(request: Request) -> None:
    # A web page can post anything else to a local server without asking; JSON makes its browser ask first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("The body must be JSON. Send the header: Content-Type: application/json")


def _chat_choices(service: Service, job: Job) -> list[ChatChoice]:
    return [ChatChoice(0, service.loaded.tokenizer, _splitter(service, job))]


def _splitter(service: Service, job: Job) -> Splitter | None:
    tokenizer, prompt = service.loaded.tokenizer, job.requests[0].prompt
    if service.harmony:
        return HarmonySplitter(tokenizer, service.harmony, prompt, takes_calls=bool(job.tools))
    if not job.tools:
        return None
    if tokenizer.tool_parser is None:
        return BareCallSplitter(list(job.tools))
    return ToolCallSplitter(tokenizer, list(job.tools), thinking=opens_thinking(tokenizer, prompt))


def _model(service: Service) -> ModelAnswer:
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvstrata",
        "max_model_len": service.context_tokens,
    }
