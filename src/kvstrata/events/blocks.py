"""Blocks that were announced, the events about them, and the msgpack form of events.

A block is a run of `GRAIN` tokens, from token 0 on. Its number is the first 8 bytes of its chained key, which begins
with identity and salt: the same tokens of another model, or under another salt, have another number. Does not know
how events travel.

vLLM's subscribers read events as arrays in msgpack, a name first:

    message   [topic, number of the message (8 bytes, big-endian), body]
    body      [seconds since the epoch, events, 0]
    events    ["BlockStored", numbers, parent, token ids, tokens in a block, None, "GPU", None]
              ["BlockRemoved", numbers, "GPU"]
              ["AllBlocksCleared"]

The empty places are a LoRA adapter's id and name; the 0 is the rank of the engine, and we have one. "GPU" is what
routers call the memory that a model reads from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvstrata.events.feed import GRAIN
from kvstrata.prefix_cache.keys import GridKeys, TokenIds, uniform_grid

NUMBER_BYTES = 8  # of a block
SEQUENCE_BYTES = 8  # of a message's number
MEDIUM = "GPU"
RANK = 0
# Ends the reply to a consumer that asked for missed messages.
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


@dataclass(frozen=True)
class BlockStored:
    """Consecutive blocks of one prompt that entered the cache."""

    numbers: list[int]  # in the order of their tokens
    parent: int | None  # of the first block; None: it begins with token 0
    token_ids: list[int]  # GRAIN for each


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks that left the cache, each before its parent."""

    numbers: list[int]


@dataclass(frozen=True)
class AllBlocksCleared:
    """Removal of all blocks."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class _Block:
    parent: int | None
    tokens: bytes


class BlockNumbers:
    """Numbers of prompts' blocks. Remembers the last prompts, so that only new tokens are hashed."""

    def __init__(self) -> None:
        self._keys = GridKeys(uniform_grid(GRAIN))

    def numbers_of(self, root_key: bytes, ids: TokenIds) -> list[int]:
        return [int.from_bytes(key[:NUMBER_BYTES], "big") for _, key in self._keys.keys_for(root_key, ids)]


class ReportedBlocks:
    """Cached blocks that were announced. A block's parent is always among them, and was announced before it."""

    def __init__(self) -> None:
        self._held: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add_blocks(self, numbers: list[int], ids: TokenIds) -> BlockStored | None:
        """Record that all blocks of `ids` are cached. Return the event about those that were not announced yet."""
        first = next((place for place, number in enumerate(numbers) if number not in self._held), len(numbers))
        if first == len(numbers):
            return None
        parent = above = numbers[first - 1] if first else None
        for place in range(first, len(numbers)):
            self._held[numbers[place]] = _Block(above, ids[place * GRAIN : (place + 1) * GRAIN].tobytes())
            above = numbers[place]
        return BlockStored(numbers[first:], parent, ids[first * GRAIN : len(numbers) * GRAIN].tolist())

    def remove_blocks(self, numbers: list[int], start: int) -> BlockRemoved | None:
        """Record that the tokens from `start` on are no longer cached. Return the event about their blocks."""
        going = [number for number in reversed(numbers[start // GRAIN :]) if number in self._held]
        for number in going:
            del self._held[number]
        return BlockRemoved(going) if going else None

    def clear_blocks(self) -> AllBlocksCleared:
        """Record that no block is cached."""
        self._held.clear()
        return AllBlocksCleared()

    def replay_all(self) -> Iterator[Event]:
        """Yield events that announce all cached blocks to a consumer that knows none."""
        yield AllBlocksCleared()
        run: list[tuple[int, _Block]] = []  # each is the parent of the next
        for number, block in self._held.items():
            if run and block.parent != run[-1][0]:
                yield _joined(run)
                run = []
            run.append((number, block))
        if run:
            yield _joined(run)


def _joined(run: list[tuple[int, _Block]]) -> BlockStored:
    tokens = np.frombuffer(b"".join(block.tokens for _, block in run), dtype=np.int32)
    return BlockStored([number for number, _ in run], run[0][1].parent, tokens.tolist())


def sequence_frame(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def message_body(at_s: float, events: Iterable[Event]) -> bytes:
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
