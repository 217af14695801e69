"""Recurrent layers: gated delta net, Mamba, short convolutions. Their state does not grow.

A sequence owns its state. While sequences decode in a batch, one array holds the states of all rows: states are
gathered when a batch is formed, not at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvstrata.kv.buffers import owned


class RecurrentLayer(ArraysCache):
    """The recurrent state of one sequence. A subclass of mlx-lm's class, because models check the type."""

    cache: list[Any]

    def __init__(self, num_arrays: int) -> None:
        super().__init__(num_arrays)
        self.offset = 0

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    def copy_state(self) -> tuple[mx.array | None, ...]:
        """Return the state, in memory of its own."""
        state = tuple(None if array is None else owned(array) for array in self.cache)
        mx.eval([array for array in state if array is not None])
        return state

    def resume(self, state: Sequence[mx.array | None], offset: int) -> None:
        """Resume from a state, which other sequences may share: models replace the arrays and never write into them."""
        self.cache = list(state)
        self.offset = offset

    def grow(self, tokens: int) -> None:
        """Do nothing: the state has a fixed size."""

    def end_pass(self) -> list[mx.array]:
        """Return nothing: the layer keeps nothing for the pass, and MLX knows of all writes."""
        return []

    def advance(self, N: int) -> None:  # noqa: N803
        self.offset += N


class RecurrentRows(ArraysCache):
    """The recurrent states of the sequences of a batch, a row each."""

    def __init__(self, layers: Sequence[RecurrentLayer]) -> None:
        super().__init__(len(layers[0].cache))
        self._layers = layers
        self.offset = mx.array([layer.offset for layer in layers])
        self.cache = [self._gather(i) for i in range(len(self.cache))]
        mx.eval(self.states())
        # The batch alone holds the states: `release` gives each sequence its row back.
        for layer in layers:
            layer.cache = [None] * len(self.cache)

    def _gather(self, i: int) -> mx.array | None:
        states = [layer.cache[i] for layer in self._layers]
        shaped = next((state for state in states if state is not None), None)
        if shaped is None:
            return None
        # A sequence without tokens starts from zeros, as the models do.
        return mx.concatenate([mx.zeros_like(shaped) if state is None else state for state in states])

    def advance(self, N: int) -> None:  # noqa: N803
        for layer in self._layers:
            layer.offset += N

    def begin_step(self, offsets: mx.array) -> None:
        self.offset = offsets

    def end_step(self) -> list[mx.array]:
        """Return nothing: the rows keep nothing for the step, and MLX knows of all writes."""
        return []

    def states(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    def release(self) -> list[mx.array]:
        """Give each sequence its row back, in memory of its own. Return the arrays, which the caller evaluates."""
        for row, layer in enumerate(self._layers):
            layer.cache = [None if array is None else mx.contiguous(array[row : row + 1]) for array in self.cache]
        return [array for layer in self._layers for array in layer.arrays()]
