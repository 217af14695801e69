"""Translation of a list of items to messages for chat templates.

A reply of a model is several items here: reasoning, texts, calls. Adjacent items of these kinds become one assistant
message. References must be resolved before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.server.responses.reasoning import thinking_of
from kvstrata.server.responses.schema import (
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OtherPart,
    OutputItem,
    ReasoningItem,
    RefusalPart,
)
from kvstrata.server.responses.tools import FREE_TEXT, Toolbox
from kvstrata.text.messages import Message

SYSTEM = ("system", "developer")
TEXTS = ("content", "reasoning_content")


def messages_of(instructions: str | None, items: Sequence[Any], box: Toolbox, first: int = 0) -> list[Message]:
    """Return the messages of a conversation. `first`: number of items from earlier responses; positions in errors count
    from there."""
    turns = _Turns(box)
    if instructions:
        turns.say("system", instructions)
    for index, item in enumerate(items):
        turns.add(item, f"input.{index - first}" if index >= first else "previous_response_id")
    return turns.finish()


class _Turns:
    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._messages: list[Message] = []
        self._calls: set[str] = set()  # ids of all calls so far
        self._reply: Message | None = None  # the assistant message under construction; its texts are lists of pieces

    def add(self, item: Any, where: str) -> None:
        if isinstance(item, MessageItem):
            self._add_message(item, where)
        elif isinstance(item, ReasoningItem):
            self._join("reasoning_content", thinking_of(item))
        elif isinstance(item, FunctionCallItem):
            self._add_call(item, item.arguments)
        elif isinstance(item, CustomCallItem):
            self._add_call(item, json.dumps({FREE_TEXT: item.input}, ensure_ascii=False))
        elif isinstance(item, OutputItem):
            self._add_output(item, where)
        else:
            raise InvalidRequest(
                f"{where}: an item of type {item.type[:80]} is not supported by this server. Leave it out.", param=where
            )

    def say(self, role: str, text: str) -> None:
        """Add a message of a role other than assistant."""
        self._end_reply()
        self._messages.append({"role": role, "content": text})

    def finish(self) -> list[Message]:
        self._end_reply()
        return _joined_systems(self._messages)

    def _add_message(self, item: MessageItem, where: str) -> None:
        text = text_of(item.content, f"{where}.content")
        if item.role == "assistant":
            self._join("content", text)
        else:
            self.say("system" if item.role in SYSTEM else item.role, text)

    def _add_call(self, item: FunctionCallItem | CustomCallItem, arguments: str) -> None:
        self._calls.add(item.call_id)
        function = {"name": self._box.told_as(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        self._open_reply().setdefault("tool_calls", []).append(call)

    def _add_output(self, item: OutputItem, where: str) -> None:
        if item.call_id not in self._calls:
            kind = "function call" if item.type == "function_call_output" else "custom tool call"
            raise InvalidRequest(
                f"No tool call found for {kind} output with call_id {item.call_id[:80]}. Send the call before it, "
                "or name the response that has it as previous_response_id.",
                param=where,
            )
        text = text_of(item.output, f"{where}.output")
        self._end_reply()
        self._messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})

    def _join(self, key: str, text: str) -> None:
        pieces: list[str] = self._open_reply().setdefault(key, [])
        if text:
            pieces.append(_seam(pieces[-1], text) + text if pieces else text)

    def _open_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": []}
        return self._reply

    def _end_reply(self) -> None:
        reply, self._reply = self._reply, None
        # Reasoning without text or calls belongs to an aborted reply.
        if reply is not None and (reply["content"] or reply.get("tool_calls") or "reasoning_content" not in reply):
            told = {key: "".join(value) if key in TEXTS else value for key, value in reply.items()}
            self._messages.append({key: value for key, value in told.items() if value or key == "content"})


def text_of(content: str | list[Any], where: str) -> str:
    return content if isinstance(content, str) else "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, OtherPart):
        raise InvalidRequest(
            f"{where}: a part of type {part.type[:80]} is not supported; this server takes text.", param=where
        )
    return part.refusal if isinstance(part, RefusalPart) else part.text


def _seam(before: str, after: str) -> str:
    """Return the separator of two texts of one reply. A call or reasoning item stood between them and is now
    elsewhere."""
    return "" if before[-1].isspace() or after[0].isspace() else "\n"


def _joined_systems(messages: list[Message]) -> list[Message]:
    """Merge the leading system messages into one: agents send several, and many templates accept only one."""
    num = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if num < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:num])
    return [{"role": "system", "content": text}, *messages[num:]]
