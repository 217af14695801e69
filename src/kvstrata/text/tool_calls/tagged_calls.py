"""Calls written in tags; arguments stream as JSON, typed by the tool's schema.

    <function=f><parameter=x>1</parameter></function>                Qwen3-Coder
    f<arg_key>x</arg_key><arg_value>1</arg_value>                     GLM; LongCat with a prefix of its own

Values follow mlx-lm's rules, so that a call means the same whether it streams or not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvstrata.text.tool_calls.answer_text import (
    SPACE,
    AnswerText,
    CallOver,
    NoCall,
    Steps,
    mark,
    offered_name,
    space,
    until,
)

_STRINGS = frozenset(("string", "str", "text", "varchar", "char", "enum"))

_BOOLEANS = frozenset(("boolean", "bool", "binary"))

_OBJECTS = ("object", "arr", "dict", "list")

_INTEGERS = ("int", "uint", "long", "short", "unsigned")

_NUMBERS = ("num", "float")

FUNCTION = "<function="


class ValueWriter(Protocol):
    """Writer of a parameter's JSON, from text that arrives in pieces."""

    def add(self, text: str) -> None: ...

    def finish(self) -> None: ...


class StringWriter:
    """Writer of a string, which streams."""

    def __init__(self, give: Callable[[str], None], *, strip: str) -> None:
        self._give = give
        self._strip = strip
        self._has_begun = False
        self._pending: list[str] = []  # white space that is stripped if the value ends here

    def add(self, text: str) -> None:
        if not self._has_begun:
            text = text.lstrip(self._strip)
            if not text:
                return
            self._give('"')
            self._has_begun = True
        if body := text.rstrip(self._strip):
            self._give(escape_json("".join(self._pending) + body))
            self._pending = []
        self._pending.append(text[len(body) :])

    def finish(self) -> None:
        self._give('"' if self._has_begun else '""')


class LineStringWriter:
    """Writer of a string between two line breaks that are not part of it; it streams. `null` alone is null."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._is_first = True
        self._held: str | None = ""  # while it may still be null
        self._line_break = ""

    def add(self, text: str) -> None:
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        if not text:
            return
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if self._held is not None:
            self._held += text
            if "null".startswith(self._held.lower()):
                return
            text, self._held = self._held, None
            self._give('"')
        self._give(escape_json(text))

    def finish(self) -> None:
        if self._held is None:
            self._give('"')
        else:
            self._give("null" if self._held.lower() == "null" else f'"{escape_json(self._held)}"')


class OtherWriter:
    """Writer of any other value, whose type is known at its end."""

    def __init__(self, give: Callable[[str], None], convert: Callable[[str], Any]) -> None:
        self._give = give
        self._convert = convert
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def finish(self) -> None:
        text = "".join(self._parts)
        try:
            self._give(dump_json(self._convert(text)))
        except (ValueError, TypeError, RecursionError):  # a value of Python that JSON does not have
            self._give(f'"{escape_json(text)}"')


def dump_json(value: Any) -> str:
    """Return JSON without NaN and unpaired surrogates, which not every client reads. Raises ValueError or TypeError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def escape_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def qwen_writer(give: Callable[[str], None], schema: dict[str, Any] | None) -> ValueWriter:
    kind = _kind(schema)
    if not schema or kind in _STRINGS:
        return LineStringWriter(give)
    return OtherWriter(give, lambda text: _qwen_value(text.removeprefix("\n").removesuffix("\n"), kind))


def glm_writer(give: Callable[[str], None], schema: dict[str, Any] | None) -> ValueWriter:
    if _kind(schema) == "string":
        return StringWriter(give, strip=" \t\n\r\f\v")
    return OtherWriter(give, lambda text: _deserialized(text.strip()))


def _kind(schema: dict[str, Any] | None) -> str:
    """Return the type that a schema names; empty: it names none. Of a type and null the type."""
    kind = (schema or {}).get("type", "")
    if isinstance(kind, list):
        others = [one for one in kind if one != "null"]
        kind = others[0] if len(others) == 1 else "any"
    return str(kind).strip().lower()


def _qwen_value(text: str, kind: str) -> Any:
    if text.lower() == "null":
        return None
    if not kind:
        value = _loads(text)
        return value if isinstance(value, dict | list) else text
    if kind.startswith((*_INTEGERS, *_NUMBERS)):
        return _number(text, kind)
    if kind in _BOOLEANS:
        return text.lower() == "true"
    if kind.startswith(_OBJECTS):
        value = _loads(text)
        return _evaluated(text) if value is None else value
    return _evaluated(text)


def _number(text: str, kind: str) -> Any:
    """Return a number, or the text itself if it is not a number, so that the client sees it."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
        whole = int(number)
    except (ValueError, OverflowError):
        return text
    if whole == number:
        return whole
    return text if kind.startswith(_INTEGERS) else number


def _deserialized(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _evaluated(text)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _evaluated(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


@dataclass(frozen=True)
class TagFormat:
    key: tuple[str, str]
    value: tuple[str, str]  # the first may be empty: the value directly follows its key
    ends: tuple[str, ...]  # of the call
    writer: Callable[[Callable[[str], None], dict[str, Any] | None], ValueWriter]


QWEN = TagFormat(("<parameter=", ">"), ("", "</parameter>"), ("</function>", "</tool_call>"), qwen_writer)


def glm_tags(prefix: str, end: str) -> TagFormat:
    """Make GLM's tags. Its calls end with the end mark."""
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    return TagFormat((f"<{key}", f"</{key}"), (f"<{value}", f"</{value}"), (end,), glm_writer)


def scan_tagged_call(reading: AnswerText, dialect: TagFormat) -> Steps[None]:
    """Scan a call from its name on."""
    yield from space(reading)
    name = yield from offered_name(reading, SPACE + "<>")
    if (yield from reading.look()) == ">":
        reading.pos += 1
    tag = yield from _tag(reading, (dialect.key[0], *dialect.ends))
    if not tag:
        raise NoCall
    reading.begin_call(name)
    reading.arguments("{")
    try:
        is_first = True
        while tag == dialect.key[0]:
            yield from _parameter(reading, dialect, name, "" if is_first else ", ")
            is_first = False
            reading.hold()
            tag = yield from _tag(reading, (dialect.key[0], *dialect.ends))
    except NoCall:
        tag = ""
    yield from _end(reading, tag)


def _tag(reading: AnswerText, tags: tuple[str, ...]) -> Steps[str]:
    yield from space(reading)
    return (yield from mark(reading, tags))


def _parameter(reading: AnswerText, dialect: TagFormat, name: str, comma: str) -> Steps[None]:
    """Scan one parameter. Raises NoCall for text in the place of a tag; the text is held."""
    reading.drop()
    reading.hold()
    parts: list[str] = []
    if not (yield from until(reading, (dialect.key[1],), parts.append)):
        raise NoCall
    if dialect.value[0] and not (yield from _tag(reading, (dialect.value[0],))):
        raise NoCall
    reading.drop()
    key = "".join(parts).strip()
    reading.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
    writer = dialect.writer(reading.arguments, reading.offered.parameter(name, key))
    if not (yield from until(reading, (dialect.value[1],), writer.add)):
        # A value without an end tag is cut off, or the model omitted the tag.
        if not reading.cut_off:
            reading.end_call()
        raise CallOver
    writer.finish()


def _end(reading: AnswerText, tag: str) -> Steps[None]:
    if not tag and (yield from reading.look()):
        yield from reading.break_off()
    reading.drop()
    if not tag and reading.cut_off:
        raise CallOver
    reading.arguments("}")
    reading.end_call()
