"""The text that a template writes around the JSON arguments of a call, found by rendering one.

Knows templates. Whoever constrains a reply to be a call needs that text; so does the reader, for the marks in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.text.probe import PROBE_ARGUMENTS, PROBE_ID, PROBE_NAME

if TYPE_CHECKING:
    from kvstrata.text.template import ChatTemplate

_CLOSERS = re.compile(r"[\s}\]]*")
_MARK = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")
_WORD = re.compile(r"\s*([^\s{\[]+)\s*\[?\s*\{")  # before JSON, as in `functools[{`
_LATE_ID = re.compile(r',\s*"id":\s*"' + PROBE_ID + '"')


@dataclass(frozen=True)
class CallText:
    """`before` has PROBE_NAME in the place of the name."""

    before: str
    after: str

    def around(self, name: str) -> tuple[str, str]:
        # A name that JSON escapes is escaped here too; all others are the same either way.
        return self.before.replace(PROBE_NAME, json.dumps(name, ensure_ascii=False)[1:-1]), self.after

    @property
    def start(self) -> str:
        """The mark that the call begins with; empty: it has none."""
        found = _MARK.match(self.before) or _WORD.match(self.before)
        return found[1] if found else ""

    @property
    def end(self) -> str:
        found = re.search(r"(<[^<>\s]+>|\[/?\w+\])\s*$", self.after)
        return found[1] if found and self.start else ""


def call_text(template: ChatTemplate, start: str, end: str) -> CallText | None:
    """`start`, `end`: the marks that mlx-lm knows. None where the template shows no call, or not as JSON."""
    prompt, text = template.probe_call()
    place, length = _arguments(text)
    if not length:
        return None
    begin = text.rfind(start, 0, place) if start else -1
    if begin < 0 and text.startswith(prompt):
        begin = len(prompt)
    if begin < 0:
        begin = _json_start(text, place)
    before = text[begin:place].lstrip()
    if begin < 0 or PROBE_NAME not in before:
        return None
    return CallText(before, _after(_LATE_ID.sub("", text[place + length :], count=1), before, end))


def _arguments(text: str) -> tuple[int, int]:
    """Where the arguments stand, and how long they are; 0: nowhere as JSON."""
    decoder = json.JSONDecoder()
    key = text.rfind(f'"{next(iter(PROBE_ARGUMENTS))}"')
    place = text.rfind("{", 0, key) if key >= 0 else -1
    try:
        value, end = decoder.raw_decode(text, place) if place >= 0 else (None, 0)
    except ValueError:
        return 0, 0
    return (place, end - place) if value == PROBE_ARGUMENTS else (0, 0)


def _json_start(text: str, place: int) -> int:
    """Where the object begins that the arguments are in."""
    begin = text.rfind("{", 0, place)
    return begin if begin >= 0 and PROBE_NAME in text[begin:place] else -1


def _after(rest: str, before: str, end: str) -> str:
    """What closes what was opened, and the mark at the end. What follows ends the turn."""
    closers = _CLOSERS.match(rest)
    closing = closers[0] if closers else ""
    mark = _MARK.match(rest, len(closing)) if end == "" else None
    if end and rest[len(closing) :].startswith(end):
        return closing + end
    if mark and mark[1] in _mates(before):
        return rest[: mark.end()]
    return closing.rstrip() if "{" in before else ""


def _mates(before: str) -> set[str]:
    """What may close the mark at the beginning."""
    found = _MARK.match(before)
    if not found:
        return {"<|call|>"}
    mark = found[1]
    return {f"{mark[0]}/{mark[1:]}", f"{mark[:2]}/{mark[2:]}", mark.replace("begin", "end"), "<|call|>"}
