"""OpenAI's messages, brought into the one shape that chat templates read.

Knows what a message may look like. Does not know templates: how tool arguments are wanted is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvstrata.errors import InvalidRequest

Message = dict[str, Any]
ShapeArguments = Callable[[Any], Any]


def arguments_as_object(arguments: Any) -> Any:
    """Most templates walk over the arguments or write them with `tojson`."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return arguments  # what a model once wrote must not end its chat: the template may still show it
    return parsed if isinstance(parsed, dict) else arguments


def arguments_as_text(arguments: Any) -> str:
    """Some templates (DeepSeek's) join them to the text around them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def normalise(messages: Sequence[Message], shape_arguments: ShapeArguments) -> list[Message]:
    """New messages: text content, known roles, shaped arguments. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages is empty: send at least one message.", param="messages")
    return [_normalise_one(message, place, shape_arguments) for place, message in enumerate(messages)]


def _normalise_one(message: Message, place: int, shape_arguments: ShapeArguments) -> Message:
    # Templates ask whether a key is there, so one that says null must not be.
    out = {key: value for key, value in message.items() if value is not None}
    out["role"] = _role(message, place)
    out["content"] = _text(message.get("content"), place)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_normalise_call(call, place, shape_arguments) for call in _as_list(calls, place)]
    return out


def _role(message: Message, place: int) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(place, "has no role: system, user, assistant or tool")
    return "system" if role == "developer" else role


def _text(content: Any, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(place, "needs content that is a string or a list of text parts")
    return "".join(_part_text(part, place) for part in content)


def _part_text(part: Any, place: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise _wrong(place, f"has a content part of type {kind!r}, but only text is supported: remove it")
    if not isinstance(part.get("text"), str):
        raise _wrong(place, "has a text part without its text")
    return part["text"]


def _normalise_call(call: Any, place: int, shape_arguments: ShapeArguments) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(place, "has a tool call without function.name")
    return call | {"function": function | {"arguments": shape_arguments(function.get("arguments"))}}


def _as_list(calls: Any, place: int) -> list[Any]:
    if not isinstance(calls, list):
        raise _wrong(place, "needs tool_calls that are a list")
    return calls


def _wrong(place: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"messages[{place}] {what}.", param="messages")
