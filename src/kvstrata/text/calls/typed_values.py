"""Values that a model writes as plain text between tags, as JSON of the type that the tool's schema names.

Knows mlx-lm's rules for Qwen3-Coder's and GLM's calls, so that a call means the same whether it streams or not.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any, Protocol

_STRINGS = frozenset(("string", "str", "text", "varchar", "char", "enum"))
_BOOLEANS = frozenset(("boolean", "bool", "binary"))
_OBJECTS = ("object", "arr", "dict", "list")
_INTEGERS = ("int", "uint", "long", "short", "unsigned")
_NUMBERS = ("num", "float")


class ValueWriter(Protocol):
    """Takes a value's text in pieces and gives its JSON."""

    def add(self, text: str) -> None: ...

    def finish(self) -> None: ...


class StringWriter:
    """A string, handed on as it comes."""

    def __init__(self, give: Callable[[str], None], *, strip: str) -> None:
        self._give = give
        self._strip = strip
        self._has_begun = False
        self._pending: list[str] = []  # may be the end, which is stripped

    def add(self, text: str) -> None:
        if not self._has_begun:
            text = text.lstrip(self._strip)
            if not text:
                return
            self._give('"')
            self._has_begun = True
        if body := text.rstrip(self._strip):
            self._give(escaped("".join(self._pending) + body))
            self._pending = []
        self._pending.append(text[len(body) :])

    def finish(self) -> None:
        self._give('"' if self._has_begun else '""')


class LineStringWriter:
    """A string between two line breaks, which are not part of it, handed on as it comes. `null` alone is null."""

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
        self._give(escaped(text))

    def finish(self) -> None:
        if self._held is None:
            self._give('"')
        else:
            self._give("null" if self._held.lower() == "null" else f'"{escaped(self._held)}"')


class OtherWriter:
    """Any other value: its type is known when all of it is."""

    def __init__(self, give: Callable[[str], None], convert: Callable[[str], Any]) -> None:
        self._give = give
        self._convert = convert
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def finish(self) -> None:
        text = "".join(self._parts)
        try:
            self._give(json.dumps(self._convert(text), ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError, RecursionError):  # what Python reads, JSON may not have
            self._give(f'"{escaped(text)}"')


def escaped(text: str) -> str:
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
    """Empty: the schema names none. Of several the one beside null."""
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
    """What is no number stays the text that it is: the client sees it."""
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
