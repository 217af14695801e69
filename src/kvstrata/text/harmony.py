"""Harmony, the form of gpt-oss's replies: messages in channels, with special tokens between them.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

Goes by token ids: a reply that only talks about these marks is not cut by them. The text between two marks comes in
pieces of any length. Knows no OpenAI JSON. A message's text is never lost: what is neither thought nor a call is
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.text.fast import hf_tokenizer
from kvstrata.text.tokens import token_text
from kvstrata.text.tools import Split, ToolCall, join

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_REQUIRED = frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"))
_OPENING_TOKENS = 64  # how near to a prompt's end the message begins that the reply goes on with
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(frozen=True)
class HarmonyMarks:
    names: Mapping[int, str]

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.names)

    @property
    def ending(self) -> frozenset[int]:
        """Those that end a reply, whatever the model's configuration calls its end."""
        return frozenset(id for id, name in self.names.items() if name in ("<|call|>", "<|return|>"))


def harmony_marks(tokenizer: TokenizerWrapper) -> HarmonyMarks | None:
    """None where replies have another form. Looks through all added tokens: once for a model."""
    added = hf_tokenizer(tokenizer).added_tokens_decoder
    names = {id: token.content for id, token in added.items() if token.special}
    if not set(names.values()) >= _REQUIRED:
        return None
    return HarmonyMarks({id: name for id, name in names.items() if name in _REQUIRED | {"<|constrain|>"}})


class HarmonySplitter:
    """One for each reply. `takes_calls`: tools were offered; otherwise what looks like a call is content."""

    def __init__(
        self, tokenizer: TokenizerWrapper, marks: HarmonyMarks, prompt: Sequence[int], *, takes_calls: bool
    ) -> None:
        self._names = marks.names
        self._takes_calls = takes_calls
        self._header: str | None = None  # None: not inside one
        self._is_thought = False
        self._function = ""  # of the call that is being written
        self._arguments: list[str] = []
        self._open(tokenizer, prompt[-_OPENING_TOKENS:])

    def add(self, text: str, ids: Sequence[int] = (), /) -> Split:
        """`text` has no marks: each comes among the ids of a piece that has no text behind it."""
        marks = [self._names[id] for id in ids if id in self._names]
        return join([self._text(text), *(self._mark(mark) for mark in marks)])

    def finish(self, *, cut_off: bool = False) -> Split:
        """The rest. A call without its end counts if it is one, and the reply did not run out of tokens."""
        arguments = "".join(self._arguments)
        if self._function and (cut_off or not _is_object(arguments)):
            self._function = ""
            return Split(arguments)
        return self._end_message()

    def _open(self, tokenizer: TokenizerWrapper, tail: Sequence[int]) -> None:
        """Templates begin the reply's first message, most of them with its role only."""
        names = [self._names.get(id) for id in tail]
        if "<|start|>" not in names:
            return
        begin = len(names) - 1 - names[::-1].index("<|start|>")
        for id, name in zip(tail[begin:], names[begin:], strict=True):
            if name is None:
                self._text(token_text(tokenizer, id))
            else:
                self._mark(name)

    def _text(self, text: str) -> Split:
        if self._header is not None:
            self._header += text
        elif self._function:
            self._arguments.append(text)
        else:
            return Split("", reasoning=text) if self._is_thought else Split(text)
        return Split("")

    def _mark(self, mark: str) -> Split:
        if mark == "<|message|>":
            self._begin_message()
            return Split("")
        if self._header is not None and mark in ("<|channel|>", "<|constrain|>"):
            self._header += mark
            return Split("")
        if mark == "<|constrain|>":
            return Split("")
        ended = self._end_message()
        if mark in ("<|start|>", "<|channel|>"):
            self._header = mark
        return ended

    def _begin_message(self) -> None:
        if self._header is None:
            return
        channel = self._header.partition("<|channel|>")[2].split(None, 1)
        function = _FUNCTION.search(self._header)
        self._is_thought = bool(channel) and channel[0].partition("<")[0] == "analysis"
        self._function = function[1] if function and self._takes_calls else ""
        self._header = None

    def _end_message(self) -> Split:
        """And what follows up to the next header is content."""
        function, arguments, header = self._function, "".join(self._arguments), self._header
        self._function, self._arguments, self._header, self._is_thought = "", [], None, False
        if function:
            return Split("", (ToolCall(function, arguments.strip() or "{}"),))
        return Split(_said_without_a_channel(header)) if header else Split("")


def _said_without_a_channel(header: str) -> str:
    """A header that never came to its message is dropped, unless it is what a model says that knows no headers."""
    if "<|channel|>" in header or _FUNCTION.search(header):
        return ""
    return header.removeprefix("<|start|>").removeprefix("assistant").replace("<|constrain|>", "")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
