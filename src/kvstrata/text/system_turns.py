"""System messages that a template does not take where they stand.

Knows what the template takes (`SystemTurns`). What stands in the middle of a chat stays there, as marked text of a
turn beside it: moved to the front, it would change every token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.text.messages import Message
from kvstrata.text.probe import SystemTurns


def placed(chat: Sequence[Message], takes: SystemTurns) -> list[Message]:
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
    """No turn of the user follows: to the turn before it, if that is not the model's own."""
    if out and out[-1]["role"] in ("user", "tool"):
        out[-1] = out[-1] | {"content": "\n\n".join([out[-1]["content"], *waiting])}
    else:
        out.append({"role": "user", "content": "\n\n".join(waiting)})


def _in_first_user_turn(text: str, chat: list[Message]) -> list[Message]:
    if chat and chat[0]["role"] == "user":
        return [chat[0] | {"content": f"{text}\n\n{chat[0]['content']}"}, *chat[1:]]
    return [{"role": "user", "content": text}, *chat]
