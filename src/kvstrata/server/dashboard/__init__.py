"""The dashboard at /: its static files, their types and security headers. The page gets its data from the server's API
like any other client, with the same key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import PurePosixPath
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.responses import Response

PREFIX = "/dashboard/"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A new version of the server has a new page.
    "cache-control": "no-cache",
}


class StaticFile(NamedTuple):
    body: bytes
    media_type: str


def _files() -> dict[str, StaticFile]:
    """Return the static files by URL path."""
    found: dict[str, StaticFile] = {}
    for file in files("kvstrata.server.dashboard").joinpath("static").iterdir():
        media_type = TYPES.get(PurePosixPath(file.name).suffix)
        if media_type is not None:
            path = "/" if file.name == "index.html" else PREFIX + file.name
            found[path] = StaticFile(file.read_bytes(), media_type)
    return found


def _endpoint(file: StaticFile) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(file.body, media_type=file.media_type, headers=HEADERS)

    return answer


def _routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, file in FILES.items():
        router.add_api_route(path, _endpoint(file), methods=["GET"])
    return router


FILES: Mapping[str, StaticFile] = _files()
OPEN_PATHS = frozenset(FILES)  # they contain no data; the API calls of the page need the key
router = _routes()
