"""Escapes for special tokens in texts of clients, which keep them apart from tokens that a chat template writes.

A tokenizer reads `<|im_start|>` in a tool's result as the control token that begins a turn. Therefore a mark goes
after the first character of each such text before the template sees it, and the rendered text is tokenized in the
pieces between the marks: no piece contains the whole token. Texts without special tokens stay as they are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from kvstrata.text.messages import Message


class SpecialTokenEscapes:
    """Escapes of one model. `names`: special tokens as text. `reply_marks`: special tokens that an assistant's own
    content may have.

    A token of a single character cannot be escaped; a token of letters, digits or blanks only is part of ordinary text.
    """

    def __init__(self, names: Iterable[str], reply_marks: Iterable[str] = ()) -> None:
        breakable = {name for name in names if len(name) > 1 and not name.isalnum() and not name.isspace()}
        self._anywhere = _any_of(breakable)
        self._in_replies = _any_of(breakable.difference(reply_marks))
        self._in_json = _any_of({json.dumps(name, ensure_ascii=False)[1:-1] for name in breakable})
        # Letters and digits survive all that templates do to a text; they are random, so that no client sends them.
        self._mark = f"kve{secrets.token_hex(8)}x"

    def escape(self, value: Any) -> Any:
        """Return a JSON value in which no text, keys included, holds a special token.

        Writing 100 tools as JSON, which usually shows that there is nothing to escape, takes a tenth of the time that
        visiting each of their texts takes.
        """
        if self._in_json is None or not self._in_json.search(json.dumps(value, ensure_ascii=False)):
            return value
        return self._escaped(value, self._anywhere)

    def escape_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Escape messages. Clients send back replies, so thinking and call marks stay in the assistant's content."""
        escaped = [self._escaped(message, self._anywhere) for message in messages]
        for message, original in zip(escaped, messages, strict=True):
            if self._anywhere is not None and original.get("role") == "assistant" and "content" in original:
                message["content"] = self._escaped(original["content"], self._in_replies)
        return escaped

    def split(self, text: str) -> list[str]:
        """Return the pieces of a rendered text that are tokenized one by one."""
        return text.split(self._mark)

    def unescape(self, text: str) -> str:
        return text.replace(self._mark, "")

    def _escaped(self, value: Any, names: re.Pattern[str] | None) -> Any:
        if names is None:
            return value
        if isinstance(value, str):
            return self._mark.join(_broken(value, names))
        if isinstance(value, dict):
            return {self._escaped(key, names): self._escaped(each, names) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._escaped(each, names) for each in value]
        return value


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(names)))) if names else None


def _broken(text: str, names: re.Pattern[str]) -> list[str]:
    """Cut behind the first character of every special token, also where tokens overlap."""
    pieces: list[str] = []
    cut = 0
    while found := names.search(text, cut):
        pieces.append(text[cut : found.start() + 1])
        cut = found.start() + 1
    return [*pieces, text[cut:]]
