"""Which blocks were told: what a store says becomes events, and what holds can be told again from the start.

A block is a run of `GRAIN` tokens, from token 0 on. Its number is the first 8 bytes of its chained key, which begins
with identity and salt: the same tokens of another model, or under another salt, have another number. Does not know
how events travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstrata.events.feed import GRAIN
from kvstrata.prefix_cache.keys import GridKeys, TokenIds, uniform_grid

NUMBER_BYTES = 8


@dataclass(frozen=True)
class BlockStored:
    numbers: list[int]  # from the first token on
    parent: int | None  # of the first of them; None: it begins with token 0
    token_ids: list[int]  # GRAIN for each


@dataclass(frozen=True)
class BlockRemoved:
    numbers: list[int]  # what hangs on another one goes first


@dataclass(frozen=True)
class AllBlocksCleared:
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class _Block:
    parent: int | None
    tokens: bytes


class BlockNumbers:
    """The numbers of a prompt's blocks. Remembers the last prompts, so only what is new is hashed."""

    def __init__(self) -> None:
        self._keys = GridKeys(uniform_grid(GRAIN))

    def of(self, root_key: bytes, ids: TokenIds) -> list[int]:
        return [int.from_bytes(key[:NUMBER_BYTES], "big") for _, key in self._keys.keys_for(root_key, ids)]


class ReportedBlocks:
    """Those that were told and hold. A block's parent always holds too, and came before it."""

    def __init__(self) -> None:
        self._held: dict[int, _Block] = {}

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, numbers: list[int], ids: TokenIds) -> BlockStored | None:
        """All of `ids` holds now. What was told before is not told again; what was given up meanwhile is."""
        first = next((place for place, number in enumerate(numbers) if number not in self._held), len(numbers))
        if first == len(numbers):
            return None
        parent = above = numbers[first - 1] if first else None
        for place in range(first, len(numbers)):
            self._held[numbers[place]] = _Block(above, ids[place * GRAIN : (place + 1) * GRAIN].tobytes())
            above = numbers[place]
        return BlockStored(numbers[first:], parent, ids[first * GRAIN : len(numbers) * GRAIN].tolist())

    def removed(self, numbers: list[int], start: int) -> BlockRemoved | None:
        """The tokens from `start` on hold no more."""
        going = [number for number in reversed(numbers[start // GRAIN :]) if number in self._held]
        for number in going:
            del self._held[number]
        return BlockRemoved(going) if going else None

    def cleared(self) -> AllBlocksCleared:
        self._held.clear()
        return AllBlocksCleared()

    def told_again(self) -> Iterator[Event]:
        """All that holds, for one who knows nothing."""
        yield AllBlocksCleared()
        run: list[tuple[int, _Block]] = []  # each hangs on the one before
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
