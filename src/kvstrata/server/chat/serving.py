"""The response of a generation: submits it to the engine and answers with one JSON value or a stream.

It is an ASGI response of its own, so that everything that can end a request early (a refusal, a failure, a disconnected
client) is handled in one place; leaving it cancels the requests in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from anyio import to_thread
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvstrata.engine.request import Event, Finished, PrefillProgress, TextDelta
from kvstrata.errors import ContextTooLong, NeverFits, RequestError
from kvstrata.server.chat.assembler import ReplyAssembler
from kvstrata.server.chat.engine_client import RequestEvent, RunningRequests
from kvstrata.server.chat.generation import Generation
from kvstrata.server.chat.writer import ResponseWriter, json_response
from kvstrata.server.request_log import TracedGeneration, trace_of
from kvstrata.server.state import ServerState

T = TypeVar("T")
PING_S = 1.0  # shortest interval between progress pings, and longest wait for the first byte


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel the work and raise ClientDisconnect. The
    body must have been read before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Heartbeat:
    """A timer for pings: decides when a client needs a progress report or has heard nothing for too long.

    Only events that the client receives count, not those of the engine: a tool call that is held back is many tokens
    but no event.
    """

    def __init__(self, keep_alive_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_alive_s = keep_alive_s
        self._gap_s = min(PING_S, keep_alive_s)
        self._clock = clock
        self._sent = clock()  # time of the last bytes to the client
        self._pinged = -math.inf
        self._doing = "waiting"
        self._is_news = False

    def record_event(self, event: Event) -> None:
        if isinstance(event, PrefillProgress):
            self._doing, self._is_news = f"prefill {event.num_done}/{event.num_total}", True
        elif isinstance(event, TextDelta):
            self._doing, self._is_news = "writing", False

    def left_s(self) -> float:
        """Return the seconds until the next ping is due."""
        silent_until = self._sent + self._keep_alive_s
        due = min(silent_until, self._pinged + self._gap_s) if self._is_news else silent_until
        return max(0.0, due - self._clock())

    def due(self) -> str:
        """Return the text of the ping that is due now, or an empty string."""
        if self.left_s() > 0:
            return ""
        self._pinged, self._is_news = self._clock(), False
        return self._doing

    def on_sent(self) -> None:
        self._sent = self._clock()


async def send_stream(
    running: RunningRequests,
    assembler: ReplyAssembler,
    send: Send,
    *,
    keep_alive_s: float,
    headers: Mapping[str, str],
    on_end: Callable[[], None],
) -> None:
    """Send a reply as a stream. The headers wait for the first event, which has the number of cached tokens, but at
    most PING_S. `on_end`: called after a successful reply, before the client gets the last event. The last event of
    some APIs has the complete response, so it is encoded on a worker thread, where `on_end` runs too."""
    writer = assembler.writer
    heartbeat = Heartbeat(keep_alive_s)
    arrivals = await _next_events(running, min(PING_S, keep_alive_s))
    if failed := assembler.failure(arrivals):
        raise failed
    await _send_start(send, writer.media_type, {**headers, **assembler.headers(arrivals)})
    body = writer.encode(writer.start(assembler.stream_start(arrivals)))
    while True:
        for arrival in arrivals:
            heartbeat.record_event(arrival.event)
        if doing := heartbeat.due():
            body += writer.ping(doing)
            heartbeat.on_sent()  # also where an API has nothing to say
        events = [event for arrival in arrivals for event in assembler.feed(arrival)]
        is_ending = any(isinstance(arrival.event, Finished) for arrival in arrivals)
        body += await to_thread.run_sync(writer.encode, events) if is_ending else writer.encode(events)
        if failed := assembler.failure(arrivals):
            await _send_body(send, body + writer.encode(writer.fail(failed)), more=False)
            return
        await assembler.record_replies()
        if running.ended:
            break
        if body:
            await _send_body(send, body, more=True)
            heartbeat.on_sent()
        arrivals, body = await _next_events(running, heartbeat.left_s()), b""

    def last() -> bytes:
        closing = writer.encode(writer.finish(assembler.usage()))
        on_end()
        return closing

    await _send_body(send, body + await to_thread.run_sync(last), more=False)


async def _next_events(running: RunningRequests, timeout_s: float) -> list[RequestEvent]:
    """Return the next events, or none if the timeout expires."""
    try:
        return await running.next_events(timeout_s)
    except TimeoutError:
        return []


async def _send_start(send: Send, media_type: str, headers: Mapping[str, str]) -> None:
    all_headers = {
        "content-type": media_type,
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would hold the events back
        **headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


class GenerationResponse(Response):
    """An ASGI response that runs a generation.

    `on_end`: called with the complete response of a successful reply, streamed or not, before the client has received
    it; runs on a worker thread. `on_too_long`: returns the response to a prompt that does not fit the context or the
    memory; None: the normal error response.
    """

    def __init__(
        self,
        state: ServerState,
        generation: Generation,
        writer: ResponseWriter,
        *,
        stream: bool,
        on_end: Callable[[Any], None] | None = None,
        on_too_long: Callable[[RequestError], Response] | None = None,
    ) -> None:
        super().__init__()
        self._state = state
        self._generation = generation
        self._writer = writer
        self._is_stream = stream
        self._on_end = on_end
        self._on_too_long = on_too_long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has disconnected gets no response; this is not an error.
        with contextlib.suppress(ClientDisconnect):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with (
            self._state.drain_gate.admit(),
            RunningRequests(self._state.engine, self._generation.requests) as running,
        ):
            trace = trace_of(scope)
            trace.generation = self._traced()
            assembler = ReplyAssembler(self._generation, self._writer, running.finish_early, trace)
            try:
                running.submit()
            except (ContextTooLong, NeverFits) as error:
                trace.record_error(error)
                if self._on_too_long is None:
                    raise
                return await self._on_too_long(error)(scope, receive, send)
            self._count_prompt()
            if self._is_stream:
                return await unless_gone(receive, self._stream(running, assembler, send))
            answer = await unless_gone(receive, self._whole(running, assembler))
            return await answer(scope, receive, send)

    def _traced(self) -> TracedGeneration:
        generation = self._generation
        prompt_tokens = sum(len(request.prompt) for request in generation.requests[:: generation.n])
        session = generation.visits[0].key if len(generation.visits) == 1 else ""
        return TracedGeneration(prompt_tokens, generation.n, self._is_stream, session, generation.requests[0].salt)

    def _count_prompt(self) -> None:
        if (made := self._generation.prompt) is not None:
            turns, tokens = made.replayed_turns, made.replayed_tokens
            self._state.metrics.prompts.count(made.hygiene, replayed_turns=turns, replayed_tokens=tokens)

    async def _stream(self, running: RunningRequests, assembler: ReplyAssembler, send: Send) -> None:
        def on_end() -> None:
            if self._on_end is not None:
                self._on_end(self._writer.whole(assembler.usage()))

        keep_alive_s, headers = self._state.keep_alive_s, self._generation.headers
        await send_stream(running, assembler, send, keep_alive_s=keep_alive_s, headers=headers, on_end=on_end)

    async def _whole(self, running: RunningRequests, assembler: ReplyAssembler) -> Response:
        while not running.ended:
            arrivals = await running.next_events()
            if error := assembler.failure(arrivals):
                raise error
            for arrival in arrivals:
                assembler.feed(arrival)
            await assembler.record_replies()
        return await to_thread.run_sync(self._answer, assembler)

    def _answer(self, assembler: ReplyAssembler) -> Response:
        """Build the complete response. Runs on a worker thread: it may contain logprobs of 100,000 tokens."""
        self._writer.finish(assembler.usage())
        answer = self._writer.whole(assembler.usage())
        if self._on_end is not None:
            self._on_end(answer)
        return json_response(answer, {**self._generation.headers, **assembler.whole_headers()})
