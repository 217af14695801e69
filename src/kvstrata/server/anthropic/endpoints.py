"""Routes of Anthropic's Messages API. Assigns a job, a wire and documentation to each path."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from kvstrata.server.anthropic.answers import CountAnswer, MessagesAnswer
from kvstrata.server.anthropic.ask import count_prompt, read_message
from kvstrata.server.anthropic.errors import messages_answers, messages_shape
from kvstrata.server.anthropic.schema import CountAsked, MessagesAsked
from kvstrata.server.anthropic.wire import MessagesWire
from kvstrata.server.conversation.body import body_of, read, read_aside
from kvstrata.server.conversation.reply import Reply
from kvstrata.server.errors import Shape
from kvstrata.server.service import service_of

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"])

ASKED = (MessagesAsked, CountAsked)
ERROR_SHAPES: dict[str, Shape] = {"/v1/messages": messages_shape}

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_MESSAGE = {
    "model": MessagesAnswer,
    "description": "The reply; with `stream` as server-sent events",
    "content": {"text/event-stream": {"schema": _EVENT}},
}


@router.post(
    "",
    summary="The next message of a chat, as Anthropic's API has it",
    responses={200: _MESSAGE, **messages_answers(400, 401, 404, 408, 413, 429, 503)},
    openapi_extra=body_of(MessagesAsked),
)
async def messages(request: Request) -> Response:
    service = service_of(request)
    asked, job = await read(request, read_message)
    return Reply(service, job, MessagesWire(job.id, asked.model or service.name), stream=bool(asked.stream))


@router.post(
    "/count_tokens",
    summary="How many tokens a prompt has",
    responses=messages_answers(400, 401, 404, 408, 413, 503),
    openapi_extra=body_of(CountAsked),
)
async def count_tokens(request: Request) -> CountAnswer:
    return {"input_tokens": await read_aside(request, count_prompt)}
