"""Features of a chat template, found by rendering with it, and the text that it writes around a call.

The source of a template is no guide: templates name tools without showing them, show them from included macros, or are
Python code. Grammars and parsers of tool calls need the text around the JSON arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstrata.errors import InvalidRequest
from kvstrata.text.messages import (
    REASONING_KEYS,
    Message,
    MessageShape,
    ShapeArguments,
    arguments_as_object,
    arguments_as_text,
)

if TYPE_CHECKING:
    from kvstrata.text.template import ChatTemplate

Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

PROBE_NAME = "kvstrata_probe_tool"

_KEY = "kvstrata_probe_key"  # in arguments only: templates may write tools in another way

PROBE_ARGUMENTS = {_KEY: "v"}

_RESULT = "kvstrata_probe_result"

_THOUGHT = "kvstrata_probe_thought"

_REPLY, _NOTE, _QUESTION = "kvstrata_probe_reply", "kvstrata_probe_note", "kvstrata_probe_question"

PROBE_ID = "call00001"  # nine letters or digits: Mistral's templates refuse other ids

_OTHER_IDS = ("call_0123456789abcdef01234567", "c1")

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
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

# With spaces, lines, digits and letters at either end, where a tokenizer may look beyond a special token.
_TEXTS = ("Hello", "  two spaces  ", "\n\nlines\n", "12345 678", "\tñ漢字🙂", "")

_CLOSERS = re.compile(r"[\s}\]]*")
_MARK = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")
_WORD = re.compile(r"\s*([^\s{\[]+)\s*\[?\s*\{")  # before JSON, as in `functools[{`
_LATE_ID = re.compile(r',\s*"id":\s*"' + PROBE_ID + '"')


def samples(render: Render) -> list[str]:
    """Return rendered chats, some with odd texts; chats that the template refuses are left out."""
    made = []
    for text in _TEXTS:
        system, asked, said = ({"role": role, "content": text} for role in ("system", "user", "assistant"))
        made += [_rendered(render, chat, None) for chat in ([system, asked], [asked, said, asked])]
    return [text for text in made if text]


def shows_tools(render: Render) -> bool:
    # Some templates show tools only beside a system message, others refuse system messages.
    chats = ([_USER], [_SYSTEM, _USER])
    return any(PROBE_NAME in _rendered(render, chat, [_TOOL]) for chat in chats)


@dataclass(frozen=True)
class ShownHistory:
    """Parts of a call in the history that the template shows. A template that refuses all calls reports its own
    error."""

    calls: bool
    results: bool


def shown_of_history(render: Render, shape: MessageShape) -> ShownHistory:
    chat = _call_chat(shape.arguments(PROBE_ARGUMENTS))
    texts = [text for tools in (None, [_TOOL]) if (text := _rendered(render, chat, tools))]
    return ShownHistory(
        calls=not texts or any(_KEY in text for text in texts),
        results=not texts or any(_RESULT in text for text in texts),
    )


def reply_header(text_of: Callable[..., str]) -> str:
    """Return the text that the template writes before the assistant's turns, both at the end of a prompt and in the
    history. Empty: it cannot be separated from the text before it."""
    try:
        before, prompt = (text_of([_USER], reply=reply) for reply in (False, True))
        history = text_of([_USER, {"role": "assistant", "content": _REPLY}, _USER], reply=False)
    except InvalidRequest:
        return ""
    if not prompt.startswith(before) or not history.startswith(before) or _REPLY not in history:
        return ""
    opening, header = prompt[len(before) :], history[len(before) : history.index(_REPLY)]
    while not opening.startswith(header):
        header = header[:-1]
    return header


def probe_call(render: Render, shape: MessageShape) -> tuple[str, str]:
    """Return a prompt, and the same chat with a call after it. Either is empty where the template refuses it."""
    chat = _call_chat(shape.arguments(PROBE_ARGUMENTS))
    return _rendered(render, [_USER], [_TOOL]), _rendered(render, chat, [_TOOL])


def wanted_shape(render: Render) -> MessageShape:
    """Return the message shape of a template that shows tools."""
    arguments = _wanted_arguments(render)
    sample = arguments(PROBE_ARGUMENTS)

    def takes(**options: Any) -> str:
        return _rendered(render, _call_chat(sample, **options), [_TOOL])

    shown_by = [key for key in REASONING_KEYS if _THOUGHT in takes(**{key: _THOUGHT})]
    key = shown_by[0] if shown_by else REASONING_KEYS[0]
    return MessageShape(
        arguments=arguments,
        short_ids=bool(takes()) and not all(takes(id=id) for id in _OTHER_IDS),
        reasoning_key=key,
        reasoning_or_content=bool(shown_by) and not takes(content="C", **{key: _THOUGHT}),
    )


def _wanted_arguments(render: Render) -> ShapeArguments:
    """Choose the form of arguments: objects, unless the template fails on them or writes them as Python objects, and
    accepts text."""
    with_object = _rendered(render, _call_chat(PROBE_ARGUMENTS), [_TOOL])
    if with_object and f"'{_KEY}'" not in with_object:
        return arguments_as_object
    with_text = _rendered(render, _call_chat(f'{{"{_KEY}": "v"}}'), [_TOOL])
    return arguments_as_text if f'"{_KEY}"' in with_text else arguments_as_object


def _call_chat(arguments: Any, *, id: str = PROBE_ID, content: str = "", **fields: str) -> list[Message]:
    call = {"id": id, "type": "function", "function": {"name": PROBE_NAME, "arguments": arguments}}
    asks = {"role": "assistant", "content": content, "tool_calls": [call], **fields}
    return [_USER, asks, {"role": "tool", "tool_call_id": id, "name": PROBE_NAME, "content": _RESULT}]


def _rendered(render: Render, chat: list[Message], tools: list[dict[str, Any]] | None) -> str:
    try:
        return render(chat, tools)
    except InvalidRequest:
        return ""


@dataclass(frozen=True)
class SystemTurns:
    """Places where a template accepts system messages and shows them."""

    first: bool
    second: bool  # directly after the first system message
    later: bool  # between two turns


def system_turns(render: Render) -> SystemTurns:
    turn: Message = {"role": "assistant", "content": _REPLY}
    last: Message = {"role": "user", "content": _QUESTION}
    note: Message = {"role": "system", "content": _NOTE}
    return SystemTurns(
        first=_stands(_rendered(render, [note, last], None), _NOTE, _QUESTION),
        second=_stands(_rendered(render, [_SYSTEM, note, last], None), _NOTE, _QUESTION),
        later=_stands(_rendered(render, [_USER, turn, note, last], None), _REPLY, _NOTE, _QUESTION),
    )


def _stands(text: str, *words: str) -> bool:
    """Whether the text contains all of them in this order."""
    places = [text.rfind(word) for word in words]
    return places[0] >= 0 and places == sorted(places)


@dataclass(frozen=True)
class CallText:
    """Text that a template writes around a call's arguments. `before` has PROBE_NAME in the place of the name."""

    before: str
    after: str

    def around(self, name: str) -> tuple[str, str]:
        # A name that JSON escapes is escaped here too; all others are the same either way.
        return self.before.replace(PROBE_NAME, json.dumps(name, ensure_ascii=False)[1:-1]), self.after

    @property
    def start(self) -> str:
        """The mark at the beginning of the call; empty: it has none."""
        found = _MARK.match(self.before) or _WORD.match(self.before)
        return found[1] if found else ""

    @property
    def end(self) -> str:
        found = re.search(r"(<[^<>\s]+>|\[/?\w+\])\s*$", self.after)
        return found[1] if found and self.start else ""


