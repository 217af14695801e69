"""A chunk of one prompt and the next tokens of running streams, in one forward pass.

The pass is a batch of single tokens: first those of the chunk, then one for each stream, each with an offset of its
own. Projections and MLPs do not care whose row a token is, so the weights are read once for all of them. Attention
does: the chunk attends as a chunk does, the streams as in a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvstrata.attention.attend import MixedKeys, as_chunk
from kvstrata.attention.parts import Parts
from kvstrata.layers.attention_rows import AttentionRows
from kvstrata.layers.base import AttentionLayer
from kvstrata.layers.batch import BatchCache
from kvstrata.layers.kept import KeptCaches
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.layers.window import WindowLayer


def can_mix(layout: Layout) -> bool:
    """Whether its layers have a form for such passes. Recurrent ones need a prompt's tokens in one row."""
    return layout.path == "parts" and all(spec.kind in ("full", "window") for spec in layout.layers)


class MixedLayer:
    """One attention layer: of the sequence whose chunk it is, and of the streams."""

    def __init__(self, chunk: AttentionLayer, num_tokens: int, rows: AttentionRows, offsets: mx.array) -> None:
        self._chunk = chunk
        self._num_tokens = num_tokens
        self._rows = rows
        self.offset = offsets  # [tokens + rows]
        self._keys: MixedKeys | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[MixedKeys, MixedKeys]:
        count = self._num_tokens
        mask = self._chunk.make_mask(count)  # depends on what was there before
        # Both write before either reads: one may go on from the other, and a view would make MLX copy its buffer.
        self._chunk.append(as_chunk(keys[:count]), as_chunk(values[:count]))
        rows, _ = self._rows.update_and_fetch(keys[count:], values[count:])
        self._keys = MixedKeys(Parts((self._chunk.parts(),)), count, mask, rows)
        return self._keys, self._keys

    def keys_and_values(self) -> tuple[MixedKeys, MixedKeys]:
        assert self._keys is not None, "nothing was written in this pass"
        return self._keys, self._keys

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: N803
        """None for the batch of single tokens; the chunk has its own, see `update_and_fetch`."""
        self._rows.make_mask(N, return_array, window_size)
        if window_size is not None and not isinstance(self._chunk, WindowLayer):
            raise NotImplementedError("a window over a layer that keeps everything needs a mask for each row")


class MixedCaches(KeptCaches):
    """What the model is called with: a cache for each layer. The output layer runs for the last `num_kept` tokens."""

    def __init__(self, layers: Sequence[MixedLayer], num_kept: int) -> None:
        super().__init__(layers)
        self._num_kept = num_kept

    def keep(self, hidden: mx.array) -> mx.array:
        return hidden[-self._num_kept :]


class MixedPass:
    """`num_tokens` of the prompt of `chunk`, and the next token of every sequence in `batch`."""

    def __init__(self, chunk: SequenceCache, num_tokens: int, batch: BatchCache) -> None:
        self._chunk = chunk
        self._num_tokens = num_tokens
        self._batch = batch

    def begin(self) -> MixedCaches:
        first = self._chunk.num_tokens
        offsets = [*range(first, first + self._num_tokens), *(s.num_tokens for s in self._batch.sequences)]
        array = mx.array(offsets)
        pairs: list[tuple[Any, Any]] = list(zip(self._chunk.layers, self._batch.begin_step(), strict=True))
        layers = [MixedLayer(chunk, self._num_tokens, rows, array) for chunk, rows in pairs]
        return MixedCaches(layers, len(self._batch.sequences))

    def end(self) -> None:
        self._batch.end_step()
        self._chunk.end_pass(self._num_tokens)
