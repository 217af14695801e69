"""A reply as server-sent events. Knows the format of events and comments, not what a choice looks like inside."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Send

from kvstrata.engine.request import Event, Failed, Finished, Piece, Prefilled, TokenUsage
from kvstrata.errors import MemoryPinned, ReplyFailed, RequestError
from kvstrata.server.bridge import Arrival, Replies
from kvstrata.server.errors import error_object
from kvstrata.server.openai.answers import json_bytes, token_usage_answer
from kvstrata.server.openai.choices import Choice

CANCELLED = "The server cancelled this reply. Send the request again."
DONE = b"data: [DONE]\n\n"
COMMENT_S = 1.0  # no two comments within this


def failure(event: Event) -> RequestError | None:
    """Why a reply ended without a result, if it did."""
    if isinstance(event, Failed):
        return MemoryPinned(event.message) if event.reason == "pinned" else ReplyFailed(event.message)
    return ReplyFailed(CANCELLED) if isinstance(event, Finished) and event.reason == "cancelled" else None


class EventWriter:
    """Turns arrivals into bytes, in order. `envelope` is what every event repeats: id, object, created, model."""

    def __init__(self, envelope: dict[str, Any], choices: Sequence[Choice], include_usage: bool) -> None:
        self._envelope = envelope
        self._choices = choices
        self._include_usage = include_usage
        self._usages: list[TokenUsage] = []

    def encode(self, arrival: Arrival) -> bytes:
        event, choice = arrival.event, self._choices[arrival.index]
        if isinstance(event, Piece):
            return self._events(choice.add(event))
        if isinstance(event, Finished):
            self._usages.append(event.usage)
            return self._events(choice.end(event))
        return b""

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return _event({**self._envelope, "choices": [], "usage": token_usage_answer(self._usages)}) + DONE

    def _events(self, choices: list[Any]) -> bytes:
        extra = {"usage": None} if self._include_usage else {}
        return b"".join(_event({**self._envelope, "choices": [choice], **extra}) for choice in choices)


class Comments:
    """What a client is told beside events: how far its prompt is, and something before a silence gets too long.

    Silence is what the client hears, whatever the engine does: a tool call is thousands of tokens and one event. One
    newline ends a comment: with an empty line after it some clients take it for an event.
    """

    def __init__(self, keep_alive_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_alive_s = keep_alive_s
        self._gap_s = min(COMMENT_S, keep_alive_s)
        self._clock = clock
        self._sent = clock()  # when the client last heard anything
        self._commented = -math.inf
        self._doing = "waiting"
        self._is_news = False

    def note(self, event: Event) -> None:
        if isinstance(event, Prefilled):
            self._doing, self._is_news = f"prefill {event.done}/{event.total}", True
        elif isinstance(event, Piece):
            self._doing, self._is_news = "writing", False

    def left_s(self) -> float:
        """Until the next one is due."""
        silent_until = self._sent + self._keep_alive_s
        due = min(silent_until, self._commented + self._gap_s) if self._is_news else silent_until
        return max(0.0, due - self._clock())

    def due(self) -> bytes:
        """What is to be sent now, if anything is."""
        if self.left_s() > 0:
            return b""
        self._commented, self._is_news = self._clock(), False
        return f": {self._doing}\n".encode()

    def on_sent(self) -> None:
        self._sent = self._clock()


async def send_stream(replies: Replies, writer: EventWriter, send: Send, *, keep_alive_s: float) -> None:
    """Headers wait for the first event, which tells how much was cached; but not longer than a client might."""
    begun = False
    comments = Comments(keep_alive_s)
    while not replies.ended:
        arrivals = await _take(replies, comments.left_s())
        for arrival in arrivals:
            comments.note(arrival.event)
        failed = next((error for arrival in arrivals if (error := failure(arrival.event))), None)
        if not begun:
            if failed:
                raise failed
            begun = True
            await _send_start(send, _cached_headers(replies, arrivals))
        body = comments.due() + b"".join([writer.encode(arrival) for arrival in arrivals])
        if failed:
            error = error_object(failed.message, kind=failed.type, code=failed.code)
            await _send_body(send, body + _event(error), more=False)
            return
        if body:
            await _send_body(send, body, more=True)
            comments.on_sent()
    await _send_body(send, writer.end(), more=False)


async def _take(replies: Replies, timeout_s: float) -> list[Arrival]:
    """Nothing, if nothing came in time."""
    try:
        return await replies.take(timeout_s)
    except TimeoutError:
        return []


def _cached_headers(replies: Replies, arrivals: list[Arrival]) -> dict[str, str]:
    """Known where there is one prompt and its first event is about it. Otherwise the usage tells, at the end."""
    first = arrivals[0].event if arrivals else None
    if isinstance(first, Prefilled) and len(replies.requests) == 1:
        return {"x-kvstrata-cached-tokens": str(first.cached), "x-kvstrata-miss": first.miss}
    return {}


async def _send_start(send: Send, headers: dict[str, str]) -> None:
    all_headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # nginx would hold the events back
        **headers,
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"