def find_call_text(template: ChatTemplate, start: str, end: str) -> CallText | None:
    """Return the text around a call; None: the template shows no call, or not as JSON.

    `start`, `end`: the marks that mlx-lm knows.
    """
    prompt, text = template.probe_call()
    place, length = _arguments(text)
    if not length:
        return None
    begin = text.rfind(start, 0, place) if start else -1
    if begin < 0 and text.startswith(prompt):
        begin = len(prompt)
    if begin < 0:
        begin = _json_start(text, place)
    before = text[begin:place].lstrip()
    if begin < 0 or PROBE_NAME not in before:
        return None
    return CallText(before, _after(_LATE_ID.sub("", text[place + length :], count=1), before, end))


def _arguments(text: str) -> tuple[int, int]:
    """Return place and length of the arguments. Length 0: they do not appear as JSON."""
    decoder = json.JSONDecoder()
    key = text.rfind(f'"{next(iter(PROBE_ARGUMENTS))}"')
    place = text.rfind("{", 0, key) if key >= 0 else -1
    try:
        value, end = decoder.raw_decode(text, place) if place >= 0 else (None, 0)
    except ValueError:
        return 0, 0
    return (place, end - place) if value == PROBE_ARGUMENTS else (0, 0)


def _json_start(text: str, place: int) -> int:
    """Return where the object begins that contains the arguments."""
    begin = text.rfind("{", 0, place)
    return begin if begin >= 0 and PROBE_NAME in text[begin:place] else -1


def _after(rest: str, before: str, end: str) -> str:
    """Return the text that closes the call, with its end mark. The text after it ends the turn."""
    closers = _CLOSERS.match(rest)
    closing = closers[0] if closers else ""
    mark = _MARK.match(rest, len(closing)) if end == "" else None
    if end and rest[len(closing) :].startswith(end):
        return closing + end
    if mark and mark[1] in _mates(before):
        return rest[: mark.end()]
    return closing.rstrip() if "{" in before else ""


def _mates(before: str) -> set[str]:
    """Return the marks that may close the opening one."""
    found = _MARK.match(before)
    if not found:
        return {"<|call|>"}
    mark = found[1]
    return {f"{mark[0]}/{mark[1:]}", f"{mark[:2]}/{mark[2:]}", mark.replace("begin", "end"), "<|call|>"}
