"""Several sequences that decode together, one token each: what a model is called with for the whole batch.

Projections and MLPs run on all rows at once; keys and values stay in each sequence's own buffers, so joining or leaving
moves no KV. Only recurrent state is gathered, and only when the membership changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvstrata.attention import cpu, cuda_rows
from kvstrata.attention.attend import Keys
from kvstrata.attention.parts import Parts
from kvstrata.layers.base import AttentionLayer
from kvstrata.layers.chunked import ChunkedLayer
from kvstrata.layers.recurrent import RecurrentLayer, RecurrentRows
from kvstrata.layers.sequence import CompositeLayer, ForeignLayer, SequenceCache
from kvstrata.layers.window import WindowLayer


class AttentionRows:
    """One attention layer of several sequences."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = layers
        self.offset: mx.array | int = 0  # [rows], set for each step: RoPE takes one offset for each row
        self._step: cpu.Step | cuda_rows.Step | None = None
        self._counters = cuda_rows.Counters()

    def begin_step(self, offsets: mx.array) -> None:
        self.offset = offsets
        self._step = None

    def end_step(self) -> list[mx.array]:
        """What has to be issued before the next step."""
        step, self._step = self._step, None  # it holds parts that may be replaced before the next step
        return step.launched if isinstance(step, cuda_rows.Step) else []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        if cpu.fits(keys, values) and all(layer.has_runs for layer in self._layers):
            self._step = cpu.Step(self._layers, keys, values)
        elif cuda_rows.fits(keys, values):
            self._step = cuda_rows.Step(self._layers, keys, values, self._counters)
        if self._step is not None:
            return self._step, self._step
        num_rows = len(self._layers)
        for layer, k, v in zip(self._layers, mx.split(keys, num_rows), mx.split(values, num_rows), strict=True):
            layer.append(k, v)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Keys, Keys]:
        parts = self._step or Parts(tuple(layer.parts() for layer in self._layers))
        return parts, parts

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: N803, ARG002
        if N != 1:
            raise ValueError(f"a batch decodes one token at a time, not {N}")
        for layer in self._layers:
            if window_size is not None and not (isinstance(layer, WindowLayer) and layer.ring.max_size <= window_size):
                raise NotImplementedError("a window narrower than what the layer keeps needs a mask for each row")

    def arrays(self) -> list[mx.array]:
        return [array for layer in self._layers for array in layer.arrays()]

    def states(self) -> list[mx.array]:
        return []

    def release(self) -> list[mx.array]:
        return []


class CompositeRows:
    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches

    def __getitem__(self, index: int) -> Any:
        return self._caches[index]

    def begin_step(self, offsets: mx.array) -> None:
        for cache in self._caches:
            cache.begin_step(offsets)

    def end_step(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.end_step()]

    def states(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.states()]

    def release(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.release()]


class BatchCache:
    def __init__(self, sequences: Sequence[SequenceCache]) -> None:
        self.sequences = tuple(sequences)
        by_layer = zip(*(sequence.layers for sequence in sequences), strict=True)
        self._rows = [_rows_of(layers) for layers in by_layer]

    def begin_step(self) -> list[Any]:
        """What the model is called with for the next token of every row."""
        offsets = mx.array([sequence.num_tokens for sequence in self.sequences])
        for rows in self._rows:
            rows.begin_step(offsets)
        return list(self._rows)

    def end_step(self) -> None:
        mx.async_eval([array for rows in self._rows for array in rows.end_step()])
        for sequence in self.sequences:
            sequence.end_pass(1)

    def states(self) -> list[mx.array]:
        """As those of a sequence."""
        return [array for rows in self._rows for array in rows.states()]

    def release(self) -> None:
        """The membership is about to change: every sequence gets its recurrent state back."""
        mx.eval([array for rows in self._rows for array in rows.release()])


def _rows_of(layers: Sequence[Any]) -> Any:
    first = layers[0]
    if isinstance(first, AttentionLayer):
        return AttentionRows(layers)
    if isinstance(first, RecurrentLayer):
        return RecurrentRows(layers)
    if isinstance(first, CompositeLayer):
        return CompositeRows([_rows_of(children) for children in zip(*(c.caches for c in layers), strict=True)])
    if isinstance(first, ChunkedLayer):
        raise NotImplementedError("its models make masks from whole-number offsets")
    assert isinstance(first, ForeignLayer)
    raise NotImplementedError(f"{type(first.cache).__name__} cannot be batched")
