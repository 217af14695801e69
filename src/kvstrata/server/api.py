"""The parts of an API that the application and a fleet's router need: routes, schemas, error format, prompts.

An API is a folder of four modules: `schema` (request bodies and response types, no logic), `request` (body to
`ChatRequest`; asks no engine), `response` (a `ResponseWriter` and the error body), `endpoints` (routes and one `Api`).
`app.APIS` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter
from pydantic import BaseModel

from kvstrata.server.chat.request import ChatRequest, TextRequest
from kvstrata.server.http.errors import ErrorBodyFn, openai_error

# Reads the prompt of a request body. Raises RequestError.
PromptParser = Callable[[bytes], ChatRequest | TextRequest]


@dataclass(frozen=True)
class Api:
    """An API. `prefixes`: starts of its paths; the longest one that matches a path decides the format of errors."""

    prefixes: tuple[str, ...]
    routers: tuple[APIRouter, ...]
    schemas: tuple[type[BaseModel], ...] = ()  # of request bodies, for the OpenAPI document
    error_body: ErrorBodyFn = openai_error
    error_event: str = ""  # name of the event that ends a failed stream
    parsers: Mapping[str, PromptParser] = field(default_factory=dict)  # by path


def find_api(apis: Iterable[Api], path: str) -> Api | None:
    """Return the API that a path belongs to."""
    matching = [
        (len(prefix), api) for api in apis for prefix in api.prefixes if path == prefix or path.startswith(f"{prefix}/")
    ]
    return max(matching, key=lambda each: each[0])[1] if matching else None
