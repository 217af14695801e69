"""Tool calls in a reply: text in pieces goes in, content and complete calls come out.

Knows the marks around a call and mlx-lm's parser for what is between them. Does not know OpenAI's JSON. Nothing is
ever lost: what cannot be parsed is content. Inside thinking a mark is only talk, and stays content too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvstrata.text.stop import StopMatcher, Stopped

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_OPENING_TOKENS = 64  # how near to a prompt's end a template opens the thinking of the reply


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object
    id: str = ""  # the model's own, where it writes one


@dataclass(frozen=True)
class Split:
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class Splitter(Protocol):
    """Takes one reply apart. `ids`: the tokens that a piece completes, for those forms that text does not tell."""

    def add(self, text: str, ids: Sequence[int] = (), /) -> Split: ...

    def finish(self, *, cut_off: bool = False) -> Split:
        """What was held back. `cut_off`: the reply ran out of tokens, so an open call is only a part of one."""
        ...


def opens_thinking(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends inside thinking, so that the reply begins there."""
    if not tokenizer.has_thinking:
        return False
    tail = list(prompt[-_OPENING_TOKENS:])
    return tokenizer.rfind_think_start(tail) > tokenizer.rfind_think_end(tail)


class ToolCallSplitter:
    """One for each reply to a request with tools. `thinking`: the reply begins inside thinking (`opens_thinking`)."""

    def __init__(self, tokenizer: TokenizerWrapper, tools: list[dict[str, Any]], *, thinking: bool = False) -> None:
        self._tools = tools
        self._parse: Callable[..., Any] | None = tokenizer.tool_parser
        self._start: str = tokenizer.tool_call_start or ""
        self._end: str = tokenizer.tool_call_end or ""  # empty: a call goes on to the end of the reply
        self._think_start: str = tokenizer.think_start or ""
        self._think_end: str = tokenizer.think_end or ""
        self._body: list[str] = []
        self._enter("thinking" if thinking else "content")

    def add(self, text: str, _ids: Sequence[int] = (), /) -> Split:
        splits = []
        while text:
            found = self._matcher.add(text)
            splits.append(self._advance(found))
            text = found.rest
        return join(splits)

    def finish(self, *, cut_off: bool = False) -> Split:
        held = self._matcher.finish()
        if self._place != "call":
            return Split(held)
        body = "".join(self._body) + held
        self._enter("content")
        return Split(self._start + body) if cut_off else self._call(body, "")

    def _enter(self, place: Literal["content", "thinking", "call"]) -> None:
        marks = {"content": (self._start, self._think_start), "thinking": (self._think_end,), "call": (self._end,)}
        self._place = place
        self._body = []
        # Without a parser's marks there is nothing to look for.
        self._matcher = StopMatcher(marks[place] if self._start else ())

    def _advance(self, found: Stopped) -> Split:
        if self._place == "call":
            return self._advance_call(found)
        if found.stopped and found.stop == self._start and self._place == "content":
            self._enter("call")
            return Split(found.text)
        if found.stopped:
            self._enter("thinking" if self._place == "content" else "content")
        return Split(found.text + found.stop)

    def _advance_call(self, found: Stopped) -> Split:
        self._body.append(found.text)
        if not found.stopped:
            return Split("")
        body = "".join(self._body)
        self._enter("content")
        return self._call(body, found.stop)

    def _call(self, body: str, end: str) -> Split:
        calls = self._parsed(body)
        return Split("", calls) if calls else Split(self._start + body + end)

    def _parsed(self, body: str) -> tuple[ToolCall, ...]:
        """No calls, if any of them is malformed."""
        if self._parse is None:
            return ()
        try:
            parsed = self._parse(body, self._tools)
            return tuple(tool_call(call) for call in (parsed if isinstance(parsed, list) else [parsed]))
        except Exception:  # noqa: BLE001 mlx-lm's parsers meet whatever a model wrote, and fail in every way there is
            return ()


def tool_call(parsed: dict[str, Any]) -> ToolCall:
    """Raises ValueError or KeyError where it is none."""
    name, arguments = parsed["name"], parsed.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and an object of arguments")
    id = parsed.get("id")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False), id if isinstance(id, str) else "")


def join(splits: Iterable[Split]) -> Split:
    splits = tuple(splits)
    return Split(
        "".join(split.content for split in splits),
        tuple(call for split in splits for call in split.calls),
        "".join(split.reasoning for split in splits),
    )
