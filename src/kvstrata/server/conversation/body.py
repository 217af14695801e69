"""Bodies of requests: read whole, in a worker thread, more strictly than FastAPI would. Knows no wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.types import Scope

from kvstrata.errors import InvalidRequest
from kvstrata.server.service import Service, service_of

T = TypeVar("T")
AskedT = TypeVar("AskedT", bound=BaseModel)


class Asked(BaseModel):
    """What a client sends. Unknown fields are ignored, and null means the default."""

    # strict: "5" is not a number and 1 is not true, as at OpenAI.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


async def read(request: Request, make: Callable[[Service, bytes, Scope], T]) -> T:
    """What `make` makes of the body, on a worker thread: rendering and tokenizing a long prompt takes a while."""
    require_json(request)
    service = service_of(request)
    # A request that finds no room is told before its body is read, and again before a long prompt is tokenized.
    service.engine.require_room()
    # Not request.body(), which would keep the bytes as long as the reply takes.
    body = b"".join([chunk async for chunk in request.stream()])
    service.engine.require_room()
    return await to_thread.run_sync(make, service, body, request.scope)


def require_json(request: Request) -> None:
    # A web page can post anything else to a local server without asking; JSON makes its browser ask first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("The body must be JSON. Send the header: Content-Type: application/json")


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """Documents a body that is read by hand."""
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def read_body(schema: type[AskedT], body: bytes) -> AskedT:
    try:
        asked = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", code="invalid_json") from None
    return validated(schema, asked)


def validated(schema: type[AskedT], asked: Any) -> AskedT:
    try:
        return schema.model_validate(asked)
    except ValidationError as error:
        raise _invalid(asked, error.errors(include_url=False, include_input=False, include_context=False)) from None


def _invalid(asked: object, details: list[ErrorDetails]) -> InvalidRequest:
    """Of a union's branches the one that got furthest is what the client meant."""
    paths = [_path(asked, detail) for detail in details]
    furthest = max(paths, key=len)
    reasons = dict.fromkeys(detail["msg"] for path, detail in zip(paths, details, strict=True) if path == furthest)
    param = ".".join(furthest)
    reason = ", or: ".join(reasons)
    return InvalidRequest(f"{param}: {reason}." if param else f"{reason}.", param=param or None)


def _path(asked: object, detail: ErrorDetails) -> list[str]:
    """`messages, 0, role` from pydantic's location, which also names the branches of unions."""
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
