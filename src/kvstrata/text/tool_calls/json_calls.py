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

from kvstrata.text.tool_calls.answer_text import SPACE, AnswerText, NoCall, Steps, Words, expect, mark, space, until

MAX_DEPTH = 100  # what clients' parsers take, and far more than arguments have

_DIGITS = "0123456789"

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')

_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

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
        self._stack: list[str] = []
        self._then: Callable[[str], bool] = self._after_value  # where a string goes on
        self._literal = ""
        self._num_hex = 0
        self._state: Callable[[str], bool] = self._root

    def add(self, text: str, start: int = 0) -> tuple[int, str]:
        """Return where it stopped (after the object, or at the wrong character), and the JSON that it accepted."""
        pieces: list[str] = []
        place = begin = start
        while place < len(text) and not self.done:
            if self._state == self._string and (match := _PLAIN.match(text, place)) and match.end() > place:
                place = match.end()
                continue
            character = text[place]
            if self._state == self._string and character < " ":
                pieces += (text[begin:place], json.dumps(character)[1:-1])
                begin = place + 1
            elif not self._state(character):
                self.failed = True
                break
            place += 1
        pieces.append(text[begin:place])
        return place, "".join(pieces)

    def _root(self, character: str) -> bool:
        return character == "{" and self._open(character)

    def _open(self, character: str) -> bool:
        self._stack.append(character)
        self._state = self._first_key if character == "{" else self._first_item
        return len(self._stack) <= MAX_DEPTH

    def _close(self, character: str) -> bool:
        if self._stack.pop() != {"}": "{", "]": "["}[character]:
            return False
        self._state = self._after_value
        self.done = not self._stack
        return True

    def _value(self, character: str) -> bool:
        if character == '"':
            self._state, self._then = self._string, self._after_value
        elif character in "{[":
            return self._open(character)
        elif character in _LITERALS:
            self._state, self._literal = self._in_literal, _LITERALS[character]
        elif character == "-":
            self._state = self._minus
        elif character in _DIGITS:
            self._state = self._zero if character == "0" else self._integer
        else:
            return character in SPACE
        return True

    def _first_item(self, character: str) -> bool:
        return self._close(character) if character == "]" else self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._close(character) if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._state, self._then = self._string, self._colon
            return True
        return character in SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._state = self._value
            return True
        return character in SPACE

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._state = self._key if self._stack[-1] == "{" else self._value
            return True
        return self._close(character) if character in "}]" else character in SPACE

    def _string(self, character: str) -> bool:
        if character == '"':
            self._state = self._then
        elif character == "\\":
            self._state = self._escape
        return True

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._state, self._num_hex = self._hex, 4
            return True
        self._state = self._string
        return character in _ESCAPES

    def _hex(self, character: str) -> bool:
        self._num_hex -= 1
        if not self._num_hex:
            self._state = self._string
        return character in "0123456789abcdefABCDEF"

    def _in_literal(self, character: str) -> bool:
        if not self._literal.startswith(character):
            return False
        self._literal = self._literal[1:]
        if not self._literal:
            self._state = self._after_value
        return True

    def _minus(self, character: str) -> bool:
        self._state = self._zero if character == "0" else self._integer
        return character in _DIGITS

    def _zero(self, character: str) -> bool:
        if character == ".":
            self._state = self._point
            return True
        return self._fraction(character) if character not in _DIGITS else False

    def _integer(self, character: str) -> bool:
        return character in _DIGITS or self._zero(character)

    def _point(self, character: str) -> bool:
        self._state = self._fraction
        return character in _DIGITS

    def _fraction(self, character: str) -> bool:
        if character in "eE":
            self._state = self._exponent
            return True
        return self._exponent_digits(character)

    def _exponent(self, character: str) -> bool:
        if character in "+-":
            self._state = self._exponent_sign
            return True
        return self._exponent_sign(character)

    def _exponent_sign(self, character: str) -> bool:
        self._state = self._exponent_digits
        return character in _DIGITS

    def _exponent_digits(self, character: str) -> bool:
        if character in _DIGITS:
            return True
        self._state = self._after_value
        return self._after_value(character)


class JsonStringDecoder:
    """The inside of one JSON string, a character at a time. Half a surrogate pair stays an escape."""

    def __init__(self) -> None:
        self._escape = ""  # what has come of one
        self._high = 0  # the first half of a pair

    @property
    def in_escape(self) -> bool:
        return bool(self._escape)

    def add(self, character: str) -> str:
        """Raises ValueError where it is no escape that JSON knows."""
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
    """At `{` or `[`. Returns after the first call's arguments; others may follow."""
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
    """A string that is one of these. Fails at the first character that none of them has."""
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


_ARGUMENTS_MARK, _ID = "[ARGS]", "[CALL_ID]"


def scan_header_call(reading: AnswerText) -> Steps[None]:
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
