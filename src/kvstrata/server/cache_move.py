"""/cache: export of a session as one file, and import of such a file.

Handles HTTP, sessions and salts; the file format and the cache are the engine's (engine/bundle_transfer.py). A plain
key exports sessions under its own salts; every import is inserted under the importing key's salt.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, BinaryIO

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from kvstrata.engine.bundle_transfer import BundleExport, ExportedConversation, FileFormat, ImportedConversation
from kvstrata.engine.cache_api import Conversation
from kvstrata.errors import InvalidRequest, SessionNotFound, Unavailable
from kvstrata.server.auth import owner_in, salt_of
from kvstrata.server.cache import ask_cache
from kvstrata.server.errors import answers
from kvstrata.server.prompt_of import ids_of_prompt
from kvstrata.server.service import Service, service_of
from kvstrata.server.sessions.names import FIRST_TOKENS, Name, name_of_text
from kvstrata.server.sessions.session import RecognisedBy, Session
from kvstrata.sizes import format_bytes

router = APIRouter(prefix="/cache", tags=["Cache"])

IMPORT_PATH = "/cache/import"
OCTETS = "application/octet-stream"
RECOGNISED: tuple[RecognisedBy, ...] = (
    "x-kvstrata-session",
    "prompt_cache_key",
    "x-claude-code-session-id",
    "first message",
    "first tokens",
)
DIGEST = re.compile(r"[0-9a-f]{64}")
# Free space to keep on the volume of temporary files.
SPARE_BYTES = 64 << 20


class ImportAnswer(TypedDict):
    session: str
    tokens: int
    new_tokens: int  # that were not cached before
    bytes: int  # size of the file


def _query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string", **schema}}


@router.get(
    "/sessions/{id}/export",
    summary="A session as one file that another server with the same model takes",
    responses={200: {"content": {OCTETS: {}}, "description": "The file"}, **answers(400, 401, 403, 404, 503)},
    response_class=StreamingResponse,
    openapi_extra={"parameters": [_query("format", enum=["kvstrata", "mlx"])]},
)
async def export(request: Request, id: str) -> StreamingResponse:
    service = service_of(request)
    form = request.query_params.get("format", "kvstrata")
    if form not in ("kvstrata", "mlx"):
        raise InvalidRequest(f"format: '{form[:40]}' is not one of kvstrata and mlx.", param="format")
    session = service.sessions.find(id, owner_in(request.scope))
    longest = await _longest(service, session) if session else None
    if session is None or longest is None:
        raise SessionNotFound(
            f"No session '{id[:80]}' is known here, or its tokens were forgotten. GET /cache/sessions lists those that "
            "are."
        )
    with service.door.pass_through():
        exporting = await to_thread.run_sync(_begin_export, service, session, longest, form)
    return ExportResponse(service, exporting)


@router.post(
    "/import",
    summary="Take in a file that was exported, or a prompt cache of mlx-lm",
    responses=answers(400, 401, 403, 408, 413, 429, 503),
    openapi_extra={
        "parameters": [_query("cache_salt")],
        "requestBody": {"required": True, "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}},
    },
)
async def take_in(request: Request) -> ImportAnswer:
    service = service_of(request)
    # A web page can post plain text to a local server without a preflight; this type forces one.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != OCTETS:
        raise InvalidRequest(f"The body must be the file. Send the header: Content-Type: {OCTETS}")
    salt = salt_of(request.scope, request.query_params.get("cache_salt"))
    places = service.imports.take(service.engine.transfer.limit_bytes)
    with service.door.pass_through(), places as grow, tempfile.TemporaryFile() as file:
        size_bytes = await _receive(request, file, grow)
        taken, session = await to_thread.run_sync(_take_in, service, file, size_bytes, salt)
    return {"session": session.id, "tokens": len(taken.ids), "new_tokens": taken.num_new, "bytes": size_bytes}


async def _longest(service: Service, session: Session) -> Conversation | None:
    return await ask_cache(service, lambda cache: cache.longest_conversation(session.salt, session.key))


class ExportResponse(StreamingResponse):
    """A response that builds the file while it is sent, and always releases the export's leases at the end."""

    def __init__(self, service: Service, exporting: BundleExport) -> None:
        headers = {"x-kvstrata-tokens": str(exporting.num_tokens)}
        super().__init__(_pieces(service, exporting), media_type=OCTETS, headers=headers)
        self._exporting = exporting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exporting.close()


async def _pieces(service: Service, exporting: BundleExport) -> AsyncIterator[memoryview]:
    pieces = exporting.pieces()
    with service.door.pass_through():
        while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
            yield piece


# The functions below run on a worker thread, except _receive.


def _begin_export(service: Service, session: Session, longest: Conversation, form: FileFormat) -> BundleExport:
    return service.engine.transfer.begin_export(_conversation(service, session, longest), form)


def _conversation(service: Service, session: Session, longest: Conversation) -> ExportedConversation:
    """Return the conversation to export, without salt or key."""
    named = {
        "id": session.id,
        "recognised_by": session.recognised_by,
        "digest": longest.digest.hex(),
        "num_prompt": str(longest.num_prompt),
    }
    sections = {carrier.name: carrier.give(session, longest.ids) for carrier in service.carriers}
    return ExportedConversation(longest.ids, session.salt, named, sections)


def _take_in(service: Service, file: BinaryIO, size_bytes: int, salt: str) -> tuple[ImportedConversation, Session]:
    taken = service.engine.transfer.import_file(file, size_bytes, salt, partial(ids_of_prompt, service))
    session = _known_again(service, taken, salt)
    for carrier in service.carriers:
        carrier.take(session, taken.sections.get(carrier.name, ()))
    return taken, session


def _known_again(service: Service, taken: ImportedConversation, salt: str) -> Session:
    """Return the session that the client's next request will belong to. The file's session data is untrusted."""
    told = taken.session
    digest, number = told.get("digest", ""), told.get("num_prompt", "")
    by: RecognisedBy | None = next((each for each in RECOGNISED if each == told.get("recognised_by")), None)
    if by is None or not DIGEST.fullmatch(digest):
        name = name_of_text({}, None, taken.ids[:FIRST_TOKENS].tolist())
    else:
        is_derived = by in ("first message", "first tokens")
        name = Name(by, given="" if is_derived else told.get("id", ""), digest=bytes.fromhex(digest))
    num_prompt = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    session, num_prompt = service.sessions.adopt(salt, name), min(num_prompt or len(taken.ids), len(taken.ids))
    service.engine.ask_cache(
        lambda cache: cache.adopt_conversation(salt, session.key, name.digest, taken.ids, num_prompt)
    ).result()
    return session


async def _receive(request: Request, file: BinaryIO, grow: Callable[[int], None]) -> int:
    size_bytes = 0
    async for piece in request.stream():
        grow(len(piece))
        try:
            await to_thread.run_sync(_write, file, piece)
        except OSError as error:
            raise Unavailable(
                f"The file cannot be kept while it is checked: {error}. Free some space, or start the server with "
                "TMPDIR set to a folder that has more. Nothing was changed."
            ) from None
        size_bytes += len(piece)
    return size_bytes


def _write(file: BinaryIO, piece: bytes) -> None:
    volume = os.fstatvfs(file.fileno())
    free_bytes = volume.f_bavail * volume.f_frsize
    if free_bytes < SPARE_BYTES + len(piece):
        raise OSError(f"only {format_bytes(free_bytes)} are free in {tempfile.gettempdir()}")
    file.write(piece)
