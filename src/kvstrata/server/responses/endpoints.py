"""Routes of OpenAI's Responses API: create a response, and get, list or delete stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from kvstrata.errors import ContextTooLong, InvalidRequest, RequestError, ResponseNotFound
from kvstrata.server.auth import owner_in
from kvstrata.server.conversation.body import body_of, read
from kvstrata.server.conversation.job import default_sampling
from kvstrata.server.conversation.reply import Reply
from kvstrata.server.conversation.wire import Begun, encode, json_response
from kvstrata.server.errors import ErrorAnswer, Shape, answers
from kvstrata.server.journal.trace import trace_in
from kvstrata.server.responses.answers import DeletedAnswer, ItemList, ResponseAnswer, opening
from kvstrata.server.responses.ask import ENCRYPTED, Asking, Memory, Question
from kvstrata.server.responses.output import Output
from kvstrata.server.responses.schema import ResponseAsked
from kvstrata.server.responses.stored import StoredResponse
from kvstrata.server.responses.tools import IgnoredTools
from kvstrata.server.responses.wire import Logprobs, ResponsesWire
from kvstrata.server.service import Service, service_of

router = APIRouter(prefix="/v1/responses", tags=["OpenAI Responses"])

ASKED = (ResponseAsked,)
ERROR_SHAPES: dict[str, Shape] = {}  # the server's own
MAX_LISTED = 100
EVENT_STREAM = "text/event-stream"
NO_RESPONSE: dict[str, Any] = {"model": ErrorAnswer, "description": "No such response, or it is another key's"}


def _answered() -> dict[int | str, dict[str, Any]]:
    # The `event` of each event is the type of the JSON in its `data`.
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    whole = {
        "model": ResponseAnswer,
        "description": "The response; with `stream` as server-sent events",
        "content": {EVENT_STREAM: {"schema": event}},
    }
    return {200: whole, **answers(400, 401, 404, 408, 413, 429, 503)}


@router.post(
    "", summary="A response to a text or to items", responses=_answered(), openapi_extra=body_of(ResponseAsked)
)
async def create_response(request: Request) -> Response:
    service, memory = service_of(request), _memory(request)
    question = await read(request, Asking(memory))
    asked, job = question.asked, question.job
    wire = _wire(service, question)
    too_long = partial(_too_long, wire, stream=bool(asked.stream))
    if isinstance(job, ContextTooLong):
        trace_in(request.scope).fail(job)
        return too_long(job)

    def keep(answer: Any) -> None:
        memory.stored.keep(question.stored(answer))

    on_end = None if asked.store is False else keep
    return Reply(service, job, wire, stream=bool(asked.stream), on_end=on_end, on_too_long=too_long)


@router.get(
    "/{response_id}",
    summary="A response that was kept",
    response_model=ResponseAnswer,
    responses={**answers(400, 401), 404: NO_RESPONSE},
)
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "").lower() == "true":
        raise InvalidRequest("stream: a response that was kept comes whole. Leave it out.", param="stream")
    return Response(_found(request, response_id).answer, media_type="application/json")


@router.delete("/{response_id}", summary="Forget a response", responses={**answers(401), 404: NO_RESPONSE})
async def delete_response(request: Request, response_id: str) -> DeletedAnswer:
    if not _memory(request).stored.remove(response_id, owner_in(request.scope)):
        raise _no_response(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get(
    "/{response_id}/input_items",
    summary="What a response answers, earlier responses included",
    response_model=ItemList,
    responses={**answers(400, 401), 404: NO_RESPONSE},
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the input items of a response. `order`: desc (newest first) or asc; `limit`: 1 to 100; `after`: the id of an
    item."""
    return await to_thread.run_sync(_input_items, _found(request, response_id), request.query_params)


def _input_items(response: StoredResponse, asked: Mapping[str, str]) -> Response:
    items: list[dict[str, Any]] = [_listed(item) for item in from_json(response.items)]
    if asked.get("order", "desc") != "asc":
        items.reverse()
    if after := asked.get("after"):
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after: this response has no item '{after[:80]}'.", param="after")
        items = items[place + 1 :]
    shown = items[: _limit(asked.get("limit", "20"))]
    ids = [item["id"] for item in shown]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    answer: ItemList = {
        "object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(shown) < len(items),
    }  # fmt: skip
    return json_response(answer)


def _memory(request: Request) -> Memory:
    """Return the state of this API, created by the first request. Called only on the event loop's thread."""
    state = request.app.state
    if not hasattr(state, "responses"):
        state.responses = Memory(service_of(request).responses, IgnoredTools())
    return state.responses


def _wire(service: Service, question: Question) -> ResponsesWire:
    asked = question.asked
    output = Output(
        question.box.names,
        Logprobs(service.loaded.tokenizer),
        packs_thinking=ENCRYPTED in (asked.include or ()),
    )
    return ResponsesWire(opening(asked, question.id, service.name, default_sampling(service)), output)


def _too_long(wire: ResponsesWire, error: RequestError, *, stream: bool) -> Response:
    """Return the response to a prompt that is too long, as a failed stream: Codex then shortens its history, but gives
    up if the request itself fails. Without `stream`, raise the error."""
    if not stream:
        raise error
    body = encode([*wire.begin(Begun(0, None)), *wire.fail(error)])
    return Response(body, media_type=EVENT_STREAM, headers={"cache-control": "no-cache"})


def _found(request: Request, response_id: str) -> StoredResponse:
    found = _memory(request).stored.find(response_id, owner_in(request.scope))
    if found is None:
        raise _no_response(response_id)
    return found


def _no_response(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"Response with id '{response_id[:80]}' not found. The server keeps the last ones in memory, for their own key."
    )


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item for the list. The content of a message becomes a list of parts, even if it was sent as a
    string."""
    if item["type"] != "message" or not isinstance(item["content"], str):
        return item
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    return {**item, "content": [{"type": kind, "text": item["content"]}]}


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MAX_LISTED):
        raise InvalidRequest(f"limit: a number from 1 to {MAX_LISTED}.", param="limit")
    return int(text)
