"""Reads replies in tests: in any pieces, with ids of calls that can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyParser,
    ReplyText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    join_events,
)
from kvstrata.text.reply_parser import PlainParser
from kvstrata.text.thinking import ThinkingParser, ThinkingTags
from kvstrata.text.tool_calls.answer_text import OfferedTools
from kvstrata.text.tool_calls.native_calls import NativeCallFormat


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", x={"type": "integer"}), tool("find", x={"type": "string"}), tool("read_file")]
TAGS = ThinkingTags("<think>", "</think>")
HERMES = NativeCallFormat("<tool_call>", "</tool_call>")


def reader(
    native: NativeCallFormat | None = None,
    *,
    tools: Sequence[dict[str, Any]] = TOOLS,
    tags: ThinkingTags | None = TAGS,
    is_open: bool = False,
) -> PlainParser:
    thinking = ThinkingParser(tags, is_open=is_open) if tags else None
    return PlainParser(OfferedTools(tools), native, thinking)


def read(reader: ReplyParser, pieces: Iterable[str], *, cut_off: bool = False) -> list[ReplyEvent]:
    """Ids that the reader made up are empty."""
    events = [event for piece in pieces for event in reader.add(piece)]
    return known(join_events(events + reader.finish(cut_off=cut_off)))


def known(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    return [
        replace(event, id="") if isinstance(event, ToolCallStart) and is_new(event.id) else event for event in events
    ]


def is_new(id: str) -> bool:
    return len(id) == 9 and id.isalnum()


def call(name: str, arguments: str, *, id: str = "", ended: bool = True) -> list[ReplyEvent]:
    given = [ToolCallArguments(arguments)] if arguments else []
    return [ToolCallStart(id, name), *given, *([ToolCallEnd()] if ended else [])]


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    places = sorted({place for place in cuts if 0 < place < len(text)} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


def said(events: Iterable[ReplyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, ReplyText))


def well_formed(events: Sequence[ReplyEvent], *, cut_off: bool = False) -> bool:
    """Whether calls neither nest nor interleave."""
    is_open = False
    for event in events:
        allowed = (
            isinstance(event, ToolCallArguments | ToolCallEnd)
            if is_open
            else not isinstance(event, ToolCallArguments | ToolCallEnd)
        )
        if not allowed:
            return False
        is_open = isinstance(event, ToolCallStart) or (is_open and not isinstance(event, ToolCallEnd))
    return not is_open or cut_off


def parses(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
