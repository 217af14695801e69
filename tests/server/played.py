"""Replies that the default model cannot write: what the engine would say goes by hand through what serves it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvstrata.engine.request import Event, Finished, FinishReason, TextDelta, TokenUsage
from kvstrata.engine.sequence import Sequence
from kvstrata.server.chat.assembler import ReplyAssembler
from kvstrata.server.chat.engine_client import RequestEvent
from kvstrata.server.openai.endpoints import chat_writer, read_chat
from kvstrata.server.state import ServerState
from kvstrata.text.detokenizer import Detokenizer

SCOPE = {"type": "http", "state": {}}


@dataclass(frozen=True)
class Played:
    deltas: list[Any]  # choices of chunks
    whole: Any  # the choice without a stream


def letters(text: str, reason: FinishReason = "stop") -> list[Event]:
    """A reply that arrives letter by letter."""
    return [*(TextDelta(letter) for letter in text), Finished(reason, TokenUsage())]


def play(state: ServerState, events: Iterable[Event], **asked: Any) -> Played:
    body, generation = read_chat(state, json.dumps(asked).encode(), SCOPE)
    writer = chat_writer(state, body, generation)
    assembler = ReplyAssembler(generation, writer, finish_early=lambda _index: None)
    sent = [event for each in events for event in assembler.feed(RequestEvent(0, each))]
    [whole] = writer.whole(TokenUsage())["choices"]
    return Played([choice for event in sent for choice in event.data["choices"]], whole)


def play_ids(state: ServerState, ids: Iterable[int], **asked: Any) -> Played:
    """A reply of these tokens, as the engine would hand them on."""
    _, generation = read_chat(state, json.dumps(asked).encode(), SCOPE)
    events: list[Event] = []
    sequence = Sequence(generation.requests[0], events.append, generation.requests[0].max_tokens, 0)
    for id in ids:
        sequence.accept_token(id, None, lambda _: Detokenizer(state.loaded.tokenizer))
        if sequence.finish_reason:
            break
    assert sequence.finish_reason
    return play(state, [*events, Finished(sequence.finish_reason, sequence.usage)], **asked)
