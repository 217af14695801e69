"""Calls that are JSON objects: `{"name": "f", "arguments": {"x": 1}}` and what models make of it.

    {"type": "function", "function": {"name": ..., "parameters": {...}}}, {"tool_calls": [...]}, lists

Knows which keys a call has. The arguments are handed on as they come once the name is known. What closes the objects
and lists around a call is left to the reader of the answer, which forgives a brace too few.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.text.calls.json_scan import JsonScanner, StringDecoder
from kvstrata.text.calls.offered import Words
from kvstrata.text.calls.reading import NoCall, Reading, Steps, expect, mark, space

_NAMES = ("name", "function", "function_name", "tool", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_KEYS = Words((*_NAMES, *_ARGUMENTS, "id", "type", "index", "tool_calls"))
_LATE_KEYS = Words(("id", "type", "index"))
_TYPES = Words(("function", "function_call", "tool_call", "tool_use"))
_MAX_ID = 128
_SIMPLE = frozenset("0123456789-+.eEtrufalsn")


@dataclass
class _Fields:
    """What has come of one call."""

    name: str = ""
    id: str = ""
    arguments: str = ""  # empty: not yet


def json_calls(reading: Reading) -> Steps[None]:
    """At `{` or `[`. Returns after the first call's arguments; others may follow."""
    if (yield from reading.look()) == "[":
        reading.closers.append("]")
        reading.pos += 1
        yield from space(reading)
    if (yield from reading.look()) != "{":
        raise NoCall
    yield from _object(reading, _Fields(), is_outer=True)


def _object(reading: Reading, fields: _Fields, *, is_outer: bool = False) -> Steps[None]:
    reading.closers.append("}")
    reading.pos += 1
    yield from space(reading)
    while True:
        key = yield from _word(reading, _KEYS)
        character = yield from expect(reading, ":")
        if key == "tool_calls" or (key in _NAMES and character == "{"):
            return (yield from _wrapped(reading, key, fields, is_outer=is_outer))
        yield from _field(reading, key, fields)
        if fields.name and fields.arguments:
            return (yield from _late_fields(reading))
        character = yield from space(reading)
        if character not in (",", "}"):
            raise NoCall
        reading.pos += 1
        if character == "}":
            reading.closers.pop()
            break
        yield from space(reading)
    if not fields.name or not reading.in_marks:
        raise NoCall
    return reading.whole_call(fields.name, "{}", fields.id)


def _wrapped(reading: Reading, key: str, fields: _Fields, *, is_outer: bool) -> Steps[None]:
    if not is_outer or fields.name or fields.arguments:
        raise NoCall
    if key == "tool_calls":
        yield from expect(reading, "[")
        reading.closers.append("]")
        fields = _Fields()
    if (yield from reading.look()) != "{":
        raise NoCall
    yield from _object(reading, fields, is_outer=key == "tool_calls")


def _field(reading: Reading, key: str, fields: _Fields) -> Steps[None]:
    if key in _NAMES:
        if fields.name:
            raise NoCall
        fields.name = yield from _word(reading, reading.offered.names)
        if fields.arguments:
            reading.whole_call(fields.name, fields.arguments, fields.id)
    elif key in _ARGUMENTS:
        if fields.arguments:
            raise NoCall
        if key == "parameters" and fields.name and (yield from _is_schema(reading, fields.name)):
            raise NoCall
        fields.arguments = yield from _arguments(reading, fields)
    elif key == "type":
        yield from _word(reading, _TYPES)
    else:
        value = yield from _simple(reading)
        fields.id = value if key == "id" else fields.id


def _is_schema(reading: Reading, name: str) -> Steps[bool]:
    """Whether a model repeats what a tool is, instead of calling it: `{"type": "object", ...`."""
    if reading.offered.parameter(name, "type") is not None:
        return False
    begin = reading.place
    for word in ("{", '"type"', ":", '"object"'):
        yield from space(reading)
        if not (yield from mark(reading, (word,))):
            reading.back(begin)
            return False
    return True


