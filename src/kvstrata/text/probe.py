"""What a chat template can do, found by rendering with it.

Its source is no guide: templates name tools without showing them, show them from included macros, or are Python code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstrata.errors import InvalidRequest
from kvstrata.text.messages import Message, ShapeArguments, arguments_as_object, arguments_as_text

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

_NAME = "kvstrata_probe_tool"
_KEY = "kvstrata_probe_key"  # of the arguments only: tools may be written in another way
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "A key."}},
            "required": ["key"],
        },
    },
}
_SYSTEM: Message = {"role": "system", "content": "S"}
_USER: Message = {"role": "user", "content": "U"}


def shows_tools(render: Render) -> bool:
    # Some templates show tools only beside a system message, others refuse system messages.
    chats = ([_USER], [_SYSTEM, _USER])
    return any(_NAME in _rendered(render, chat, [_TOOL]) for chat in chats)


def wanted_arguments(render: Render) -> ShapeArguments:
    """Objects, unless the template fails on them or writes them as Python would, and does better with text."""
    with_object = _rendered(render, _call_chat({_KEY: "v"}), [_TOOL])
    if with_object and f"'{_KEY}'" not in with_object:
        return arguments_as_object
    with_text = _rendered(render, _call_chat(f'{{"{_KEY}": "v"}}'), [_TOOL])
    return arguments_as_text if f'"{_KEY}"' in with_text else arguments_as_object


def _call_chat(arguments: Any) -> list[Message]:
    # Nine letters or digits: Mistral's templates refuse other ids.
    call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [_USER, asks, {"role": "tool", "tool_call_id": "call00001", "name": _NAME, "content": "R"}]


def _rendered(render: Render, chat: list[Message], tools: list[dict[str, Any]] | None) -> str:
    try:
        return render(chat, tools)
    except InvalidRequest:
        return ""
