"""/cache/sessions/{id}/export and /cache/import: conversations as files, kvstrata's own and mlx-lm prompt caches.

Handles HTTP, sessions and salts; the file format and the cache are the engine's (engine/bundle_transfer.py). A plain
key exports sessions under its own salts; every import is inserted under the importing key's salt.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from kvstrata.engine.bundle_transfer import BundleExport, ExportedConversation, FileFormat, ImportedConversation
from kvstrata.engine.cache_api import Conversation, TokenIds, as_ids
from kvstrata.errors import InvalidRequest, SessionNotFound, Unavailable
from kvstrata.server.cache.endpoints import ask_cache
from kvstrata.server.http.access import owner_of_scope, salt_of
from kvstrata.server.http.errors import error_responses
from kvstrata.server.sessions import FIRST_TOKENS, RecognisedBy, Session, SessionName, name_text_session
from kvstrata.server.state import ServerState, state_of
from kvstrata.sizes import format_bytes
from kvstrata.text.tokenizer import encode_prompt, require_unicode

REPLIES = "replies"  # section of remembered replies in an exported conversation
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


def ids_of_prompt(state: ServerState, prompt: Mapping[str, Any]) -> TokenIds:
    """Return the ids of a prompt given as `tokens`, `messages`, or `text`: a user message, or plain text with `raw`."""
    given = [name for name in ("tokens", "messages", "text") if prompt.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("Give the prompt as one of tokens, messages and text.", param="prompt")
    tokens, messages, text = (prompt.get(name) for name in ("tokens", "messages", "text"))
    if tokens is not None:
        return _ids(tokens)
    if messages is None:
        if not isinstance(text, str):
            raise InvalidRequest("The prompt's text is no text.", param="prompt")
        state.limits.check_chars(len(text), param="prompt")
        require_unicode(text, param="prompt")
        if prompt.get("raw") or not state.template.exists:
            return _ids(list(encode_prompt(state.loaded.tokenizer, text)))
        messages = [{"role": "user", "content": text}]
    return _ids(_rendered(state, messages))


def _rendered(state: ServerState, messages: Any) -> list[int]:
    if not state.template.exists:
        raise InvalidRequest("This model has no chat template. Give the prompt as plain text, or as tokens.")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidRequest("messages must be a list of objects with role and content.", param="messages")
    try:
        rendered: Any = state.loaded.tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True
        )
    except Exception as error:
        # A template is the model maker's code: it may raise any exception for messages that it does not expect.
        raise InvalidRequest(f"The chat template cannot show these messages: {error}", param="messages") from error
    return list(rendered)


def _ids(tokens: Any) -> TokenIds:
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InvalidRequest("tokens must be a list of whole numbers.", param="tokens")
    try:
        return as_ids(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"tokens: {error}.", param="tokens") from error


router = APIRouter(prefix="/cache", tags=["Cache"])


class ImportResponse(TypedDict):
    session: str
    tokens: int
    new_tokens: int  # that were not cached before
    bytes: int  # size of the file


def _query(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string", **schema}}


@router.get(
    "/sessions/{id}/export",
    summary="A session as one file that another server with the same model takes",
    responses={200: {"content": {OCTETS: {}}, "description": "The file"}, **error_responses(400, 401, 403, 404, 503)},
    response_class=StreamingResponse,
    openapi_extra={"parameters": [_query("format", enum=["kvstrata", "mlx"])]},
)
async def export(request: Request, id: str) -> StreamingResponse:
    state = state_of(request)
    form = request.query_params.get("format", "kvstrata")
    if form not in ("kvstrata", "mlx"):
        raise InvalidRequest(f"format: '{form[:40]}' is not one of kvstrata and mlx.", param="format")
    session = state.sessions.find_session(id, owner_of_scope(request.scope))
    longest = await _longest(state, session) if session else None
    if session is None or longest is None:
        raise SessionNotFound(
            f"No session '{id[:80]}' is known here, or its tokens were forgotten. GET /cache/sessions lists those that "
            "are."
        )
    with state.drain_gate.admit():
        exporting = await to_thread.run_sync(_begin_export, state, session, longest, form)
    return ExportResponse(state, exporting)


@router.post(
    "/import",
    summary="Take in a file that was exported, or a prompt cache of mlx-lm",
    responses=error_responses(400, 401, 403, 408, 413, 429, 503),
    openapi_extra={
        "parameters": [_query("cache_salt")],
        "requestBody": {"required": True, "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}}},
    },
)
async def import_conversation(request: Request) -> ImportResponse:
    state = state_of(request)
    # A web page can post plain text to a local server without a preflight; this type forces one.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != OCTETS:
        raise InvalidRequest(f"The body must be the file. Send the header: Content-Type: {OCTETS}")
    salt = salt_of(request.scope, request.query_params.get("cache_salt"))
    places = state.imports.reserve(state.engine.transfer.limit_bytes)
    with state.drain_gate.admit(), places as grow, tempfile.TemporaryFile() as file:
        size_bytes = await _receive(request, file, grow)
        taken, session = await to_thread.run_sync(_import_file, state, file, size_bytes, salt)
    return {"session": session.id, "tokens": len(taken.ids), "new_tokens": taken.num_new, "bytes": size_bytes}


async def _longest(state: ServerState, session: Session) -> Conversation | None:
    return await ask_cache(state, lambda cache: cache.longest_conversation(session.salt, session.key))


class ExportResponse(StreamingResponse):
    """A response that builds the file while it is sent, and always releases the export's leases at the end."""

    def __init__(self, state: ServerState, exporting: BundleExport) -> None:
        headers = {"x-kvstrata-tokens": str(exporting.num_tokens)}
        super().__init__(_pieces(state, exporting), media_type=OCTETS, headers=headers)
        self._exporting = exporting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exporting.close()


