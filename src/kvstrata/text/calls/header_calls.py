"""Mistral's calls: `[TOOL_CALLS]f[ARGS]{"x": 1}`, any number of them, maybe with `[CALL_ID]` and an id in between.

Knows these marks; the first of them is found by the reader of the answer.
"""

from __future__ import annotations

from kvstrata.text.calls.json_calls import object_text
from kvstrata.text.calls.json_scan import SPACE
from kvstrata.text.calls.reading import NoCall, Reading, Steps, mark, space, until

_ARGUMENTS, _ID = "[ARGS]", "[CALL_ID]"
_MAX_ID = 128


def header_call(reading: Reading) -> Steps[None]:
    """At the name."""
    name = ""
    while (character := (yield from reading.look())) and character not in SPACE + "[":
        name += character
        if not reading.offered.names.may_begin(name):
            raise NoCall
        reading.pos += 1
    if name not in reading.offered.names:
        raise NoCall
    yield from space(reading)
    found = yield from mark(reading, (_ARGUMENTS, _ID))
    id = "" if found != _ID else (yield from _id(reading))
    if not found or (yield from space(reading)) != "{":
        raise NoCall
    reading.begin_call(name, id)
    yield from object_text(reading, reading.arguments)
    reading.end_call()


def _id(reading: Reading) -> Steps[str]:
    parts: list[str] = []
    if not (yield from until(reading, (_ARGUMENTS,), parts.append)):
        raise NoCall
    id = "".join(parts).strip()
    return id if len(id) <= _MAX_ID and id.isascii() and id.isprintable() else ""
