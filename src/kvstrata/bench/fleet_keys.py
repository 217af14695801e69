"""Keys of a trace's prompts on the grid that the router uses. Knows positions and numbers of blocks.

A trace tells whether prompts are equal in steps of 512 tokens alone. A position inside a block gets a key that is equal
where the whole block is: two prompts that part inside it share no key there, which a real prompt would up to the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstrata.bench.trace import BLOCK_TOKENS, Trace
from kvstrata.index.grid import LEAST_STEP, Grid, positions, widening

STEPS = BLOCK_TOKENS // LEAST_STEP  # most positions in a block


class TraceKeys:
    def __init__(self, trace: Trace, grid: Grid = widening) -> None:
        most = max(len(numbers) for numbers in trace.numbers)
        self._inside: list[list[int]] = [[] for _ in range(most)]  # positions, by the number of blocks before
        for position in positions(grid, most * BLOCK_TOKENS):
            self._inside[(position - 1) // BLOCK_TOKENS].append(position)
        self._before = {block: at for numbers in trace.numbers for at, block in enumerate(numbers.tolist())}

    def of_prompt(self, blocks: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
        """Position and key, from the shortest prefix to the longest."""
        inside = zip(blocks, self._inside, strict=False)
        return [(at, _key(block, at)) for block, there in inside for at in there if at <= num_tokens]

    def of_blocks(self, blocks: Iterable[int]) -> list[int]:
        """Keys, in the order of the blocks."""
        return [_key(block, at) for block in blocks for at in self._inside[self._before[block]]]


def _key(block: int, position: int) -> int:
    return block * STEPS + position // LEAST_STEP % STEPS
