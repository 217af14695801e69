"""Calls written as JSON; arguments stream once the name is known.

    {"name": "f", "arguments": {"x": 1}}
    {"type": "function", "function": {"name": ..., "parameters": {...}}}, {"tool_calls": [...]}, lists
    [TOOL_CALLS]f[ARGS]{"x": 1}                              Mistral; perhaps with [CALL_ID] and an id in between

The scanner skips what closes the objects and lists around a call, also where a brace is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.text.tool_calls.answer_text import (
    SPACE,
    AnswerText,
    NoCall,
    Steps,
    Words,
    expect,
    mark,
    offered_name,
    space,
    until,
)

MAX_DEPTH = 100  # accepted by clients' parsers, and far more than real arguments have

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_RUN = re.compile(r"[0-9+\-.eEtrufalsn]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_ESCAPE_START = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')
_UNICODE_ESCAPE = len("\\u0000")

# Characters that may come next in JSON, beside space.
_FIRST_KEY, _KEY = '"}', '"'
_VALUE = '"{[-0123456789tfn'

_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}

_NAMES = ("name", "function", "function_name", "tool", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_KEYS = Words((*_NAMES, *_ARGUMENTS, "id", "type", "index", "tool_calls"))
_LATE_KEYS = Words(("id", "type", "index"))
_TYPES = Words(("function", "function_call", "tool_call", "tool_use"))
_MAX_ID = 128
_SIMPLE = frozenset("0123456789-+.eEtrufalsn")


class JsonScanner:
    """Validate one object that arrives in pieces. `done`: it is complete. `failed`: it is not JSON.

    Control characters inside strings become their escapes: models write line breaks there, which JSON does not allow.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._closers: list[str] = []  # of the open objects and lists, the innermost last
        self._allowed = "{"  # characters that may come next, beside space
        self._in_string = False
        self._escape = ""  # the begun escape of a string
        self._scalar: list[str] = []  # pieces of the begun number, true, false or null

    def add(self, text: str, start: int = 0) -> tuple[int, str]:
        """Return where it stopped (after the object, or where it failed), and the JSON that it accepted."""
        pieces: list[str] = []
        place = begin = start
        while place < len(text) and not self.done:
            is_in_text = self._in_string and not self._escape
            if is_in_text and (run := _PLAIN.match(text, place)):
                place = run.end()
                continue
            if self._scalar and (run := _SCALAR_RUN.match(text, place)):
                self._scalar.append(run[0])
                place = run.end()
                continue
            character = text[place]
            if is_in_text and character < " ":
                pieces += (text[begin:place], json.dumps(character)[1:-1])
                begin = place + 1
            elif not (self._in_quotes(character) if self._in_string else self._outside(character)):
                self.failed = True
                break
            place += 1
        pieces.append(text[begin:place])
        return place, "".join(pieces)

    def _in_quotes(self, character: str) -> bool:
        """Take a quote, a backslash or a character of an escape."""
        if self._escape or character == "\\":
            self._escape += character
            is_valid = _ESCAPE_START.fullmatch(self._escape) is not None
            if len(self._escape) == (_UNICODE_ESCAPE if self._escape[1:2] == "u" else 2):
                self._escape = ""
            return is_valid
        self._in_string = False
        self._allowed = ":" if self._allowed in (_KEY, _FIRST_KEY) else "," + self._closers[-1]
        return True

    def _outside(self, character: str) -> bool:
        """Take a character outside strings; the first one after a scalar completes it."""
        if self._scalar:
            if not _SCALAR.fullmatch("".join(self._scalar)):
                return False
            self._scalar, self._allowed = [], "," + self._closers[-1]
        if character in SPACE:
            return bool(self._closers)
        if character not in self._allowed:
            return False
        if character in "{[":
            self._closers.append("}" if character == "{" else "]")
            self._allowed = _FIRST_KEY if character == "{" else _VALUE + "]"
            return len(self._closers) <= MAX_DEPTH
        if character in "}]":
            self._closers.pop()
            self.done = not self._closers
            self._allowed = "" if self.done else "," + self._closers[-1]
        elif character == ",":
            self._allowed = _KEY if self._closers[-1] == "}" else _VALUE
        elif character == ":":
            self._allowed = _VALUE
        elif character == '"':
            self._in_string = True
        else:
            self._scalar.append(character)
        return True


class JsonStringDecoder:
    """Decoder of one JSON string's inside, a character at a time. Half a surrogate pair stays an escape."""

    def __init__(self) -> None:
        self._escape = ""  # characters of an incomplete escape
        self._high = 0  # first half of a surrogate pair

    @property
    def in_escape(self) -> bool:
        return bool(self._escape)

    def add(self, character: str) -> str:
        """Return the text that a character completes. Raises ValueError for an invalid escape."""
        if not self._escape:
            if character == "\\":
                self._escape = character
                return ""
            return self.finish() + character
        self._escape += character
        if self._escape[1] != "u":
            self._escape = ""
            if character not in _ESCAPES:
                raise ValueError("no escape")
            return self.finish() + _ESCAPES[character]
        return self._unicode() if len(self._escape) == len("\\u0000") else ""

    def finish(self) -> str:
        high, self._high = self._high, 0
        return f"\\u{high:04x}" if high else ""

    def _unicode(self) -> str:
        digits, self._escape = self._escape[2:], ""
        if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
            raise ValueError("no escape")
        code = int(digits, 16)
        if self._high and 0xDC00 <= code < 0xE000:
            pair = 0x10000 + ((self._high - 0xD800) << 10) + (code - 0xDC00)
            self._high = 0
            return chr(pair)
        before = self.finish()
        if 0xD800 <= code < 0xDC00:
            self._high = code
            return before
        return before + (f"\\u{code:04x}" if 0xDC00 <= code < 0xE000 else chr(code))


