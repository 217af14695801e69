"""Reading and validation of request bodies, on worker threads and stricter than FastAPI's. Independent of the API.

Parsing and validating hold the interpreter lock, so no other client is served meanwhile. A body that would become too
many objects is therefore refused before it is parsed, and validation stops at the first invalid item of a list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any, TypeVar

from anyio import to_thread
from fastapi import Request
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.types import Scope

from kvstrata.errors import InvalidRequest
from kvstrata.server.http.access import owner_salt
from kvstrata.server.http.body_limit import (
    MIN_VALUES,
    max_values,
    num_values,
    release_body,
    require_few_values,
)
from kvstrata.server.state import ServerState, state_of

T = TypeVar("T")

RequestT = TypeVar("RequestT", bound=BaseModel)

# Larger bodies are rendered and tokenized two at a time (`ServerState.large_bodies`): each takes many times its size in
# memory.
LARGE_BYTES = 1 << 20
# Larger bodies are parsed and validated one at a time: each may hold the interpreter lock for 0.1 s, and the event loop
# would wait for several in a row.
SMALL_BYTES = 1 << 16

_parsing_large = threading.Lock()


def _within_context(items: Any, info: ValidationInfo) -> Any:
    most = info.context
    if most is not None and isinstance(items, list) and len(items) > most:
        found = {"most": most, "found": len(items)}
        raise PydanticCustomError("too_long", "List should have at most {most} items here, not {found}", found)
    return items


def _of_few_values(text: str, info: ValidationInfo) -> str:
    if info.context is not None and num_values(text) > max_values(info.context):
        raise PydanticCustomError(
            "too_long", "The JSON should have at most {most} values", {"most": max_values(info.context)}
        )
    return text


def _unchanged(item: Any) -> Any:
    return item


# A string that contains JSON.
JsonText = Annotated[str, AfterValidator(_of_few_values)]

# A list of prompt elements, bounded by the context size (`PromptLimits.max_items`). Validation stops at the first
# invalid item: pydantic would record an error for each. A call into Python at each item lets other threads take the
# interpreter lock, which pydantic otherwise holds to the end of the list.
Items = Annotated[
    list[Annotated[T, BeforeValidator(_unchanged)]], Field(fail_fast=True), BeforeValidator(_within_context)
]


class RequestModel(BaseModel):
    """Base class of request bodies. Unknown fields are ignored, and null means the default."""

    # strict: "5" is not a number and 1 is not true, as at OpenAI.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


async def read(request: Request, make: Callable[[ServerState, bytes, Scope], T]) -> T:
    """Read the body, run `make` on it in a worker thread and return the result: rendering and tokenizing a long prompt
    takes a while. Raises early what `Engine.submit` would raise, such as QueueFull."""
    require_json(request)
    engine, owner = state_of(request).engine, owner_salt(request.scope) or ""
    # Refuse a request for a full queue before its body is read, and again before a long prompt is tokenized.
    engine.require_place(owner)
    body = await _received(request)
    engine.require_place(owner)
    return await _made(request, make, body)


async def read_aside(request: Request, make: Callable[[ServerState, bytes, Scope], T]) -> T:
    """Read a body like `read`, for a request that needs no place in the engine's queue."""
    require_json(request)
    return await _made(request, make, await _received(request))


async def _received(request: Request) -> bytes:
    # Not request.body(), which would keep the bytes until the reply has ended.
    return b"".join([chunk async for chunk in request.stream()])


async def _made(request: Request, make: Callable[[ServerState, bytes, Scope], T], body: bytes) -> T:
    state = state_of(request)
    limiter = state.large_bodies if len(body) > LARGE_BYTES else state.small_bodies
    try:
        return await to_thread.run_sync(make, state, body, request.scope, limiter=limiter)
    finally:
        release_body(request.scope)


def require_json(request: Request) -> None:
    # A web page can post other types to a local server without a preflight; JSON forces one.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("The body must be JSON. Send the header: Content-Type: application/json")


def document_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI documentation of a body that is read by hand."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def parse_json(schema: type[RequestT], body: bytes, max_items: int = MIN_VALUES) -> RequestT:
    """Parse and validate a body. `max_items`: limit of each list, see `PromptLimits.max_items`."""
    require_few_values(body, max_items)
    with _parsing_large if len(body) > SMALL_BYTES else nullcontext():
        try:
            asked = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise InvalidRequest(f"The body is not JSON: {error}.", code="invalid_json") from None
        return validated(schema, asked, max_items)


def validated(schema: type[RequestT], asked: Any, max_items: int = MIN_VALUES) -> RequestT:
    try:
        return schema.model_validate(asked, context=max_items)
    except ValidationError as error:
        raise _invalid(asked, error.errors(include_url=False, include_input=False, include_context=False)) from None


def _invalid(asked: object, details: list[ErrorDetails]) -> InvalidRequest:
    """Return the error for a validation failure. Among a union's branches it reports the one that validated deepest,
    which is probably the one that the client meant."""
    paths = [_path(asked, detail) for detail in details]
    furthest = max(paths, key=len)
    reasons = dict.fromkeys(detail["msg"] for path, detail in zip(paths, details, strict=True) if path == furthest)
    param = ".".join(furthest)
    reason = ", or: ".join(reasons)
    return InvalidRequest(f"{param}: {reason}." if param else f"{reason}.", param=param or None)


def _path(asked: object, detail: ErrorDetails) -> list[str]:
    """Return the path of an error, such as `messages, 0, role`, without the union branches in pydantic's location."""
    path: list[str] = []
    here: Any = asked
    last = len(detail["loc"]) - 1
    for place, key in enumerate(detail["loc"]):
        if (isinstance(here, dict) and key in here) or (isinstance(here, list) and isinstance(key, int)):
            here = here[key]  # pyright: ignore[reportArgumentType, reportCallIssue]
        elif detail["type"] != "missing" or place != last:
            continue
        path.append(str(key))
    return path
