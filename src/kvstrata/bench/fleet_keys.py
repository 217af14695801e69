"""Keys of a trace's prompts on the grid that the router uses, and what replicas report of them. Knows positions and
numbers of blocks.

A trace tells whether prompts are equal in steps of 512 tokens alone. A position inside a block gets a key that is equal
where the whole block is: two prompts that part inside it share no key there, which a real prompt would up to the part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstrata.bench.trace import BLOCK_TOKENS, Trace
from kvstrata.prefix_cache.keys import LEAST_STEP, Grid, grid_positions, widening_grid

STEPS = BLOCK_TOKENS // LEAST_STEP  # most positions in a block


class TraceKeys:
    def __init__(self, trace: Trace, grid: Grid = widening_grid) -> None:
        most = max(len(numbers) for numbers in trace.numbers)
        self._inside: list[list[int]] = [[] for _ in range(most)]  # positions, by the number of blocks before
        for position in grid_positions(grid, most * BLOCK_TOKENS):
            self._inside[(position - 1) // BLOCK_TOKENS].append(position)
        self._before = {block: at for numbers in trace.numbers for at, block in enumerate(numbers.tolist())}

    def of_prompt(self, blocks: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
        """Position and key, from the shortest prefix to the longest."""
        inside = zip(blocks, self._inside, strict=False)
        return [(at, _key(block, at)) for block, there in inside for at in there if at <= num_tokens]

    def of_blocks(self, blocks: Iterable[int]) -> list[int]:
        return [_key(block, at) for block in blocks for at in self._inside[self._before[block]]]


class TraceSummary:
    """As `fleet/summary.py`, whose prompts are tokens."""

    def __init__(self, max_keys: int | None) -> None:
        self._max_keys = max_keys
        self._held: OrderedDict[int, None] = OrderedDict()  # the newest last

    def stored(self, keys: Iterable[tuple[int, int]]) -> None:
        for _, key in keys:
            self._held[key] = None
            self._held.move_to_end(key)
        while self._max_keys is not None and len(self._held) > self._max_keys:
            self._held.popitem(last=False)

    def removed(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def reported(self) -> frozenset[int]:
        return frozenset(self._held)


def _key(block: int, position: int) -> int:
    return block * STEPS + position // LEAST_STEP % STEPS