@dataclass
class _CallFields:
    """Fields of one call that have arrived."""

    name: str = ""
    id: str = ""
    arguments: str = ""  # empty: not yet


def scan_json_calls(reading: AnswerText) -> Steps[None]:
    """Scan a call from `{` or `[` on. Returns after the first call's arguments; other calls may follow."""
    if (yield from reading.look()) == "[":
        reading.closers.append("]")
        reading.pos += 1
        yield from space(reading)
    if (yield from reading.look()) != "{":
        raise NoCall
    yield from _object(reading, _CallFields(), is_outer=True)


def _object(reading: AnswerText, fields: _CallFields, *, is_outer: bool = False) -> Steps[None]:
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


def _wrapped(reading: AnswerText, key: str, fields: _CallFields, *, is_outer: bool) -> Steps[None]:
    if not is_outer or fields.name or fields.arguments:
        raise NoCall
    if key == "tool_calls":
        yield from expect(reading, "[")
        reading.closers.append("]")
        fields = _CallFields()
    if (yield from reading.look()) != "{":
        raise NoCall
    yield from _object(reading, fields, is_outer=key == "tool_calls")


def _field(reading: AnswerText, key: str, fields: _CallFields) -> Steps[None]:
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


def _is_schema(reading: AnswerText, name: str) -> Steps[bool]:
    """Whether the model repeats a tool's definition instead of calling it: `{"type": "object", ...`."""
    if reading.offered.parameter(name, "type") is not None:
        return False
    begin = reading.place
    for word in ("{", '"type"', ":", '"object"'):
        yield from space(reading)
        if not (yield from mark(reading, (word,))):
            reading.back(begin)
            return False
    return True


def _late_fields(reading: AnswerText) -> Steps[None]:
    """Read the fields after the arguments. An id is too late there, because the call has begun."""
    while (yield from space(reading)) == ",":
        reading.pos += 1
        if (yield from space(reading)) != '"':
            return
        yield from _word(reading, _LATE_KEYS)
        yield from expect(reading, ":")
        yield from _simple(reading)


def _arguments(reading: AnswerText, fields: _CallFields) -> Steps[str]:
    """Return the arguments if the name is not known yet; otherwise stream them and return a text that is not empty."""
    held: list[str] = []
    if not fields.name:
        yield from _object_text(reading, held.append, lambda: None)
        return "".join(held)
    yield from _object_text(reading, reading.arguments, lambda: reading.begin_call(fields.name, fields.id))
    reading.end_call()
    return "{}"


def _object_text(reading: AnswerText, give: Callable[[str], None], begin: Callable[[], None]) -> Steps[None]:
    """Scan an object, or a string that contains one. `begin` is called when the object has begun."""
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


def object_text(reading: AnswerText, give: Callable[[str], None]) -> Steps[None]:
    scanner = JsonScanner()
    while not scanner.done:
        if not (yield from reading.look()):
            yield from _fail(reading, give)
        reading.pos, text = scanner.add(reading.text, reading.pos)
        give(text)
        if scanner.failed:
            yield from _fail(reading, give)


def _object_in_string(reading: AnswerText, give: Callable[[str], None], begin: Callable[[], None]) -> Steps[None]:
    reading.pos += 1
    decoder, scanner = JsonStringDecoder(), JsonScanner()
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


def _fail(reading: AnswerText, give: Callable[[str], None]) -> Steps[None]:
    if give != reading.arguments:
        raise NoCall
    yield from reading.break_off()


def _word(reading: AnswerText, words: Words) -> Steps[str]:
    """Take a string that is one of `words`. Raises NoCall at the first character that no word has there."""
    if (yield from reading.look()) != '"':
        raise NoCall
    reading.pos += 1
    decoder = JsonStringDecoder()
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


def _simple(reading: AnswerText) -> Steps[str]:
    """Take a short string, a number, true, false or null, and return the text of a string."""
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
    # Ids are sent to clients and rendered by templates.
    return value if isinstance(value, str) and value.isascii() and value.isprintable() else ""


_ARGUMENTS_MARK, _ID = "[ARGS]", "[CALL_ID]"


def scan_header_call(reading: AnswerText) -> Steps[None]:
    """Scan a call from its name on."""
    name = yield from offered_name(reading, SPACE + "[")
    yield from space(reading)
    found = yield from mark(reading, (_ARGUMENTS_MARK, _ID))
    id = "" if found != _ID else (yield from _header_id(reading))
    if not found or (yield from space(reading)) != "{":
        raise NoCall
    reading.begin_call(name, id)
    yield from object_text(reading, reading.arguments)
    reading.end_call()


def _header_id(reading: AnswerText) -> Steps[str]:
    parts: list[str] = []
    if not (yield from until(reading, (_ARGUMENTS_MARK,), parts.append)):
        raise NoCall
    id = "".join(parts).strip()
    return id if len(id) <= _MAX_ID and id.isascii() and id.isprintable() else ""
