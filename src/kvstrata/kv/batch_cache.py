"""The KV cache of a batch of sequences that decode together, one token each: a model is called with it.

Projections and MLPs run on all rows at once. Keys and values stay in each sequence's own buffers, so joining or leaving
moves no KV. Only recurrent state is gathered, and only when the membership changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvstrata.kv.attention_layer import AttentionLayer
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.chunked_layer import ChunkedLayer
from kvstrata.kv.decode_plan import DecodePlan, plan_after
from kvstrata.kv.recurrent_layer import RecurrentLayer, RecurrentRows
from kvstrata.kv.sequence_cache import CompositeLayer, ForeignLayer, SequenceCache


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
        self._plan: DecodePlan | None = None
        self.planning_s = 0.0  # duration of planning the last step

    def offsets(self) -> mx.array:  # [rows]
        return mx.array([sequence.num_tokens for sequence in self.sequences])

    def begin_step(self) -> list[Any]:
        """Return the caches that the model is called with for the next token of every row."""
        offsets = self.offsets()
        for rows in self._rows:
            rows.begin_step(offsets)
        return list(self._rows)

    def end_step(self) -> None:
        mx.async_eval([array for rows in self._rows for array in rows.end_step()])
        for sequence in self.sequences:
            sequence.end_pass(1)

    def plan(self) -> DecodePlan | None:
        """Return a plan of what the next step reads in all layers; None: the step has to go layer by layer."""
        attend = [rows for rows in self._rows if isinstance(rows, AttentionRows)]
        if len(attend) < len(self._rows):
            return None
        began_s = time.perf_counter()
        self._plan = plan_after(self._plan, self.sequences, attend)
        self.planning_s = time.perf_counter() - began_s
        return self._plan

    def states(self) -> list[mx.array]:
        """Return the states of all rows, as `SequenceCache.states` does."""
        return [array for rows in self._rows for array in rows.states()]

    def end_plan(self) -> None:
        """Release the plan that is kept for the next step."""
        if self._plan is not None:
            self._plan.end()
            self._plan = None

    def release(self) -> None:
        """Give every sequence its recurrent state back, before the membership changes."""
        self.end_plan()
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
        raise NotImplementedError("chunked layers cannot be batched: their masks need one integer offset")
    assert isinstance(first, ForeignLayer)
    raise NotImplementedError(f"{type(first.cache).__name__} cannot be batched")
