"""Replay of sampled replies: a reply that a client sends back enters the prompt with the ids that were sampled.

A template renders a turn anew: it may space calls in another way, and tokenizing it may yield other tokens. So the chat
is rendered once more with marks in the place of such turns. The text between the marks is tokenized, and the sampled
ids replace the marks. Parts that the template does not show (usually earlier thinking) are left out.

Nothing is assumed of a template but its output. Wherever that is not as expected, the template's own text is used.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstrata.text.messages import Message
from kvstrata.text.sampled_reply import SampledReply, content_of_message
from kvstrata.text.tokenizer import decode_ids

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Piece = str | tuple[int, ...]  # text that is not tokenized yet, or sampled ids
Render = Callable[[list[Message]], str]

# Marks that `_marked` makes. One search finds all of them: a chat may have thousands.
MARK = re.compile(r"kvs[0-9a-f]{16}[tca][0-9]+(?:n[0-9]+)?x")

# Between the start of a turn and its first mark a template writes tags and a tool's name. Longer text is something
# else, which must not be lost.
MAX_LEAD_CHARS = 400
# A shorter text of a neighbour may also be a word of the template.
MIN_NEIGHBOUR_CHARS = 4
# Attempts to place marks: each leaves out the turns that the attempt before could not place.
MAX_ATTEMPTS = 3
# Ids at the start of a reply that are compared with what the template writes before its thinking.
LEAD_IDS = 16


@dataclass(frozen=True)
class TurnFrame:
    """Texts that a template writes around the assistant's turns.

    `header`: before each turn; empty: it is not known. `endings`: the texts of tokens that end a reply. `added`: tokens
    that no neighbour changes. `unescape`: turns rendered text into text of the messages (special_escapes.py).
    """

    header: str
    endings: tuple[str, ...]
    added: tuple[str, ...]
    unescape: Callable[[str], str]


@dataclass
class _Turn:
    place: int  # among the messages
    reply: SampledReply
    before: str = ""  # end of the message before it
    after: str = ""  # beginning of the message after it
    thought: str = ""  # mark in the place of its thinking; empty: there is none
    content: str = ""
    calls: list[str] = field(default_factory=list)
    is_same_thought: bool = False


@dataclass(frozen=True)
class _Region:
    start: int
    end: int
    ids: tuple[int, ...]


class Misplaced(Exception):
    """Raised and caught inside this module: a turn cannot be replaced."""


def splice_replies(
    messages: Sequence[Message],
    replies: Sequence[SampledReply | None],
    render: Render,
    frame: TurnFrame,
    tokenizer: TokenizerWrapper,
) -> list[Piece]:
    """Return the prompt in order. `replies`: for each message the sampled reply that it repeats, if there is one."""
    plain = render(list(messages))
    wanted = [place for place, reply in enumerate(replies) if reply is not None]
    for _ in range(MAX_ATTEMPTS if wanted else 0):
        turns, marked = _marked(messages, replies, wanted)
        text = render(marked)
        regions = _regions(text, turns, frame, tokenizer)
        if len(regions) == len(wanted):
            pieces = _cut(text, list(regions.values()))
            return pieces if _tiles(pieces, plain) else [plain]
        # Turns that could not be replaced stay as the template writes them.
        wanted = list(regions)
    return [plain]


def _marked(
    messages: Sequence[Message], replies: Sequence[SampledReply | None], wanted: Sequence[int]
) -> tuple[list[_Turn], list[Message]]:
    """Replace the texts of wanted turns by marks, which are letters and digits that no client can guess."""
    word = f"kvs{secrets.token_hex(8)}"
    out = list(messages)
    turns = []
    for place in wanted:
        reply = replies[place]
        assert reply is not None
        message = dict(messages[place])
        visible = content_of_message(message)
        turn = _Turn(place, reply, *_neighbours(messages, place))
        if visible.thinking:
            turn.thought = message["reasoning_content"] = f"{word}t{place}x"
            turn.is_same_thought = visible.thought_digest == reply.thought
        if visible.content:
            turn.content = message["content"] = f"{word}c{place}x"
        if visible.calls:
            turn.calls = [f"{word}a{place}n{number}x" for number in range(len(visible.calls))]
            pairs = zip(message["tool_calls"], turn.calls, strict=True)
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": json.dumps({"arguments": mark})}}
                for call, mark in pairs
            ]
        out[place] = message
        turns.append(turn)
    return turns, out


def _neighbours(messages: Sequence[Message], place: int) -> tuple[str, str]:
    around = (messages[place - 1 : place], messages[place + 1 : place + 2])
    before, after = ("".join(content_of_message(each).content.strip() for each in one) for one in around)
    return before[-MAX_LEAD_CHARS:], after[:MAX_LEAD_CHARS]


def _regions(text: str, turns: Sequence[_Turn], frame: TurnFrame, tokenizer: TokenizerWrapper) -> dict[int, _Region]:
    """Return the regions of the turns that can be replaced, by place."""
    regions: dict[int, _Region] = {}
    places: dict[str, list[int]] = defaultdict(list)
    for found in MARK.finditer(text):
        places[found[0]].append(found.start())
    floor = 0
    for turn in turns:
        try:
            region = _region(text, turn, places, frame, floor, tokenizer)
        except Misplaced:
            continue
        regions[turn.place] = region
        floor = region.end
    return regions


def _region(
    text: str,
    turn: _Turn,
    places: Mapping[str, Sequence[int]],
    frame: TurnFrame,
    floor: int,
    tokenizer: TokenizerWrapper,
) -> _Region:
    """Return the region of a turn. `places`: positions of each mark in the text. Raises Misplaced."""
    reply = turn.reply
    shown = [at for mark in (turn.content, *turn.calls) if mark and (at := _only(places, mark)) >= 0]
    if not shown or min(shown) < floor:
        raise Misplaced
    end = _end(text, turn, max(shown), frame)
    thought_at = _only(places, turn.thought) if turn.thought else -1
    if thought_at >= 0:
        if not turn.is_same_thought or not (turn.calls or reply.text_from is not None):
            raise Misplaced
        return _Region(_before_thinking(text, thought_at, turn, frame, floor, tokenizer), end, reply.ids)
    if not turn.calls:
        if reply.text_from is None:
            raise Misplaced
        return _Region(shown[0], end, reply.ids[reply.text_from :])
    if reply.visible_from is None:
        raise Misplaced
    return _Region(_behind_header(text, min(shown), turn, frame, floor), end, reply.ids[reply.visible_from :])


def _only(places: Mapping[str, Sequence[int]], mark: str) -> int:
    """Return the only place of a mark. -1: it has none, or several."""
    found = places.get(mark, ())
    if len(found) > 1:
        raise Misplaced
    return found[0] if found else -1


def _end(text: str, turn: _Turn, last: int, frame: TurnFrame) -> int:
    if not turn.calls:
        end = last + len(turn.content)
        if not text.startswith(frame.added, end):
            raise Misplaced  # the text after it might be tokenized otherwise without the text before
        return end
    furthest = last + MAX_LEAD_CHARS
    found = [at for ending in frame.endings if (at := text.find(ending, last, furthest + len(ending))) >= 0]
    if not found:
        raise Misplaced
    end = min(found)
    begins = min((turn.after.partition(ending)[0] for ending in frame.endings), key=len)
    _refuse_neighbour(begins, frame.unescape(text[last:end]))
    return end


def _behind_header(text: str, mark_at: int, turn: _Turn, frame: TurnFrame, floor: int) -> int:
    furthest = max(floor, mark_at - MAX_LEAD_CHARS - len(frame.header))
    at = text.rfind(frame.header, furthest, mark_at) if frame.header else -1
    if at < 0:
        raise Misplaced
    behind = at + len(frame.header)
    _refuse_neighbour(turn.before.rpartition(frame.header)[2], frame.unescape(text[behind:mark_at]))
    return behind


def _refuse_neighbour(message: str, replaced: str) -> None:
    """Refuse a region that reaches into another turn.

    Where a template writes a turn without a header or an ending, the next one in the text belongs to another turn, and
    the text between would be lost.
    """
    if len(message.strip()) >= MIN_NEIGHBOUR_CHARS and message.strip() in replaced:
        raise Misplaced


def _before_thinking(
    text: str, thought_at: int, turn: _Turn, frame: TurnFrame, floor: int, tokenizer: TokenizerWrapper
) -> int:
    """Return where the sampled ids begin: the tag that opens thinking belongs to them or to the prompt."""
    behind = _behind_header(text, thought_at, turn, frame, floor)
    if turn.reply.opened:
        return thought_at
    if not decode_ids(tokenizer, list(turn.reply.ids[:LEAD_IDS])).startswith(text[behind:thought_at]):
        raise Misplaced
    return behind


def _cut(text: str, regions: Sequence[_Region]) -> list[Piece]:
    pieces: list[Piece] = []
    place = 0
    for region in regions:
        pieces += [text[place : region.start], region.ids]
        place = region.end
    return [*pieces, text[place:]]


def _tiles(pieces: Sequence[Piece], plain: str) -> bool:
    """Whether the chat without marks has the same text around the same turns: marks changed nothing else."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if not plain.startswith(texts[0]) or not plain.endswith(texts[-1]):
        return False
    place, last = len(texts[0]), len(plain) - len(texts[-1])
    for text in texts[1:-1]:
        at = plain.find(text, place)
        if at < 0:
            return False
        place = at + len(text)
    return place <= last
