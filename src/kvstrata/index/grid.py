"""Positions at which a prompt gets a key, and those keys. Knows tokens and chained keys; does not know who holds what.

A grid is a rule that names positions from token 0 on, so that two processes that never talk give the same prompt the
same keys. A key at a position names all tokens before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kvstrata.index.ids import TokenIds
from kvstrata.index.keys import chain

# The next position after one that is on the grid, or after 0.
Grid = Callable[[int], int]

LEAST_STEP = 32
STEPS_PER_DOUBLING = 16
MAX_REMEMBERED = 32


def every(step: int) -> Grid:
    return lambda position: position + step


def widening(position: int) -> int:
    """32 tokens apart at first, and never more than a sixteenth of what lies before: a prompt of 128k tokens has 144
    positions, and what two prompts share is known to a sixteenth."""
    if position < LEAST_STEP * STEPS_PER_DOUBLING:
        return position + LEAST_STEP
    return position + (1 << (position.bit_length() - 1)) // STEPS_PER_DOUBLING


def positions(grid: Grid, num_tokens: int) -> list[int]:
    """All that are at most `num_tokens`."""
    found: list[int] = []
    position = grid(0)
    while position <= num_tokens:
        found.append(position)
        position = grid(position)
    return found


class GridKeys:
    """Keys of prompts on a grid. Remembers the last prompts, because most of what is asked goes on from one of them."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._remembered: OrderedDict[int, tuple[bytes, TokenIds, list[tuple[int, bytes]]]] = OrderedDict()
        self._next = 0

    def of(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, bytes]]:
        """Position and key, from the shortest prefix to the longest."""
        keys = self._begun(root_key, ids)
        position, key = keys[-1] if keys else (0, root_key)
        while (following := self._grid(position)) <= len(ids):
            key = chain(key, ids[position:following])
            position = following
            keys.append((position, key))
        self._remember(root_key, ids[:position], keys)
        return keys

    def _begun(self, root_key: bytes, ids: TokenIds) -> list[tuple[int, bytes]]:
        """Those of the longest remembered prompt that `ids` begins with."""
        best = None
        for number, (root, before, _) in self._remembered.items():
            longer = best is None or len(before) > len(self._remembered[best][1])
            fits = root == root_key and len(before) <= len(ids)
            if longer and fits and np.array_equal(before, ids[: len(before)]):
                best = number
        return [] if best is None else list(self._remembered.pop(best)[2])

    def _remember(self, root_key: bytes, ids: TokenIds, keys: list[tuple[int, bytes]]) -> None:
        if not keys:
            return
        self._next += 1
        self._remembered[self._next] = (root_key, ids.copy(), list(keys))
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
