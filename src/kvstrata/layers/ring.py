"""Where the tokens of a sliding window lie, by arithmetic alone, and which of them a query may see."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ring:
    """`max_size` slots. Tokens before `keep` stay where they are; the others go round."""

    max_size: int
    keep: int = 0

    def slot(self, position: int) -> int:
        if position < self.keep:
            return position
        return self.keep + (position - self.keep) % (self.max_size - self.keep)

    def held_slots(self, num_tokens: int) -> NDArray[np.int32]:
        """Slots of all tokens that are still there after so many, by position."""
        kept, others = np.arange(min(self.keep, num_tokens)), np.arange(self.oldest(num_tokens), num_tokens)
        return np.concatenate([kept, self._slots(others)]).astype(np.int32)

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        gone_round = self.keep + (positions - self.keep) % (self.max_size - self.keep)
        return np.where(positions < self.keep, positions, gone_round)

    def oldest(self, num_tokens: int) -> int:
        """The first position that is still there, beside the kept ones, after so many tokens."""
        return min(num_tokens, max(self.keep, num_tokens - (self.max_size - self.keep)))

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """The positions of [start, end) that it will hold, cut where their slots are not consecutive."""
        size = self.max_size - self.keep
        runs = [(start, min(end, self.keep))] if start < self.keep else []
        first = max(start, self.keep, end - size)
        while first < end:
            last = min(end, first + size - (first - self.keep) % size)
            runs.append((first, last))
            first = last
        return runs

    def chunk_mask(self, offset: int, num_tokens: int, window: int) -> mx.array:
        """Queries of a chunk over the past and the chunk: each sees the kept tokens and the newest `window`."""
        past = min(offset, self.max_size - 1)
        columns = mx.arange(past + num_tokens)
        # Kept tokens lie at their own position; the others end where the chunk ends.
        positions = mx.where(columns < self.keep, columns, columns + (offset - past))
        queries = mx.arange(offset, offset + num_tokens)[:, None]
        return (positions <= queries) & ((positions < self.keep) | (positions > queries - window))

    def narrow_mask(self, offset: int, window: int) -> mx.array:
        """The query at `offset` over all slots, for a model whose window is narrower than the ring that it asked
        for."""
        newest = np.arange(max(0, offset + 1 - self.max_size), offset + 1)
        positions = np.full(min(self.max_size, offset + 1), -1, np.int32)
        positions[self._slots(newest)] = newest  # of two for one slot the later one counts
        return mx.array(positions) > offset - window
