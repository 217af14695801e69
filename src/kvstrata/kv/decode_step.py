"""A decode step as one compiled graph: the model is traced once for each shape, and no Python runs for its layers.

Everything that differs from step to step is an input: tokens, offsets, and the tables of the launches (`Launch`).
The weights are constants of the graph. A model that reads more of a cache cannot be traced and raises an error.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx

from kvstrata.attention import dispatch as attention_dispatch
from kvstrata.attention.cuda.step import PreparedStep, StepLaunch, UntraceableRead
from kvstrata.attention.dispatch import Keys
from kvstrata.codecs import dispatch as codec_dispatch
from kvstrata.codecs.backends import KernelChoice, runtime
from kvstrata.kv.attention_rows import AttentionRows
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.layout import Layout

MOST_SHAPES = 128  # up to 32 of them are traced at the start


def can_compile(layout: Layout) -> bool:
    """Whether all layers have the launches of which a compiled step consists. Only CUDA has such launches."""
    attends = all(spec.kind in ("full", "window") for spec in layout.layers)
    return runtime().backend == "cuda" and layout.batching == "batched" and attends


def explain(layout: Layout) -> list[KernelChoice]:
    """Return the back-end that computes each operation on a model's KV, and why. Runs no trial."""
    kinds, joined = layout.head_kinds(), layout.batching == "per_sequence"
    attention = attention_dispatch.explain(kinds, joined=joined)
    choices = [_explain_whole_step(layout), *attention, *codec_dispatch.explain(kinds, joined=joined)]
    return list(dict.fromkeys(choices))  # layers with other RoPE frequencies may have the same path


def _explain_whole_step(layout: Layout) -> KernelChoice:
    if layout.compiles:
        return KernelChoice("whole decode step", runtime().backend, "one compiled graph for all layers")
    if layout.batching == "per_sequence":
        return KernelChoice("whole decode step", "stock", f"one pass for each sequence: {layout.reason}")
    reason = "layer by layer: compiled steps need CUDA and attention layers only"
    return KernelChoice("whole decode step", "stock", reason)


class PlannedLayer:
    """A layer whose launch was prepared, as a model sees it while a step is traced or in a mixed pass."""

    def __init__(self, offsets: mx.array, launch: StepLaunch, rows: AttentionRows) -> None:
        self.offset = offsets
        self._launch = launch
        self._rows = rows  # traced step: of the batch at tracing; later batches have rows of the same kind
        self._keys: PreparedStep | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]:
        self._keys = PreparedStep(keys, values, self._launch)
        return self._keys, self._keys

    def keys_and_values(self) -> tuple[Keys, Keys]:
        if self._keys is None:
            raise UntraceableRead("keys that are read before they are written")
        return self._keys, self._keys

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: N803
        self._rows.make_mask(N, return_array, window_size)


class CompiledStep:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._run = mx.compile(self._forward)
        self._shapes: set[Hashable] = set()  # traced so far
        self._traced: Sequence[AttentionRows] = ()

    @property
    def num_traced(self) -> int:
        """Number of shapes that were traced."""
        return len(self._shapes)

    def run(self, tokens: mx.array, batch: BatchCache) -> mx.array | None:  # tokens [rows] -> logits [rows, vocab]
        """Issue the step of the next token of every row. None: the step has to go layer by layer."""
        plan = batch.plan()
        if plan is None:
            return None
        tokens = tokens.astype(mx.int32)  # each dtype would be traced anew
        launches = plan.launches()
        arrays, blocks = [launch[:-1] for launch in launches], tuple([launch.num_blocks for launch in launches])
        lengths = tuple([(len(launch.pieces), len(launch.kinds)) for launch in launches])
        self._bound((len(tokens), blocks, lengths))
        self._traced = plan.rows
        try:
            logits = self._run(tokens, batch.offsets(), arrays, blocks)
        finally:
            self._traced = ()  # or it would keep the sequences alive
        mx.async_eval(logits)  # even if no caller asks for the result: the launches write the new tokens
        plan.count()
        return logits

    def _bound(self, shape: Hashable) -> None:
        """Bound the traced shapes: MLX keeps a megabyte or more for each while the compiled function lives."""
        if shape in self._shapes:
            return
        if len(self._shapes) == MOST_SHAPES:
            self._run = mx.compile(self._forward)
            self._shapes = set()
        self._shapes.add(shape)

    def _forward(
        self,
        tokens: mx.array,
        offsets: mx.array,
        arrays: list[tuple[mx.array, ...]],  # arguments of each layer's launch
        blocks: tuple[int, ...],  # a constant of the graph
    ) -> mx.array:
        launches = [StepLaunch(*given, num_blocks=count) for given, count in zip(arrays, blocks, strict=True)]
        caches = [PlannedLayer(offsets, *each) for each in zip(launches, self._traced, strict=True)]
        return self._model(tokens[:, None], cache=caches)[:, -1]
