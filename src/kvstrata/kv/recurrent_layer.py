"""Layers whose state does not grow: gated delta net, Mamba, short convolutions.

A sequence owns its state; while it decodes in a batch the states of all rows are gathered in one array, which happens
when the membership changes and never at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from kvstrata.kv.buffers import owned


class RecurrentLayer(ArraysCache):
    """mlx-lm's own class, so that models which ask for it by type find it."""

    cache: list[Any]

    def __init__(self, num_arrays: int) -> None:
        super().__init__(num_arrays)
        self.offset = 0

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    def held(self) -> tuple[mx.array | None, ...]:
        """The state, in memory of its own."""
        state = tuple(None if array is None else owned(array) for array in self.cache)
        mx.eval([array for array in state if array is not None])
        return state

    def resume(self, state: Sequence[mx.array | None], offset: int) -> None:
        """Go on from a state. It may be shared: models put new arrays in its place, they write none."""
        self.cache = list(state)
        self.offset = offset

    def grow(self, tokens: int) -> None:
        """The state has one size."""

    def end_pass(self) -> list[mx.array]:
        """Nothing is kept for the pass, and nothing written without MLX's knowledge."""
        return []

    def advance(self, N: int) -> None:  # noqa: N803
        self.offset += N


class RecurrentRows(ArraysCache):
    """The states of several sequences, one row each."""

    def __init__(self, layers: Sequence[RecurrentLayer]) -> None:
        super().__init__(len(layers[0].cache))
        self._layers = layers
        self.offset = mx.array([layer.offset for layer in layers])
        self.cache = [self._gather(i) for i in range(len(self.cache))]
        mx.eval(self.states())
        # Held once: the sequences get their rows back when the batch is disbanded.
        for layer in layers:
            layer.cache = [None] * len(self.cache)

    def _gather(self, i: int) -> mx.array | None:
        states = [layer.cache[i] for layer in self._layers]
        shaped = next((state for state in states if state is not None), None)
        if shaped is None:
            return None
        # A sequence that has seen nothing yet starts from zeros, as the models do.
        return mx.concatenate([mx.zeros_like(shaped) if state is None else state for state in states])

    def advance(self, N: int) -> None:  # noqa: N803
        for layer in self._layers:
            layer.offset += N

    def begin_step(self, offsets: mx.array) -> None:
        self.offset = offsets

    def end_step(self) -> list[mx.array]:
        """Nothing is kept for the step, and nothing written without MLX's knowledge."""
        return []

    def states(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]

    def release(self) -> list[mx.array]:
        """Give each sequence its row back, in memory of its own."""
        for row, layer in enumerate(self._layers):
            layer.cache = [None if array is None else mx.contiguous(array[row : row + 1]) for array in self.cache]
        return [array for layer in self._layers for array in layer.arrays()]
