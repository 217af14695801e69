"""LRU over the blocks of a trace, for simulations that hold many stores at once. Knows numbers of blocks alone.

What is held is always closed under 'comes before': a request that uses a block uses all that comes before it, and
those count as used later. So a block leaves before the blocks that it follows, and bisection finds the leading run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    num_filed: int
    evicted: list[int]


class BlockLru:
    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._held: OrderedDict[int, None] = OrderedDict()  # the one used longest ago first

    def __len__(self) -> int:
        return len(self._held)

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's blocks are here, from its first one on."""
        held = self._held
        return bisect_left(blocks, True, key=lambda block: block not in held)

    def use(self, blocks: Sequence[int]) -> Change:
        """A prompt's blocks, from its first one on: file what is not here, make room."""
        held, before = self._held, len(self._held)
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        num_filed = len(held) - before
        num_over = max(0, len(held) - self.max_blocks)
        return Change(num_filed, [held.popitem(last=False)[0] for _ in range(num_over)])