async def _pieces(state: ServerState, exporting: BundleExport) -> AsyncIterator[memoryview]:
    pieces = exporting.pieces()
    with state.drain_gate.admit():
        while (piece := await to_thread.run_sync(next, pieces, None)) is not None:
            yield piece


# The functions below run on a worker thread, except _receive.


def _begin_export(state: ServerState, session: Session, longest: Conversation, form: FileFormat) -> BundleExport:
    return state.engine.transfer.begin_export(_conversation(state, session, longest), form)


def _conversation(state: ServerState, session: Session, longest: Conversation) -> ExportedConversation:
    """Return the conversation to export, without salt or key."""
    named = {
        "id": session.id,
        "recognised_by": session.recognised_by,
        "digest": longest.digest.hex(),
        "num_prompt": str(longest.num_prompt),
    }
    sections: dict[str, Sequence[Mapping[str, Any]]] = {}
    if state.replies is not None:
        sections[REPLIES] = state.replies.memory.export_session(session.salt, longest.ids)
    return ExportedConversation(longest.ids, session.salt, named, sections)


def _import_file(
    state: ServerState, file: BinaryIO, size_bytes: int, salt: str
) -> tuple[ImportedConversation, Session]:
    taken = state.engine.transfer.import_file(file, size_bytes, salt, partial(ids_of_prompt, state))
    session = _adopt_session(state, taken, salt)
    if state.replies is not None:
        section = taken.sections.get(REPLIES, ())
        state.replies.memory.import_session(session.salt, section, state.loaded.vocab_size)
    return taken, session


def _adopt_session(state: ServerState, taken: ImportedConversation, salt: str) -> Session:
    """Return the session that the client's next request will belong to. The file's session data is untrusted."""
    claimed = taken.session
    digest, number = claimed.get("digest", ""), claimed.get("num_prompt", "")
    by: RecognisedBy | None = next((each for each in RECOGNISED if each == claimed.get("recognised_by")), None)
    if by is None or not DIGEST.fullmatch(digest):
        name = name_text_session({}, None, taken.ids[:FIRST_TOKENS].tolist())
    else:
        is_derived = by in ("first message", "first tokens")
        name = SessionName(by, given="" if is_derived else claimed.get("id", ""), digest=bytes.fromhex(digest))
    num_prompt = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    session, num_prompt = state.sessions.adopt_session(salt, name), min(num_prompt or len(taken.ids), len(taken.ids))
    state.engine.ask_cache(
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
