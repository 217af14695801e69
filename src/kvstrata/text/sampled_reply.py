"""A reply as the client sees it, and its sampled ids with the places of its parts.

Contents are equal if their texts are equal and their calls have equal arguments. Clients parse arguments and write them
anew, so arguments are compared as JSON values. A part that no token begins with has no place: such a reply is put back
into a prompt whole or not at all.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvstrata.text.harmony import HarmonyTokens
from kvstrata.text.messages import Message
from kvstrata.text.reply_events import ReplyEvent, ReplyText, ReplyThinking, ToolCallArguments, ToolCallStart
from kvstrata.text.thinking import ThinkingTags
from kvstrata.text.tokenizer import decode_ids, encode_rendered, ids_text, tokens_bytes

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DOMAIN = "kvstrata 2026-11 visible reply v1"

DIGEST_BYTES = 16

_SPACE = b" \t\r\n\v\f"
_LINE_BREAKS = b"\r\n"


@dataclass(frozen=True)
class CallContent:
    id: str
    name: str
    arguments: str  # canonical JSON; invalid JSON as it was written


@dataclass(frozen=True)
class ReplyContent:
    """Content of a reply. `content` is empty where it would be white space only, which some APIs cannot send."""

    content: str
    calls: tuple[CallContent, ...] = ()
    thinking: str = ""

    @property
    def digest(self) -> bytes:
        """Hash text and calls. Ids of calls are left out, because some clients rename them."""
        return _digest([self.content, [[call.name, call.arguments] for call in self.calls]])

    @property
    def thought_digest(self) -> bytes:
        return _digest(self.thinking) if self.thinking else b""


def content_of_reply(events: Iterable[ReplyEvent]) -> ReplyContent:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for event in events:
        if isinstance(event, ReplyText):
            texts.append(event.text)
        elif isinstance(event, ReplyThinking):
            thoughts.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append((event.id, event.name, []))
        elif isinstance(event, ToolCallArguments):
            calls[-1][2].append(event.text)
    made = tuple(CallContent(id, name, _canonical("".join(pieces))) for id, name, pieces in calls)
    return ReplyContent(_said("".join(texts)), made, "".join(thoughts))


def content_of_message(message: Message) -> ReplyContent:
    """Return the content of an assistant's message in OpenAI's form, as clients send it. A message of another shape
    matches no reply; other code refuses it."""
    content, calls = message.get("content"), message.get("tool_calls")
    made = [_call_of(call) for call in calls] if isinstance(calls, list) else []
    thinking = message.get("reasoning_content")
    return ReplyContent(_said(_text_of(content)), tuple(made), thinking if isinstance(thinking, str) else "")


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        texts = [part.get(part.get("type")) for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _call_of(call: Any) -> CallContent:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return CallContent("", "", "")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    return CallContent(str(call.get("id") or ""), str(function.get("name")), _canonical(text))


def _said(content: str) -> str:
    return "" if content.isspace() else content


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(_numbers(json.loads(arguments or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _numbers(value: Any) -> Any:
    """Return an equal value with whole floats as integers: 1.0 and 1 are equal in JSON, and JavaScript writes 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return value


def _digest(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=True)  # half a surrogate pair, which no UTF-8 can carry, is escaped
    return blake3(text.encode(), derive_key_context=DOMAIN).digest(DIGEST_BYTES)


@dataclass(frozen=True)
class SampledReply:
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
class ReplyAnalyzer:
    """Find the parts of a model's replies among their ids."""

    tokenizer: TokenizerWrapper
    tags: ThinkingTags | None
    harmony: HarmonyTokens | None

    def sampled(self, ids: Sequence[int], visible: ReplyContent, *, opened: bool) -> SampledReply:
        """`ids`: what the client was shown of a reply, and `visible` what it saw. `opened`: see `Sampled`."""
        if self.harmony is not None:
            visible_from, text_from = _harmony_parts(self.tokenizer, self.harmony, ids)
        else:
            visible_from = text_from = self._after_thinking(ids, opened=opened)
        if visible.calls or text_from is None or decode_ids(self.tokenizer, list(ids[text_from:])) != visible.content:
            text_from = None
        return SampledReply(tuple(ids), visible_from, text_from, opened, visible.thought_digest)

    def trimmed(self, sampled: SampledReply, content: str) -> SampledReply | None:
        """Return the reply without the white space around its text `content`, as some clients send it back.

        None: there is none, a token holds more than white space there, or it is between the thinking and the text.
        """
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
    """Divide a reply as `ThinkingParser` does. None: thinking never ended."""
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
    tokenizer: TokenizerWrapper, marks: HarmonyTokens, ids: Sequence[int]
) -> tuple[int | None, int | None]:
    """Return where the first message that is not analysis begins after its role, and where its text begins if it is
    the last message."""
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
