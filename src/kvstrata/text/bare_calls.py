"""Tool calls without marks, as Llama 3 writes them: a reply that as a whole is `{"name": ..., "parameters": {...}}`.

Several may follow one another with `;` between them. Knows the tools that were offered, because nothing else tells a
call from JSON that was asked for. A reply is held back only while it can still be calls; anything else is content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from kvstrata.text.tools import Split, ToolCall, tool_call

PYTHON_TAG = "<|python_tag|>"  # may stand before the first call


class BareCallSplitter:
    """One for each reply to a request with tools."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        names = frozenset(tool["function"]["name"] for tool in tools)
        starts = [f'{{"name":{json.dumps(name, ensure_ascii=False)}' for name in names]
        starts += ['{"type":"function",', '{"parameters":{', '{"arguments":{']
        self._openings = tuple(_compact(tag + start) for tag in ("", PYTHON_TAG) for start in starts)
        self._place: Literal["opening", "calls", "content"] = "opening"
        self._held: list[str] = []
        self._objects = _Objects(names)

    def add(self, text: str, _ids: Sequence[int] = (), /) -> Split:
        if self._place == "content":
            return Split(text)
        self._held.append(text)
        if not (self._opens() if self._place == "opening" else self._objects.take(text)):
            self._place = "content"
            return self._release()
        return Split("")

    def finish(self, *, cut_off: bool = False) -> Split:
        calls = self._objects.calls if self._place == "calls" and not cut_off else ()
        return Split("", calls) if calls else self._release()

    def _opens(self) -> bool:
        """Whether the reply may still be calls. Takes what has come so far as soon as it looks like one."""
        text = "".join(self._held)
        compact = _compact(text)
        if any(compact.startswith(opening) for opening in self._openings):
            self._place = "calls"
            return self._objects.take(text.lstrip().removeprefix(PYTHON_TAG))
        return any(opening.startswith(compact) for opening in self._openings)

    def _release(self) -> Split:
        held, self._held = self._held, []
        return Split("".join(held))


class _Objects:
    """JSON objects with `;` between them, each a call of one of these tools. Looks at each character once."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls: list[ToolCall] = []
        self._object: list[str] = []  # characters of the one that is open
        self._depth = 0
        self._in_string = self._escaped = False
        self._may_open = True

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """None, while one is open."""
        return () if self._depth else tuple(self._calls)

    def take(self, text: str) -> bool:
        """False: the text is something else."""
        return all(self._inside(character) if self._depth else self._between(character) for character in text)

    def _between(self, character: str) -> bool:
        if character == "{" and self._may_open:
            self._object, self._depth, self._may_open = ["{"], 1, False
            return True
        if character == ";" and not self._may_open:
            self._may_open = True
            return True
        return character.isspace()

    def _inside(self, character: str) -> bool:
        self._object.append(character)
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth > 0 or self._close()

    def _close(self) -> bool:
        try:
            parsed = json.loads("".join(self._object))
            arguments = parsed["parameters"] if "parameters" in parsed else parsed["arguments"]
            call = tool_call({"name": parsed["name"], "arguments": arguments})
        except (ValueError, KeyError, RecursionError):
            return False
        self._calls.append(call)
        return call.name in self._names


def _compact(text: str) -> str:
    return "".join(text.split())
