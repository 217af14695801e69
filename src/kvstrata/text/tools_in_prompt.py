"""Tools and system messages as text, where a template cannot show them.

Descriptions of tools go to the system text, and calls and results become text. The text depends on the tools alone, so
the prompts of one chat begin with the same tokens. A system message in the middle of a chat stays there, as marked
text of a turn beside it: at the front it would change every token after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvstrata.text.messages import Message, arguments_as_text
from kvstrata.text.template_probe import PROBE_NAME, CallText, SystemTurns

_INTRODUCTION = """You can call tools. Each line describes one, with a JSON schema of its arguments:
"""

_HOW = """
To call a tool, reply with nothing but one JSON object on a line of its own:
{"name": "<the tool's name>", "arguments": {<the arguments by name>}}
For several calls write one such line each. The results come in the next message.
If no tool is needed, answer in plain text."""

_IS_RESULT = "kvstrata_is_result"


def described_call_text() -> CallText:
    return CallText(f'{{"name": "{PROBE_NAME}", "arguments": ', "}")


def tools_to_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
    """Convert normalized messages to messages that any template shows."""
    names: dict[str, str] = {}  # of calls, by id
    chat: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"]["name"]
        if message["role"] == "tool":
            chat.append({"role": "user", "content": _result(message, names), _IS_RESULT: True})
        else:
            chat.append(_without_calls(message))
    return _told(_joined_users(chat), tools) if tools else _joined_users(chat)


def describe_tools(tools: Sequence[dict[str, Any]]) -> str:
    lines = [json.dumps(_described(tool), ensure_ascii=False) for tool in tools]
    return _INTRODUCTION + "\n".join(lines) + _HOW


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {})
    return {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}


def _told(chat: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    text = describe_tools(tools)
    first = chat[0]
    if first["role"] == "system":
        content = f"{first['content']}\n\n{text}" if first["content"] else text
        return [first | {"content": content}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def _without_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    lines += [_call(call["function"]) for call in calls]
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(lines)}


def _call(function: dict[str, Any]) -> str:
    before, after = described_call_text().around(function["name"])
    return before + arguments_as_text(function.get("arguments")) + after


def _result(message: Message, names: dict[str, str]) -> str:
    name = names.get(str(message.get("tool_call_id"))) or message.get("name") or "the tool"
    return f"Result of {name}:\n{message['content']}"


def _joined_users(chat: list[Message]) -> list[Message]:
    """Join the results of calls and the user's text beside them to one turn: many templates want turns to alternate."""
    turns: list[tuple[Message, list[str]]] = []  # with the texts that become its content
    was_result = False
    for message in chat:
        is_result = bool(message.get(_IS_RESULT))
        plain = {key: value for key, value in message.items() if key != _IS_RESULT}
        if turns and turns[-1][0]["role"] == plain["role"] == "user" and (is_result or was_result):
            turns[-1][1].append(plain["content"])
        else:
            turns.append((plain, [plain["content"]]))
        was_result = is_result
    return [message | {"content": "\n\n".join(texts)} for message, texts in turns]


def place_system_messages(chat: Sequence[Message], takes: SystemTurns) -> list[Message]:
    num_first = next((place for place, message in enumerate(chat) if message["role"] != "system"), len(chat))
    first, rest = list(chat[:num_first]), list(chat[num_first:])
    if len(first) > 1 and not takes.second:
        first = [first[0] | {"content": "\n\n".join(message["content"] for message in first)}]
    if not takes.later:
        rest = _marked(rest)
    if first and not takes.first:
        rest = _in_first_user_turn("\n\n".join(message["content"] for message in first), rest)
        first = []
    return first + rest


def _marked(chat: list[Message]) -> list[Message]:
    out: list[Message] = []
    waiting: list[str] = []
    for message in chat:
        if message["role"] == "system":
            waiting.append(f"<system>\n{message['content']}\n</system>")
            continue
        if waiting and message["role"] == "user":
            message = message | {"content": "\n\n".join([*waiting, message["content"]])}
        elif waiting:
            _add_behind(out, waiting)
        waiting = []
        out.append(message)
    if waiting:
        _add_behind(out, waiting)
    return out


def _add_behind(out: list[Message], waiting: list[str]) -> None:
    """Append system messages that no user turn follows to the last turn, or as a turn if that is the assistant's."""
    if out and out[-1]["role"] in ("user", "tool"):
        out[-1] = out[-1] | {"content": "\n\n".join([out[-1]["content"], *waiting])}
    else:
        out.append({"role": "user", "content": "\n\n".join(waiting)})


def _in_first_user_turn(text: str, chat: list[Message]) -> list[Message]:
    if chat and chat[0]["role"] == "user":
        return [chat[0] | {"content": f"{text}\n\n{chat[0]['content']}"}, *chat[1:]]
    return [{"role": "user", "content": text}, *chat]
