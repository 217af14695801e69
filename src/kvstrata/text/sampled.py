"""The ids of a reply as they were sampled, and where its parts begin among them.

Knows tokens and the two ways in which replies part thinking from the answer: tags and Harmony's channels. A part that
no token begins with has no place: such a reply is put back whole or not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from kvstrata.text.harmony import HarmonyMarks
from kvstrata.text.thinking import ThinkingTags
from kvstrata.text.tokens import decode_ids, encode_rendered, ids_text, tokens_bytes
from kvstrata.text.visible import Visible

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_SPACE = b" \t\r\n\v\f"
_LINE_BREAKS = b"\r\n"


@dataclass(frozen=True)
class Sampled:
    """`ids`: without what ended the reply. `visible_from`: where thinking is over. `text_from`: from there on the ids
    decode to exactly the text that the client has; None: they do not, or there are calls. `opened`: the prompt had
    opened the thinking already. `thought`: digest of the thinking; empty: there is none. `is_proven`: all that was
    found out here; otherwise others said so.
    """

    ids: tuple[int, ...]
    visible_from: int | None
    text_from: int | None
    opened: bool = False
    thought: bytes = b""
    is_proven: bool = True


@dataclass(frozen=True)
class Anatomy:
    """Of one model's replies."""

    tokenizer: TokenizerWrapper
    tags: ThinkingTags | None
    harmony: HarmonyMarks | None

    def sampled(self, ids: Sequence[int], visible: Visible, *, opened: bool) -> Sampled:
        """`ids`: what the client was shown of a reply, and `visible` what it saw. `opened`: see `Sampled`."""
        if self.harmony is not None:
            visible_from, text_from = _harmony_parts(self.tokenizer, self.harmony, ids)
        else:
            visible_from = text_from = self._after_thinking(ids, opened=opened)
        if visible.calls or text_from is None or decode_ids(self.tokenizer, list(ids[text_from:])) != visible.content:
            text_from = None
        return Sampled(tuple(ids), visible_from, text_from, opened, visible.thought_digest)

    def trimmed(self, sampled: Sampled, content: str) -> Sampled | None:
        """The same reply without the white space around its text `content`, as some clients send it back. None: there
        is none, a token holds more than white space there, or it stands between the thinking and the text."""
        begin, end = sampled.text_from, len(sampled.ids)
        wanted = content.strip()
        if begin is None or not wanted or wanted == content:
            return None
        while begin < end and ids_text(self.tokenizer, sampled.ids[begin : begin + 1]).isspace():
            begin += 1
        while end > begin and ids_text(self.tokenizer, sampled.ids[end - 1 : end]).isspace():
            end -= 1
        if ids_text(self.tokenizer, sampled.ids[begin:end]) != wanted or (
            sampled.thought and begin != sampled.text_from
        ):
            return None
        return replace(sampled, ids=sampled.ids[:end], text_from=begin)

    def _after_thinking(self, ids: Sequence[int], *, opened: bool) -> int | None:
        if self.tags is None:
            return 0
        pieces = tokens_bytes(self.tokenizer, ids)
        end = _thinking_end(b"".join(pieces), self.tags, is_open=opened)
        begins = [0, *accumulate(map(len, pieces))]
        place = bisect_left(begins, end) if end is not None else len(begins)
        return place if place < len(begins) and begins[place] == end else None


def _thinking_end(raw: bytes, tags: ThinkingTags, *, is_open: bool) -> int | None:
    """As `ThinkingReader` parts a reply. None: thinking never ended."""
    start, end = tags.start.encode(), tags.end.encode()
    place = 0
    while True:
        behind = _skip(raw, place, _SPACE)
        if raw.startswith(start, behind):
            behind += len(start)
        elif is_open:
            behind = place
        else:
            return place
        is_open = False
        closing = raw.find(end, behind)
        if closing < 0:
            return None
        place = _skip(raw, closing + len(end), _LINE_BREAKS)
        if raw[behind:closing].strip(_LINE_BREAKS):
            return place


def _skip(raw: bytes, place: int, letters: bytes) -> int:
    while place < len(raw) and raw[place] in letters:
        place += 1
    return place


def _harmony_parts(
    tokenizer: TokenizerWrapper, marks: HarmonyMarks, ids: Sequence[int]
) -> tuple[int | None, int | None]:
    """Where the first message that is no analysis begins behind its role, and where its text does if it is the last."""
    role = encode_rendered(tokenizer, "assistant")
    visible_from = text_from = None
    begin = 0  # of a message, behind its role
    for place, id in enumerate(ids):
        name = marks.names.get(id)
        if name == "<|start|>":
            begin = place + 1 + len(role)
            if tuple(ids[place + 1 : begin]) != role:
                return None, None
        elif name == "<|message|>":
            is_thought = "analysis" in decode_ids(tokenizer, list(ids[begin:place]))
            if visible_from is None and not is_thought:
                visible_from, text_from = begin, place + 1
            elif visible_from is not None:
                # Thinking between two messages cannot be left out, and two messages are not one text.
                visible_from = None if is_thought else visible_from
                text_from = None
                if visible_from is None:
                    return None, None
    return visible_from, text_from
