"""Calls in forms that only mlx-lm's parsers know: they are given when they are complete, whole.

Knows mlx-lm's parsers. Each gets the text between its marks once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstrata.text.calls.offered import Offered
from kvstrata.text.calls.reading import NoCall, Reading, Steps, until
from kvstrata.text.calls.typed_values import dumped

Parse = Callable[..., Any]


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: str
    id: str


def whole_calls(reading: Reading, start: str, end: str, parse: Parse) -> Steps[None]:
    """Behind the start mark; some of what is between the marks may have been read, and is held."""
    before, start, read = reading.drop().partition(start)
    body = [read]
    reading.hold()
    found = yield from until(reading, (end,) if end else (), body.append)
    text = "".join(body)
    calls = [] if not found and end and reading.cut_off else _parsed(parse, text, reading.offered)
    if not calls:
        reading.drop()
        reading.say(before + start + text + found)
        raise NoCall
    for call in calls:
        reading.whole_call(call.name, call.arguments, call.id)


def _parsed(parse: Parse, body: str, offered: Offered) -> list[_Call]:
    """No calls, if any of them is malformed or calls what was not offered."""
    try:
        parsed = parse(body, offered.tools)
        calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception:  # noqa: BLE001 mlx-lm's parsers meet whatever a model wrote, and fail in every way there is
        return []
    return calls if all(call.name in offered.names for call in calls) else []


def _call(parsed: dict[str, Any]) -> _Call:
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("a call needs an object of arguments")
    if not isinstance(parsed["name"], str):
        raise TypeError("a call needs a name")
    id = parsed.get("id")
    return _Call(parsed["name"], dumped(arguments), id if isinstance(id, str) and id.isascii() else "")
