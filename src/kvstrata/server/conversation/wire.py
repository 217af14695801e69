"""What a wire is: the language of one API, in which an answer is written piece by piece or whole.

A wire knows names and shapes of JSON. It knows nothing of the engine, of HTTP, or of how a reply is taken apart. A new
API is a folder beside `openai/`, with a schema, a function from its bodies to a `Chat`, and a class like this one.
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

# Many clients end a line of a stream at these too, in the middle of an event. Below U+0020 json escapes by itself.
SEPARATORS = {"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}


class ServerEvent(NamedTuple):
    data: Any  # becomes JSON; a text goes out as it is
    name: str = ""


@dataclass(frozen=True)
class Begun:
    """What is known of a prompt when its stream opens."""

    prompt_tokens: int
    cached_tokens: int | None  # None: not looked up yet


@dataclass(frozen=True)
class Ended:
    """How one choice ended. `stop`: the stop string that ended it, if one did."""

    reason: Literal["stop", "length"]
    usage: TokenUsage
    stop: str = ""


class Wire(Protocol):
    """One for each answer. It is told of everything in order, whether the client streams or not."""

    def begin(self, begun: Begun) -> list[ServerEvent]:
        """What a stream opens with."""
        ...

    def add(self, index: int, events: Sequence[ReplyEvent], logprobs: Sequence[TokenLogprob]) -> list[ServerEvent]: ...

    def end(self, index: int, ended: Ended) -> list[ServerEvent]:
        """The choice at `index` is complete."""
        ...

    def close(self, usage: TokenUsage) -> list[ServerEvent]:
        """All choices are, and this is what they took together."""
        ...

    def ping(self, doing: str) -> bytes:
        """What breaks a silence where this API's clients look for it. `doing`: what the server does meanwhile."""
        ...

    def fail(self, error: RequestError) -> list[ServerEvent]:
        """The last of a stream that cannot be finished."""
        ...

    def whole(self, usage: TokenUsage) -> Any:
        """The answer without a stream."""
        ...


def comment(doing: str) -> bytes:
    """One newline ends it: with an empty line after it some clients take it for an event."""
    return f": {doing}\n".encode()


def encode(events: Sequence[ServerEvent]) -> bytes:
    return b"".join(_encode(event) for event in events)


def _encode(event: ServerEvent) -> bytes:
    data = event.data.encode() if isinstance(event.data, str) else json_bytes(event.data)
    name = f"event: {event.name}\n".encode() if event.name else b""
    return name + b"data: " + data + b"\n\n"


def json_response(answer: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Call it on a worker thread: writing a million numbers as JSON takes a second, in which no one else is served."""
    return Response(json_bytes(answer), media_type="application/json", headers=headers)


def json_bytes(answer: Any) -> bytes:
    # "replace": a model may write half a surrogate pair into a tool call, which no UTF-8 can carry.
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for separator, escaped in SEPARATORS.items():
        text = text.replace(separator, escaped)
    return text.encode("utf-8", "replace")
