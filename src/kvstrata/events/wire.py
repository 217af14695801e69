"""Events as vLLM's subscribers read them: arrays in msgpack, a name first.

    message   [topic, number of the message (8 bytes, big-endian), body]
    body      [seconds since the epoch, events, 0]
    events    ["BlockStored", numbers, parent, token ids, tokens in a block, None, "GPU", None]
              ["BlockRemoved", numbers, "GPU"]
              ["AllBlocksCleared"]

The empty places are a LoRA adapter's id and name; the 0 is the rank of the engine, and we have one. "GPU" is what
routers call the memory that a model reads from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack

from kvstrata.events.blocks import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvstrata.events.feed import GRAIN

MEDIUM = "GPU"
RANK = 0
SEQUENCE_BYTES = 8
# Ends the answer to who asked for what was missed.
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


def sequence_frame(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def body(at_s: float, events: Iterable[Event]) -> bytes:
    packed = msgpack.packb([at_s, [_array(event) for event in events], RANK])
    assert packed is not None, "packb without a stream returns what it packed"
    return packed


def _array(event: Event) -> list[Any]:
    match event:
        case BlockStored():
            return ["BlockStored", event.numbers, event.parent, event.token_ids, GRAIN, None, MEDIUM, None]
        case BlockRemoved():
            return ["BlockRemoved", event.numbers, MEDIUM]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]
