"""Positions where later prompts of a chat are likely to diverge, found by rendering these prompts.

Some templates rewrite earlier turns: the thinking of a tool loop goes when the user writes again, tools move to the
last user message. Knows chats, texts and ids, and is given rendered texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstrata.common_prefix import common_prefix_len
from kvstrata.text.messages import Message
from kvstrata.text.template_probe import PROBE_ID

# Before a position: a marker is looked for in so much text. After it: enough that the end of what is tokenized there
# does not matter.
_BEFORE_CHARS = 4096

_AFTER_CHARS = 64

# Without a marker the ids of a text cut off may end in other tokens than the whole one has there, but not in many.
_CUT_TOKENS = 8


def next_chats(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[list[Message]]:
    """Return this chat with a reply and its possible continuations: a user's message, a tool's result."""
    thinks = any(message.get("reasoning_content") for message in messages)
    reply: Message = {"role": "assistant", "content": "A"} | ({"reasoning_content": "A"} if thinks else {})
    chats = [[*messages, reply, {"role": "user", "content": "A"}]]
    name = _first_name(tools)
    if name:
        call = {"id": PROBE_ID, "type": "function", "function": {"name": name, "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": PROBE_ID, "name": name, "content": "A"}
        chats.append([*messages, reply | {"content": "", "tool_calls": [call]}, result])
    return chats


def _first_name(tools: Sequence[Mapping[str, Any]] | None) -> str:
    function = tools[0].get("function") if tools else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


class TokenPositions:
    """Positions of a text's characters among the ids of a prompt. `markers`: the tokenizer's special tokens by id. They
    cut a text, so the text between two of them has the same ids at any place."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]], markers: Mapping[int, str]) -> None:
        self._encode = encode  # of rendered text
        self._markers = markers

    def with_encode(self, encode: Callable[[str], tuple[int, ...]]) -> TokenPositions:
        return TokenPositions(encode, self._markers)

    def shared(self, text: str, ids: tuple[int, ...], other: str) -> int:
        """How many ids a prompt has in common with what another text makes; 0: not known. `ids` are those of `text`,
        but a reply may have been put in as the model wrote it: so positions are counted in markers, and only
        the text behind the last one is tokenized."""
        at = common_prefix_len(text, other)
        marker = self._last_marker(text[max(0, at - _BEFORE_CHARS) : at])
        start = self._marker_position(text, ids, marker, at)
        if marker is None or start is None:
            return self._shared_from_start(text[:at], ids)
        begin = text.rfind(self._markers[marker], 0, at)
        ours, theirs = (self._encode(each[begin : at + _AFTER_CHARS]) for each in (text, other))
        both = ours[: common_prefix_len(ours, theirs)]
        return start + common_prefix_len(both, ids[start : start + len(both)])

    def _last_marker(self, text: str) -> int | None:
        return next((id for id in reversed(self._encode(text)) if id in self._markers), None)

    def _marker_position(self, text: str, ids: tuple[int, ...], marker: int | None, at: int) -> int | None:
        """Return the position of the last marker before a character. None: text and ids have different numbers of
        markers."""
        if marker is None:
            return None
        name = self._markers[marker]
        before, num_ids = text.count(name, 0, at), ids.count(marker)
        if not before or text.count(name) != num_ids:
            return None
        position = -1
        for _ in range(before):
            position = ids.index(marker, position + 1)
        return position

    def _shared_from_start(self, shared: str, ids: tuple[int, ...]) -> int:
        begun = self._encode(shared)
        num_shared = common_prefix_len(begun, ids)
        return num_shared if num_shared >= len(begun) - _CUT_TOKENS else 0
