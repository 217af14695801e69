"""OpenAI's messages, brought into the one shape that chat templates read.

Knows what a message may look like. Does not know templates: what a template wants (`Shape`) is given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstrata.errors import InvalidRequest

Message = dict[str, Any]

ShapeArguments = Callable[[Any], Any]

# Names of the model's thinking in templates. Clients send the first.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

_SHORT_ID = 9  # characters, letters and digits only


def arguments_as_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object: most templates iterate over them or write them with `tojson`."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # invalid JSON of an earlier reply must not end its chat: the template may still show it
    return parsed if isinstance(parsed, dict) else arguments


def arguments_as_text(arguments: Any) -> str:
    """Return the arguments of a call as text: some templates (DeepSeek's) join them to the text around them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


@dataclass(frozen=True)
class MessageShape:
    """Differences between the messages that a template reads and those of OpenAI."""

    arguments: ShapeArguments = arguments_as_object
    short_ids: bool = False  # the template refuses call ids that are not nine letters or digits (Mistral's)
    reasoning_key: str = "reasoning_content"  # the key that the template reads thinking from
    reasoning_or_content: bool = False  # the template refuses both beside a call (gpt-oss's)


def normalize_messages(messages: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Return new messages with text content and known roles, in the template's shape. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages is empty: send at least one message.", param="messages")
    return [_normalise_one(message, place, shape) for place, message in enumerate(messages)]


def _normalise_one(message: Message, place: int, shape: MessageShape) -> Message:
    # Templates test whether a key exists, so a null value and an empty list of calls are removed.
    out = {key: value for key, value in message.items() if value is not None and (key != "tool_calls" or value)}
    out["role"] = _role(message, place)
    out["content"] = _text(message.get("content"), place)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [_normalise_call(call, place, shape) for call in _as_list(calls, place)]
    if shape.short_ids and "tool_call_id" in out:
        out["tool_call_id"] = _short_id(out["tool_call_id"])
    reasoning = out.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise _wrong(place, "has a reasoning_content that is no string")
    if shape.reasoning_or_content and "tool_calls" in out and out["content"] and reasoning:
        out |= {"reasoning_content": f"{reasoning}\n\n{out['content']}", "content": ""}
    if reasoning and shape.reasoning_key not in out:
        out[shape.reasoning_key] = out["reasoning_content"]
    return out


def _short_id(id: Any) -> Any:
    """Return a short id that is the same for a call and its result, whichever client made the id."""
    if not isinstance(id, str) or (len(id) == _SHORT_ID and id.isascii() and id.isalnum()):
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID]


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
    # A refusal is earlier output of the model; its text is under the key of its type, as in a text part.
    if kind not in ("text", "refusal"):
        raise _wrong(place, f"has a content part of type {kind!r}, but only text is supported: remove it")
    if not isinstance(part.get(kind), str):
        raise _wrong(place, f"has a {kind} part without its text")
    return part[kind]


def _normalise_call(call: Any, place: int, shape: MessageShape) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(place, "has a tool call without function.name")
    out = call | {"function": function | {"arguments": shape.arguments(function.get("arguments"))}}
    if shape.short_ids and "id" in out:
        out["id"] = _short_id(out["id"])
    return out


def _as_list(calls: Any, place: int) -> list[Any]:
    if not isinstance(calls, list):
        raise _wrong(place, "needs tool_calls that are a list")
    return calls


def _wrong(place: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"messages[{place}] {what}.", param="messages")