def _late_fields(reading: Reading) -> Steps[None]:
    """What may stand behind the arguments. An id comes too late there: the call has begun."""
    while (yield from space(reading)) == ",":
        reading.pos += 1
        if (yield from space(reading)) != '"':
            return
        yield from _word(reading, _LATE_KEYS)
        yield from expect(reading, ":")
        yield from _simple(reading)


def _arguments(reading: Reading, fields: _Fields) -> Steps[str]:
    """What they are if the name is not yet known; otherwise they are handed on, and something comes back."""
    held: list[str] = []
    if not fields.name:
        yield from _object_text(reading, held.append, lambda: None)
        return "".join(held)
    yield from _object_text(reading, reading.arguments, lambda: reading.begin_call(fields.name, fields.id))
    reading.end_call()
    return "{}"


def _object_text(reading: Reading, give: Callable[[str], None], begin: Callable[[], None]) -> Steps[None]:
    """An object, or a string that has one in it. `begin` is called when it is clear that it is one."""
    character = yield from reading.look()
    if character == "{":
        begin()
        return (yield from object_text(reading, give))
    if character != '"':
        if character == "n" and reading.in_marks and (yield from _simple(reading)) == "":
            begin()
            return give("{}")
        raise NoCall
    return (yield from _object_in_string(reading, give, begin))


def object_text(reading: Reading, give: Callable[[str], None]) -> Steps[None]:
    scanner = JsonScanner()
    while not scanner.done:
        if not (yield from reading.look()):
            yield from _fail(reading, give)
        reading.pos, text = scanner.add(reading.text, reading.pos)
        give(text)
        if scanner.failed:
            yield from _fail(reading, give)


def _object_in_string(reading: Reading, give: Callable[[str], None], begin: Callable[[], None]) -> Steps[None]:
    reading.pos += 1
    decoder, scanner = StringDecoder(), JsonScanner()
    has_begun = False
    while True:
        character = yield from reading.look()
        is_end = character == '"' and not decoder.in_escape
        try:
            text = decoder.finish() if is_end or not character else decoder.add(character)
        except ValueError:
            text = character = ""
        if not has_begun:
            text = text.lstrip()
            if text[:1] not in ("", "{") or is_end or not character:
                raise NoCall
            if text:
                begin()
                has_begun = True
        taken, shown = (0, "") if scanner.done else scanner.add(text)
        give(shown)
        if is_end and scanner.done:
            reading.pos += 1
            return
        if scanner.failed or is_end or not character or (scanner.done and text[taken:].strip()):
            yield from _fail(reading, give)
        reading.pos += 1


def _fail(reading: Reading, give: Callable[[str], None]) -> Steps[None]:
    if give != reading.arguments:
        raise NoCall
    yield from reading.break_off()


def _word(reading: Reading, words: Words) -> Steps[str]:
    """A string that is one of these. Fails at the first character that none of them has."""
    if (yield from reading.look()) != '"':
        raise NoCall
    reading.pos += 1
    decoder = StringDecoder()
    word = ""
    while (character := (yield from reading.look())) and (character != '"' or decoder.in_escape):
        try:
            word += decoder.add(character)
        except ValueError:
            raise NoCall from None
        if not words.may_begin(word):
            raise NoCall
        reading.pos += 1
    if not character or word not in words:
        raise NoCall
    reading.pos += 1
    return word


def _simple(reading: Reading) -> Steps[str]:
    """A short string, or a number, true, false or null. What it says if it is a string."""
    parts: list[str] = []
    is_string = (yield from reading.look()) == '"'
    if is_string:
        parts.append('"')
        reading.pos += 1
    is_escaped = False
    while (character := (yield from reading.look())) and len(parts) <= _MAX_ID:
        if not is_string and character not in _SIMPLE:
            break
        parts.append(character)
        reading.pos += 1
        if is_string and character == '"' and not is_escaped:
            break
        is_escaped = character == "\\" and not is_escaped
    try:
        value = json.loads("".join(parts))
    except ValueError:
        raise NoCall from None
    # An id goes out on wires and into templates.
    return value if isinstance(value, str) and value.isascii() and value.isprintable() else ""
