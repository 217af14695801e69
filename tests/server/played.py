"""Replies that the default model cannot write: what the engine would say goes by hand through what serves it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvstrata.engine.request import Event, Finished, FinishReason, TextDelta, TokenUsage
from kvstrata.engine.sequence import Sequence
from kvstrata.server.bridge import Arrival
from kvstrata.server.conversation.telling import Telling
from kvstrata.server.openai.ask import read_chat
from kvstrata.server.openai.endpoints import chat_wire
from kvstrata.server.service import Service
from kvstrata.text.detokenizer import Detokenizer

SCOPE = {"type": "http", "state": {}}


@dataclass(frozen=True)
class Played:
    deltas: list[Any]  # choices of chunks
    whole: Any  # the choice without a stream


def letters(text: str, reason: FinishReason = "stop") -> list[Event]:
    """A reply that arrives letter by letter."""
    return [*(TextDelta(letter) for letter in text), Finished(reason, TokenUsage())]


def play(service: Service, events: Iterable[Event], **asked: Any) -> Played:
    body, job = read_chat(service, json.dumps(asked).encode(), SCOPE)
    wire = chat_wire(service, body, job)
    telling = Telling(job, wire, enough=lambda _index: None)
    sent = [event for each in events for event in telling.told(Arrival(0, each))]
    [whole] = wire.whole(TokenUsage())["choices"]
    return Played([choice for event in sent for choice in event.data["choices"]], whole)


def play_ids(service: Service, ids: Iterable[int], **asked: Any) -> Played:
    """A reply of these tokens, as the engine would hand them on."""
    _, job = read_chat(service, json.dumps(asked).encode(), SCOPE)
    events: list[Event] = []
    sequence = Sequence(job.requests[0], events.append, job.requests[0].max_tokens, 0)
    for id in ids:
        sequence.accept_token(id, None, lambda _: Detokenizer(service.loaded.tokenizer))
        if sequence.finish_reason:
            break
    assert sequence.finish_reason
    return play(service, [*events, Finished(sequence.finish_reason, sequence.usage)], **asked)
