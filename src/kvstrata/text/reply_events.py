"""Parts of a reply in the order of writing, and the protocol of parsers.

Calls never nest and never interleave: the start of a call, any number of pieces of its arguments, then its end. A reply
that was cut inside a call has no end for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ReplyText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class ReplyThinking:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A tool call begins. `id` is the model's own, or a new one: nine letters or digits."""

    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """The next piece of the arguments of the call that was begun: raw JSON text of one object."""

    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """End of the call that was begun."""


ReplyEvent = ReplyText | ReplyThinking | ToolCallStart | ToolCallArguments | ToolCallEnd


class ReplyParser(Protocol):
    """Parser of one reply; every reply has a parser of its own."""

    def add(self, text: str, ids: Sequence[int] = (), /) -> list[ReplyEvent]:
        """Parse the next piece. `ids`: the tokens that it completes, for formats that text alone does not show."""
        ...

    def finish(self, *, cut_off: bool = False) -> list[ReplyEvent]:
        """Return the events that were held back. `cut_off`: the reply ended by its length or a stop string, so an open
        call is incomplete."""
        ...


def join_events(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    """Join neighbouring events of the same kind, and drop empty events."""
    out: list[ReplyEvent] = []
    pieces: list[str] = []
    for event in events:
        if isinstance(event, ToolCallStart | ToolCallEnd):
            _close(out, pieces)
            out.append(event)
        elif event.text:
            if not (out and pieces and type(out[-1]) is type(event)):
                _close(out, pieces)
                out.append(event)
            pieces.append(event.text)
    _close(out, pieces)
    return out


def _close(out: list[ReplyEvent], pieces: list[str]) -> None:
    if pieces:
        out[-1] = type(out[-1])("".join(pieces))  # pyright: ignore[reportCallIssue]
        pieces.clear()
