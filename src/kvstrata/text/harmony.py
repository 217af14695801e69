"""Harmony, the form of gpt-oss's replies: messages in channels, with special tokens between them.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

The parser reads token ids, so a reply that only mentions these marks is not cut by them. The text between two marks
arrives in pieces of any length. No text of a message is lost: all that is neither thinking nor a call is text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyText,
    ReplyThinking,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    join_events,
)
from kvstrata.text.tokenizer import hf_tokenizer, token_text
from kvstrata.text.tool_calls.answer_text import OfferedTools
from kvstrata.text.tool_calls.json_calls import JsonScanner
from kvstrata.text.tool_calls.scanner import ToolCallScanner

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_REQUIRED = frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"))

FINAL = "<|channel|>final<|message|>"  # the beginning of an answer

_OPENING_TOKENS = 64  # most tokens of the message at the end of a prompt that the reply continues

_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(frozen=True)
class HarmonyTokens:
    names: Mapping[int, str]

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.names)

    @property
    def ending(self) -> frozenset[int]:
        """Return the tokens that end a reply, whatever the model's configuration says."""
        return frozenset(id for id, name in self.names.items() if name in ("<|call|>", "<|return|>"))


def harmony_tokens(tokenizer: TokenizerWrapper) -> HarmonyTokens | None:
    """Return Harmony's tokens; None: the model's replies have another form.

    Call it once for a model: it looks through all added tokens.
    """
    added = hf_tokenizer(tokenizer).added_tokens_decoder
    names = {id: token.content for id, token in added.items() if token.special}
    if not set(names.values()) >= _REQUIRED:
        return None
    return HarmonyTokens({id: name for id, name in names.items() if name in _REQUIRED | {"<|constrain|>"}})


class HarmonyParser:
    """Parse one reply. A call of a tool that was not offered is text."""

    def __init__(
        self, tokenizer: TokenizerWrapper, marks: HarmonyTokens, prompt: Sequence[int], offered: OfferedTools
    ) -> None:
        self._names = marks.names
        self._offered = offered
        self._events: list[ReplyEvent] = []
        self._header: str | None = None  # None: not inside a header
        self._is_thought = False
        self._call: _HarmonyCall | None = None
        self._answer = self._new_answer()
        self._open(tokenizer, prompt[-_OPENING_TOKENS:])

    def add(self, text: str, ids: Sequence[int] = (), /) -> list[ReplyEvent]:
        """Parse the next piece. `text` has no marks: a mark arrives as an id of a piece whose text ends there."""
        self._text(text)
        for id in ids:
            if id in self._names:
                self._mark(self._names[id])
        return self._take()

    def finish(self, *, cut_off: bool = False) -> list[ReplyEvent]:
        """Return the remaining events. A call that was cut off by the length limit is not ended."""
        self._end_message(cut_off=cut_off)
        return self._take()

    def _take(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return join_events(events)

    def _new_answer(self) -> ToolCallScanner | None:
        return ToolCallScanner(self._offered) if self._offered.tools else None

    def _open(self, tokenizer: TokenizerWrapper, tail: Sequence[int]) -> None:
        """Read the beginning of the reply's first message, which the template wrote; most write its role only."""
        names = [self._names.get(id) for id in tail]
        if "<|start|>" not in names:
            return
        begin = len(names) - 1 - names[::-1].index("<|start|>")
        for id, name in zip(tail[begin:], names[begin:], strict=True):
            if name is None:
                self._text(token_text(tokenizer, id))
            else:
                self._mark(name)

    def _text(self, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif self._call is not None:
            self._events += self._call.add(text)
        elif self._is_thought:
            self._events.append(ReplyThinking(text))
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        """Add text of the answer, which may contain calls in other forms."""
        self._events += self._answer.add(text) if self._answer else [ReplyText(text)]

    def _mark(self, mark: str) -> None:
        if mark == "<|message|>":
            self._begin_message()
        elif self._header is not None and mark in ("<|channel|>", "<|constrain|>"):
            self._header += mark
        elif mark != "<|constrain|>":
            self._end_message()
            if mark in ("<|start|>", "<|channel|>"):
                self._header = mark

    def _begin_message(self) -> None:
        if self._header is None:
            return
        channel = self._header.partition("<|channel|>")[2].split(None, 1)
        function = _FUNCTION.search(self._header)
        self._is_thought = bool(channel) and channel[0].partition("<")[0] == "analysis"
        self._call = _HarmonyCall(function[1]) if function and function[1] in self._offered.names else None
        self._header = None

    def _end_message(self, *, cut_off: bool = False) -> None:
        """End the current message. The text up to the next header belongs to the answer."""
        call, header = self._call, self._header
        self._call, self._header, self._is_thought = None, None, False
        if call:
            self._events += call.finish(cut_off=cut_off)
        elif header:
            self._say(_said_without_a_channel(header))
        if self._answer:
            self._events += self._answer.finish(cut_off=cut_off)
            self._answer = self._new_answer()


class _HarmonyCall:
    """Parser of a message that is a call: streams the arguments without the white space around them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scanner = JsonScanner()
        self._state: Literal["space", "arguments", "text"] = "space"
        self._space: list[str] = []  # white space that is given only if text follows it

    def add(self, text: str) -> list[ReplyEvent]:
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return []
        body = "".join(self._space) + body
        self._space = [text[len(text.rstrip()) :]]
        if self._state == "space":
            begins = body.lstrip().startswith("{")
            self._state = "arguments" if begins else "text"
            if begins:
                begun = ToolCallStart(uuid.uuid4().hex[:9], self._name)
                return [begun, ToolCallArguments(self._scanned(body.lstrip()))]
        return [ToolCallArguments(self._scanned(body)) if self._state == "arguments" else ReplyText(body)]

    def finish(self, *, cut_off: bool) -> list[ReplyEvent]:
        if self._state == "text":
            return [ReplyText("".join(self._space))]
        if self._state == "space" and cut_off:
            return []
        events: list[ReplyEvent] = []
        if self._state == "space":
            events += [ToolCallStart(uuid.uuid4().hex[:9], self._name), ToolCallArguments("{}")]
        if not cut_off or self._scanner.done:
            events.append(ToolCallEnd())
        return events

    def _scanned(self, text: str) -> str:
        """Return the text, with control characters in strings escaped as far as it is valid JSON."""
        if self._scanner.failed or self._scanner.done:
            return text
        end, shown = self._scanner.add(text)
        return shown + text[end:]


def _said_without_a_channel(header: str) -> str:
    """Return the text of a header without a message.

    It is empty unless the header has neither a channel nor a function: such text comes from a model without headers.
    """
    if "<|channel|>" in header or _FUNCTION.search(header):
        return ""
    return header.removeprefix("<|start|>").removeprefix("assistant").replace("<|constrain|>", "")
