"""Routes of OpenAI's Responses API: create a response, and get, list or delete stored ones."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic_core import from_json
from starlette.types import Scope

from kvstrata.errors import ContextTooLong, InvalidRequest, RequestError, ResponseNotFound
from kvstrata.server.api import Api
from kvstrata.server.chat.generation import Generation, build_chat_generation, default_sampling
from kvstrata.server.chat.request import ChatRequest
from kvstrata.server.chat.serving import GenerationResponse
from kvstrata.server.chat.writer import StreamStart, encode_sse, json_bytes, json_response
from kvstrata.server.http.access import owner_of_scope, salt_of
from kvstrata.server.http.errors import ErrorResponseBody, error_responses
from kvstrata.server.http.json_body import document_body, parse_json, read
from kvstrata.server.request_log import trace_of
from kvstrata.server.responses.output_items import OutputItems
from kvstrata.server.responses.request import ENCRYPTED, encode_items, parse_response
from kvstrata.server.responses.response import Logprobs, ResponsesWriter
from kvstrata.server.responses.schema import DeletedResponse, ItemList, ResponsesRequest, ResponsesResponse, opening
from kvstrata.server.responses.store import ResponseStore, StoredResponse
from kvstrata.server.responses.tools import ToolNames, ignored_tools
from kvstrata.server.state import ServerState, state_of

router = APIRouter(prefix="/v1/responses", tags=["OpenAI Responses"])

MAX_LISTED = 100
EVENT_STREAM = "text/event-stream"
NO_RESPONSE: dict[str, Any] = {"model": ErrorResponseBody, "description": "No such response, or it is another key's"}


def _answered() -> dict[int | str, dict[str, Any]]:
    # The `event` of each event is the type of the JSON in its `data`.
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    whole = {
        "model": ResponsesResponse,
        "description": "The response; with `stream` as server-sent events",
        "content": {EVENT_STREAM: {"schema": event}},
    }
    return {200: whole, **error_responses(400, 401, 404, 408, 413, 429, 503)}


@router.post(
    "", summary="A response to a text or to items", responses=_answered(), openapi_extra=document_body(ResponsesRequest)
)
async def create_response(request: Request) -> Response:
    state = state_of(request)
    response_id = f"resp_{uuid.uuid4().hex}"
    asked, names, items, generation = await read(request, partial(_read_response, response_id))
    writer = _writer(state, asked, names, response_id)
    too_long = partial(_too_long, writer, stream=bool(asked.stream))
    if isinstance(generation, ContextTooLong):
        trace_of(request.scope).record_error(generation)
        return too_long(generation)
    salt = salt_of(request.scope, asked.cache_salt)

    def keep(answer: Any) -> None:
        output_ids = tuple(item["id"] for item in answer["output"])
        state.responses.keep(StoredResponse(response_id, salt, json_bytes(answer), items, output_ids))

    return GenerationResponse(
        state,
        generation,
        writer,
        stream=bool(asked.stream),
        on_end=None if asked.store is False else keep,
        on_too_long=too_long,
    )


@router.get(
    "/{response_id}",
    summary="A response that was kept",
    response_model=ResponsesResponse,
    responses={**error_responses(400, 401), 404: NO_RESPONSE},
)
async def get_response(request: Request, response_id: str) -> Response:
    if request.query_params.get("stream", "").lower() == "true":
        raise InvalidRequest("stream: a response that was kept comes whole. Leave it out.", param="stream")
    return Response(_found(request, response_id).answer, media_type="application/json")


@router.delete("/{response_id}", summary="Forget a response", responses={**error_responses(401), 404: NO_RESPONSE})
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    if not state_of(request).responses.remove(response_id, owner_of_scope(request.scope)):
        raise _no_response(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get(
    "/{response_id}/input_items",
    summary="What a response answers, earlier responses included",
    response_model=ItemList,
    responses={**error_responses(400, 401), 404: NO_RESPONSE},
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


def _read_response(
    response_id: str, state: ServerState, body: bytes, scope: Scope
) -> tuple[ResponsesRequest, ToolNames, bytes, Generation | ContextTooLong]:
    """Return the request, its tools, its input items for storage, and its generation, or an error if the prompt does
    not fit the context."""
    asked = parse_json(ResponsesRequest, body, state.limits.max_items)
    parsed = parse_response(asked, state.responses, salt_of(scope, asked.cache_salt))
    state.ignored_tools.log_tools(ignored_tools(asked.tools or ()))
    items = b"" if asked.store is False else encode_items(parsed.items)
    try:
        return asked, parsed.names, items, build_chat_generation(state, parsed.chat, scope, response_id)
    except RequestError as error:
        if error.param == "messages":  # the name of the field in a chat
            error.param = "input"
        if isinstance(error, ContextTooLong):
            return asked, parsed.names, items, error
        raise


def _writer(state: ServerState, asked: ResponsesRequest, names: ToolNames, response_id: str) -> ResponsesWriter:
    output = OutputItems(
        names.names,
        Logprobs(state.loaded.tokenizer),
        packs_thinking=ENCRYPTED in (asked.include or ()),
    )
    return ResponsesWriter(opening(asked, response_id, state.name, default_sampling(state)), output)


def _too_long(writer: ResponsesWriter, error: RequestError, *, stream: bool) -> Response:
    """Return the response to a prompt that is too long, as a failed stream: Codex then shortens its history, but gives
    up if the request itself fails. Without `stream`, raise the error."""
    if not stream:
        raise error
    body = encode_sse([*writer.start(StreamStart(0, None)), *writer.fail(error)])
    return Response(body, media_type=EVENT_STREAM, headers={"cache-control": "no-cache"})


def _found(request: Request, response_id: str) -> StoredResponse:
    found = state_of(request).responses.find(response_id, owner_of_scope(request.scope))
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


def _parse_without_store(body: bytes) -> ChatRequest:
    """Read a request without stored responses. One that continues an earlier response can be read only by the server
    that keeps it."""
    return parse_response(parse_json(ResponsesRequest, body), ResponseStore(), "").chat


API = Api(
    ("/v1/responses",),
    (router,),
    (ResponsesRequest,),
    error_event="error",
    parsers={"/v1/responses": _parse_without_store},
)
