"""The interface of response writers: the format of one API, streamed or complete, and framing of its events.

A writer defines names and shapes of JSON. It is independent of the engine, of HTTP and of reply parsing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from starlette.responses import Response

from kvstrata.engine.request import TokenLogprob, TokenUsage
from kvstrata.errors import RequestError
from kvstrata.text.reply_events import ReplyEvent

EVENT_STREAM = "text/event-stream; charset=utf-8"
# Many clients treat these as line ends too, which would split an event. json escapes those below U+0020 itself.
SEPARATORS = {"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}


class JsonEvent(NamedTuple):
    """An event of a stream."""

    data: Any  # encoded as JSON; a str is sent unchanged
    name: str = ""


@dataclass(frozen=True)
class StreamStart:
    """Information about a prompt at the start of its stream."""

    prompt_tokens: int
    cached_tokens: int | None  # None: not looked up yet


@dataclass(frozen=True)
class ChoiceEnd:
    """The end of one choice. `stop`: the stop string that ended it, or empty."""

    reason: Literal["stop", "length"]
    usage: TokenUsage
    stop: str = ""


class ResponseWriter(Protocol):
    """Writes one response in the format of an API. It receives all events in order, for streams and complete responses
    alike."""

    media_type: str  # of a stream

    def encode(self, events: Sequence[JsonEvent]) -> bytes:
        """Return the bytes of events in a stream."""
        ...

    def start(self, start: StreamStart) -> list[JsonEvent]:
        """Return the first events of a stream."""
        ...

    def add(self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob]) -> list[JsonEvent]: ...

    def finish_choice(self, index: int, end: ChoiceEnd) -> list[JsonEvent]:
        """Return the events that complete the choice at `index`."""
        ...

    def finish(self, usage: TokenUsage) -> list[JsonEvent]:
        """Return the last events, after all choices have ended. `usage`: the total of all choices."""
        ...

    def ping(self, doing: str) -> bytes:
        """Return the bytes that keep this API's clients waiting. `doing`: the current activity of the server."""
        ...

    def fail(self, error: RequestError) -> list[JsonEvent]:
        """Return the last events of a stream that failed."""
        ...

    def whole(self, usage: TokenUsage) -> Any:
        """Return the complete response without a stream."""
        ...


def comment(doing: str) -> bytes:
    """Return a comment of a stream. It ends with a single newline: after an empty line some clients take it for an
    event."""
    return f": {doing}\n".encode()


class EventStreamFormat:
    """Framing of a stream of server-sent events, for writers to inherit."""

    media_type = EVENT_STREAM

    def encode(self, events: Sequence[JsonEvent]) -> bytes:
        return encode_sse(events)


def encode_sse(events: Sequence[JsonEvent]) -> bytes:
    return b"".join(_encode_event(event) for event in events)


def _encode_event(event: JsonEvent) -> bytes:
    data = event.data.encode() if isinstance(event.data, str) else json_bytes(event.data)
    name = f"event: {event.name}\n".encode() if event.name else b""
    return name + b"data: " + data + b"\n\n"


def json_response(answer: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response. Call it on a worker thread: encoding a million numbers takes a second."""
    return Response(json_bytes(answer), media_type="application/json", headers=headers)


def json_bytes(answer: Any) -> bytes:
    # "replace": a model may write half a surrogate pair into a tool call, which UTF-8 cannot encode.
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for separator, escaped in SEPARATORS.items():
        text = text.replace(separator, escaped)
    return text.encode("utf-8", "replace")
