"""Translation of /v1/responses bodies to chats: reads stored responses, and refuses fields that are not supported.

A reply of a model is several items here: reasoning, texts, calls. Adjacent items of these kinds become one assistant
message.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from kvstrata.errors import InvalidRequest
from kvstrata.grammar.constraint import Constraint
from kvstrata.server.chat.request import ChatRequest, GenerationParams, ThinkingParams, pin_for_retention
from kvstrata.server.chat.writer import json_bytes
from kvstrata.server.responses.schema import (
    ITEMS,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OtherPart,
    OutputItem,
    Part,
    ReasoningItem,
    ReferenceItem,
    RefusalPart,
    ResponsesRequest,
    TextPart,
)
from kvstrata.server.responses.store import ResponseStore, StoredResponse
from kvstrata.server.responses.tools import FREE_TEXT, ToolNames, choose_tools, tool_names
from kvstrata.text.messages import Message

OURS = "kvstrata1."
SYSTEM = ("system", "developer")
TEXTS = ("content", "reasoning_content")
LOGPROBS = "message.output_text.logprobs"  # a value of `include`
ENCRYPTED = "reasoning.encrypted_content"


def pack_thinking(thinking: str) -> str:
    """Return reasoning for `encrypted_content`, which clients send back even if they drop its text. It is plain text as
    base64: the text is the client's own, and dropping it changes the prompt and loses cache hits."""
    return OURS + base64.b64encode(thinking.encode("utf-8", "replace")).decode()


def reasoning_text(item: ReasoningItem) -> str:
    """Return the reasoning text of an item. Encrypted content of other servers cannot be read; the summary is used
    instead."""
    content = _texts(item.content) or _unpack_thinking(item.encrypted_content or "")
    return content or _texts(item.summary)


def _texts(parts: list[Part] | None) -> str:
    return "\n\n".join(part.text for part in parts or () if isinstance(part, TextPart))


