"""Router of a fleet as an ASGI app: sends every request to the replica with the least work to do for it.

It knows which paths belong to one replica and which to all of them (`fan_out.py`). `prompt_keys.py` reads request
bodies, `routing.py` chooses the replica. If a replica is lost before the first byte of its response, another one gets
the request; later the client receives an error in the shape of its API.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Set

from anyio import to_thread
from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from kvstrata.errors import RequestError, Unavailable
from kvstrata.fleet.fan_out import FanOut
from kvstrata.fleet.prompt_keys import PromptReader
from kvstrata.fleet.replicas import ReplicaLost, Replicas, nothing, plain_scope
from kvstrata.fleet.routing import Choice, RoutedRequest, RoutingPolicy
from kvstrata.server.api import find_api
from kvstrata.server.app import APIS
from kvstrata.server.chat.writer import JsonEvent, encode_sse
from kvstrata.server.http.body_limit import MIN_VALUES, require_few_values
from kvstrata.server.http.errors import error_response, openai_error

logger = logging.getLogger("kvstrata.fleet")

MAX_ATTEMPTS = 3
MAX_RESPONSES = 1 << 16
RESPONSES = "/v1/responses"
RESPONSE_ID = re.compile(rb"(resp_[0-9a-f]{32})")
PREVIOUS = re.compile(rb'"previous_response_id"\s*:\s*"(resp_[0-9a-f]{32})"')
EXPORT = re.compile(r"/cache/sessions/([^/]+)/export")
OF_SESSIONS = ("/cache/explain", "/cache/pin", "/cache/unpin")
SEARCHED_BYTES = 4096  # of a response, searched for its id
REPLICA, ROUTE = b"x-kvstrata-replica", b"x-kvstrata-route"
LOST = "The replica that was answering has ended. Send the request again; what it had cached may be computed anew."


class FleetRouter:
    """The ASGI app that clients connect to.

    `prompts` returns None until a replica has reported its identity; until then requests are routed by load alone.
    """

    def __init__(
        self,
        replicas: Replicas,
        router: RoutingPolicy,
        prompts: Callable[[], PromptReader | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._prompts = prompts
        self._clock = clock
        self._fan_out = FanOut(replicas)
        self._responses: OrderedDict[str, str] = OrderedDict()  # response id -> replica that keeps it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            body = await _body(receive)
        except RequestError as error:  # the body is too large or too slow
            await error_response(error)(scope, receive, send)
            return
        await self._answer(scope, body, send)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        if self._fan_out.answers(scope["method"], scope["path"]):
            await self._fan_out(scope, body, send)
            return
        routed = await self._read_prompt(scope, body)
        home = await self._find_home(scope, body)
        lost: set[str] = set()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            choice = self._choose(routed, home, lost)
            slot = _ReplicaSlot(self._router, choice)
            answer = _Answer(self, choice, slot, scope, send)
            try:
                await answer.run(
                    self._replicas.ask(choice.replica if choice else None, plain_scope(scope), body, only=False)
                )
                return
            except ReplicaLost as error:
                logger.warning("A replica was lost in attempt %d of %s: %s", attempt, scope["path"], error)
                lost |= {choice.replica} if choice else set()
                if answer.has_begun:
                    await answer.send_error()
                    return
            finally:
                slot.release()
        await error_response(Unavailable("No replica answers. Send the request again in a moment."))(
            scope, nothing, send
        )

    async def _read_prompt(self, scope: Scope, body: bytes) -> RoutedRequest:
        prompts = self._prompts()
        if prompts is None or scope["method"] != "POST" or not prompts.reads(scope["path"]):
            return RoutedRequest(0)
        return await to_thread.run_sync(prompts.read_prompt, body, scope)

    def _choose(self, routed: RoutedRequest, home: str | None, lost: Set[str]) -> Choice | None:
        names = [name for name in self._replicas.names() if name not in lost]
        return self._router.choose(routed, self._clock(), [home] if home in names else names)

    async def _find_home(self, scope: Scope, body: bytes) -> str | None:
        """Return the only replica that can serve the request, because it keeps the response or the session that the
        request names. None means any replica."""
        path = scope["path"]
        if path.startswith(RESPONSES):
            found = RESPONSE_ID.search(path.encode()) or PREVIOUS.search(body)
            return self._responses.get(found[1].decode()) if found else None
        if exported := EXPORT.fullmatch(path):
            return await self._fan_out.holder_of(exported[1], scope)
        if path in OF_SESSIONS and (named := await to_thread.run_sync(_session_in, body)):
            return await self._fan_out.holder_of(named, scope)
        return None

    def record_response(self, path: str, first: bytes, replica: str) -> None:
        if path == RESPONSES and (found := RESPONSE_ID.search(first)):
            self._responses[found[0].decode()] = replica
            if len(self._responses) > MAX_RESPONSES:
                self._responses.popitem(last=False)


class _ReplicaSlot:
    """A request's slot at its replica, released once."""

    def __init__(self, router: RoutingPolicy, choice: Choice | None) -> None:
        self._router = router
        self._choice = choice

    def release(self) -> None:
        if self._choice is not None:
            self._router.ended(self._choice.replica)
            self._choice = None


class _Answer:
    """Attempt to serve a request at one replica."""

    def __init__(
        self, router: FleetRouter, choice: Choice | None, slot: _ReplicaSlot, scope: Scope, send: Send
    ) -> None:
        self._router = router
        self._choice = choice
        self._slot = slot
        self._scope = scope
        self._send = send
        self._is_stream = False
        self._searched = b""
        self.has_begun = False

    async def run(self, messages: AsyncIterator[Message]) -> None:
        begun: Message | None = None
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    begun = self._marked(message)
                    continue
                if begun is not None:  # sent with the first byte: until then another replica can take over
                    await self._send(begun)
                    begun, self.has_begun = None, True
                self._record_response(message.get("body", b""))
                if not message.get("more_body", False):
                    self._slot.release()  # before the client can send its next request
                await self._send(message)
        finally:
            with contextlib.suppress(Exception):
                await messages.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    def _marked(self, message: Message) -> Message:
        headers = list(message["headers"])
        kinds = [value for name, value in headers if name.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        if self._choice is not None:
            headers.append((REPLICA, self._choice.replica.encode()))
            headers.append((ROUTE, f"{self._choice.why}; cached={self._choice.num_cached}".encode()))
        return {**message, "headers": headers}

    def _record_response(self, body: bytes) -> None:
        if self._choice is not None and len(self._searched) < SEARCHED_BYTES:
            self._searched += body[:SEARCHED_BYTES]
            self._router.record_response(self._scope["path"], self._searched, self._choice.replica)

    async def send_error(self) -> None:
        """End a stream with an error event that clients of every API understand. Raise ReplicaLost for a plain
        response, so that the connection closes before the declared length."""
        if not self._is_stream:
            raise ReplicaLost(LOST)
        await self._send({"type": "http.response.body", "body": _error_event(self._scope["path"]), "more_body": False})


def _error_event(path: str) -> bytes:
    api = find_api(APIS, path)
    error = Unavailable(LOST)
    event = JsonEvent(openai_error(error)) if api is None else JsonEvent(api.error_body(error), api.error_event)
    return encode_sse([event])


def _session_in(body: bytes) -> str:
    try:
        require_few_values(body, MIN_VALUES)
        asked = from_json(body)
    except (ValueError, RequestError):  # the replica will report the error
        return ""
    named = asked.get("session") if isinstance(asked, dict) else None
    return named if isinstance(named, str) else ""


async def _body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)
