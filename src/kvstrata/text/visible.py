"""What a client sees of a reply, in a form that is the same when the client sends it back.

Knows events and messages. Two replies are alike here if they say the same and call the same with the same arguments:
clients parse arguments and write them anew, so those are compared as JSON values, and all else letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvstrata.text.events import CallArguments, CallBegun, ReplyEvent, Text, Thinking
from kvstrata.text.messages import Message

DOMAIN = "kvstrata 2026-11 visible reply v1"
DIGEST_BYTES = 16


@dataclass(frozen=True)
class VisibleCall:
    id: str
    name: str
    arguments: str  # canonical JSON; as it came where it is none


@dataclass(frozen=True)
class Visible:
    """`content` is empty where there is nothing but space: some APIs have no way to send that."""

    content: str
    calls: tuple[VisibleCall, ...] = ()
    thinking: str = ""

    @property
    def digest(self) -> bytes:
        """Of what is said and called. Ids of calls are not part of it: some clients rename them."""
        return _digest([self.content, [[call.name, call.arguments] for call in self.calls]])

    @property
    def thought_digest(self) -> bytes:
        return _digest(self.thinking) if self.thinking else b""


def visible_of_reply(events: Iterable[ReplyEvent]) -> Visible:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for event in events:
        if isinstance(event, Text):
            texts.append(event.text)
        elif isinstance(event, Thinking):
            thoughts.append(event.text)
        elif isinstance(event, CallBegun):
            calls.append((event.id, event.name, []))
        elif isinstance(event, CallArguments):
            calls[-1][2].append(event.text)
    made = tuple(VisibleCall(id, name, _canonical("".join(pieces))) for id, name, pieces in calls)
    return Visible(_said("".join(texts)), made, "".join(thoughts))


def visible_of_message(message: Message) -> Visible:
    """Of an assistant's message as clients send it, in OpenAI's words. What is of no known shape is said of no reply of
    ours; that it is refused is seen to elsewhere."""
    content, calls = message.get("content"), message.get("tool_calls")
    made = [_call_of(call) for call in calls] if isinstance(calls, list) else []
    thinking = message.get("reasoning_content")
    return Visible(_said(_text_of(content)), tuple(made), thinking if isinstance(thinking, str) else "")


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get(part.get("type")) for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _call_of(call: Any) -> VisibleCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return VisibleCall("", "", "")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return VisibleCall(str(call.get("id") or ""), str(function.get("name")), _canonical(text))


def _said(content: str) -> str:
    return "" if content.isspace() else content


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(_numbers(json.loads(arguments or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _numbers(value: Any) -> Any:
    """1.0 and 1 are one number in JSON, and JavaScript writes the shorter."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return value


def _digest(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=True)  # half a surrogate pair, which no UTF-8 can carry, is escaped
    return blake3(text.encode(), derive_key_context=DOMAIN).digest(DIGEST_BYTES)