def _unpack_thinking(content: str) -> str:
    if not content.startswith(OURS):
        return ""
    try:
        return base64.b64decode(content.removeprefix(OURS), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""


def messages_of(instructions: str | None, items: Sequence[Any], box: ToolNames, first: int = 0) -> list[Message]:
    """Return the messages of a conversation. `first`: number of items from earlier responses; positions in errors count
    from there."""
    turns = _Turns(box)
    if instructions:
        turns.say("system", instructions)
    for index, item in enumerate(items):
        turns.add(item, f"input.{index - first}" if index >= first else "previous_response_id")
    return turns.finish()


class _Turns:
    def __init__(self, box: ToolNames) -> None:
        self._box = box
        self._messages: list[Message] = []
        self._calls: set[str] = set()  # ids of all calls so far
        self._reply: Message | None = None  # the assistant message under construction; its texts are lists of pieces

    def add(self, item: Any, where: str) -> None:
        if isinstance(item, MessageItem):
            self._add_message(item, where)
        elif isinstance(item, ReasoningItem):
            self._join("reasoning_content", reasoning_text(item))
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
        function = {"name": self._box.shown_name(item.name, item.namespace), "arguments": arguments}
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
            joined = {key: "".join(value) if key in TEXTS else value for key, value in reply.items()}
            self._messages.append({key: value for key, value in joined.items() if value or key == "content"})


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


@dataclass(frozen=True)
class ParsedResponse:
    """A request, validated and translated. `items`: all input items, earlier responses included."""

    chat: ChatRequest
    names: ToolNames
    items: Sequence[Any]


def parse_response(asked: ResponsesRequest, stored: ResponseStore, salt: str) -> ParsedResponse:
    """Return the chat of a request. Raises InvalidRequest for a request that no model can serve here."""
    _check(asked)
    before = _history(asked.previous_response_id, stored, salt)
    items = [*before, *_given(asked, stored, salt)]
    names = tool_names(asked.tools or ())
    return ParsedResponse(_chat(asked, names, items, len(before)), names, items)


def _chat(asked: ResponsesRequest, names: ToolNames, items: Sequence[Any], num_before: int) -> ChatRequest:
    messages = messages_of(asked.instructions, items, names, num_before)
    if not messages:
        raise InvalidRequest("input: must not be empty.", param="input")
    offered, choice = choose_tools(asked, names)
    reasoning = asked.reasoning
    return ChatRequest(
        messages=messages,
        tools=offered.tools,
        choice=choice,
        thinking=ThinkingParams(effort=reasoning.effort if reasoning else None),
        params=GenerationParams(
            sampling={"temperature": asked.temperature, "top_p": asked.top_p, "num_logprobs": _num_logprobs(asked)},
            max_tokens=asked.max_output_tokens,
            # Clients send the largest max_output_tokens of any model, so no memory is reserved for it.
            reserves=False,
            constraint=_constraint(asked),
            constraint_param="text.format",
            cache_salt=asked.cache_salt,
            cache_key=asked.prompt_cache_key,
        ),
        model=asked.model,
        pin=pin_for_retention(asked.prompt_cache_retention),
    )


def stored_items(response: StoredResponse) -> list[Any]:
    return ITEMS.validate_python(from_json(response.items))


def _check(asked: ResponsesRequest) -> None:
    if asked.background:
        raise InvalidRequest(
            "background: this server runs nothing in the background. Leave it out, and stream long replies.",
            param="background",
        )
    if asked.conversation is not None:
        raise InvalidRequest(
            "conversation: this server keeps no conversations. Use previous_response_id, or send all items.",
            param="conversation",
        )
    if asked.prompt is not None:
        raise InvalidRequest("prompt: this server keeps no prompts. Send instructions and input.", param="prompt")


def _history(response_id: str | None, stored: ResponseStore, salt: str) -> list[Any]:
    """Return the input and output items of an earlier response. Raises InvalidRequest if it is not found."""
    if not response_id:
        return []
    found = stored.find_to_continue(response_id, salt)
    if found is None:
        raise InvalidRequest(
            f"Previous response with id '{response_id[:80]}' not found. It may have been one of another key or "
            "cache_salt, sent with store = false, or dropped for newer ones: send all items instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [*stored_items(found), *_output(found)]


def _given(asked: ResponsesRequest, stored: ResponseStore, salt: str) -> list[Any]:
    if asked.input is None:
        return []
    if isinstance(asked.input, str):
        return [MessageItem(role="user", content=asked.input)]
    return [
        _referred(item, stored, salt, f"input.{index}") if isinstance(item, ReferenceItem) else item
        for index, item in enumerate(asked.input)
    ]


def _referred(item: ReferenceItem, stored: ResponseStore, salt: str, where: str) -> Any:
    found = stored.find_with_item(item.id, salt)
    items = _output(found) if found is not None else []
    named = next((each for each in items if each.id == item.id), None)
    if named is None:
        raise InvalidRequest(
            f"Item with id '{item.id[:80]}' not found. Items are not kept when store is false: send the item itself.",
            param=where,
        )
    return named


def _output(response: StoredResponse) -> list[Any]:
    return ITEMS.validate_python(from_json(response.answer)["output"])


def encode_items(items: Sequence[Any]) -> bytes:
    """Encode items for storage. Items without an id get one, because the list of a response's input items shows ids."""
    named = [item if item.id else item.model_copy(update={"id": _item_id(item.type)}) for item in items]
    return json_bytes([item.model_dump(exclude_none=True) for item in named])


def _item_id(kind: str) -> str:
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
    return f"{prefixes.get(kind, 'item')}_{uuid.uuid4().hex}"


def _num_logprobs(asked: ResponsesRequest) -> int | None:
    is_wanted = asked.top_logprobs or LOGPROBS in (asked.include or ())
    return (asked.top_logprobs or 0) if is_wanted else None


def _constraint(asked: ResponsesRequest) -> Constraint | None:
    form = asked.text.format if asked.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint.json_object()
    if form.schema_ is None:
        raise InvalidRequest("text.format: type json_schema needs a schema.", param="text.format.schema")
    return Constraint.json_schema(form.schema_, strict=bool(form.strict))
