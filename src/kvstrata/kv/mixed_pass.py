"""Mixed pass: chunks and decode rows in one forward pass, and the rows that need logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from kvstrata.attention.dispatch import ChunkKeys, Keys, MixedKeys, as_chunk
from kvstrata.attention.segments import SegmentedKV
from kvstrata.kv.attention_layer import AttentionLayer
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.decode_step import PlannedLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.window_layer import WindowLayer


class PassCaches(list[Any]):
    """The caches of a forward pass, one for each layer, and the choice of tokens for which the output layer runs."""

    def keep(self, hidden: mx.array) -> mx.array:
        """Return the hidden states of [rows, tokens, dim] for which the output layer runs."""
        raise NotImplementedError


class PromptCaches(PassCaches):
    """The caches of a prompt chunk, which needs no logits."""

    def keep(self, hidden: mx.array) -> mx.array:
        return hidden[:, :0]


def can_mix(layout: Layout) -> bool:
    """Whether all layers support mixed passes. Recurrent layers do not: they need a prompt's tokens in one row."""
    return layout.batching == "batched" and all(spec.kind in ("full", "window") for spec in layout.layers)


class DecodeRows(Protocol):
    """An attention layer of the decode rows of a batch."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Keys, Keys]: ...

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None: ...  # noqa: N803


class MixedLayer:
    """An attention layer of a mixed pass: a layer and a token count for each chunk, and the decode rows."""

    def __init__(
        self, chunks: Sequence[tuple[AttentionLayer, int]], rows: DecodeRows | None, offsets: mx.array
    ) -> None:
        self._chunks = chunks
        self._rows = rows
        self.offset = offsets  # [tokens + rows]
        self._keys: MixedKeys | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[MixedKeys, MixedKeys]:
        masks = [layer.make_mask(count) for layer, count in self._chunks]  # before the writes, which move the offset
        # All chunks are written before any is read: one sequence may read another's tokens, and a view would make MLX
        # copy the buffer at the next write.
        start = 0
        for layer, count in self._chunks:
            end = start + count
            layer.append(as_chunk(keys[start:end]), as_chunk(values[start:end]))
            start = end
        rows = self._rows.update_and_fetch(keys[start:], values[start:])[0] if self._rows else None
        chunks = [
            ChunkKeys(SegmentedKV((layer.segments(),)), count, mask)
            for (layer, count), mask in zip(self._chunks, masks, strict=True)
        ]
        self._keys = MixedKeys(tuple(chunks), rows)
        return self._keys, self._keys

    def keys_and_values(self) -> tuple[MixedKeys, MixedKeys]:
        assert self._keys is not None, "nothing was written in this pass"
        return self._keys, self._keys

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: N803
        """Return None, for a batch of single tokens. Chunks have their own masks, see `update_and_fetch`."""
        if N != 1:
            raise ValueError(f"a mixed pass is a batch of single tokens, not of {N}")
        if self._rows is not None:
            self._rows.make_mask(N, return_array, window_size)
        if window_size is not None and not all(isinstance(layer, WindowLayer) for layer, _ in self._chunks):
            raise NotImplementedError("a window over a layer that keeps everything needs a mask for each row")


class MixedCaches(PassCaches):
    """The caches of a mixed pass. The output layer runs for the last `num_kept` tokens."""

    def __init__(self, layers: Sequence[MixedLayer], num_kept: int) -> None:
        super().__init__(layers)
        self._num_kept = num_kept

    def keep(self, hidden: mx.array) -> mx.array:
        return hidden[len(hidden) - self._num_kept :]


class MixedPass:
    """A forward pass over chunks, each a sequence and a number of tokens, and the next token of each row of `batch`.

    `batch` None: no decode rows. `is_planned`: the rows' launches may be prepared, as for a compiled step."""

    def __init__(
        self, chunks: Sequence[tuple[SequenceCache, int]], batch: BatchCache | None, *, is_planned: bool = False
    ) -> None:
        self._chunks = chunks
        self._batch = batch
        plan = batch.plan() if batch is not None and is_planned else None
        # No plan where a decode row reads a buffer that a chunk writes to: MLX may move the buffer in this pass.
        written = [array for sequence, _ in chunks for array in sequence.arrays()]
        self._plan = None if plan is None or plan.reads(written) else plan

    @property
    def is_planned(self) -> bool:
        return self._plan is not None

    def begin(self) -> MixedCaches:
        decoding = self._batch.sequences if self._batch is not None else ()
        offsets = [at for chunk, count in self._chunks for at in range(chunk.num_tokens, chunk.num_tokens + count)]
        array = mx.array([*offsets, *(sequence.num_tokens for sequence in decoding)])
        by_layer: Any = zip(*(sequence.layers for sequence, _ in self._chunks), strict=True)
        counts = [count for _, count in self._chunks]
        layers = [
            MixedLayer(list(zip(chunk_layers, counts, strict=True)), rows, array)
            for chunk_layers, rows in zip(by_layer, self._decode_rows(), strict=True)
        ]
        return MixedCaches(layers, len(decoding))

    def _decode_rows(self) -> Sequence[DecodeRows | None]:
        if self._batch is None:
            return [None] * len(self._chunks[0][0].layers)
        if self._plan is None:
            return self._batch.begin_step()
        offsets = self._batch.offsets()
        pairs = zip(self._plan.launches(), self._plan.rows, strict=True)
        return [PlannedLayer(offsets, launch, rows) for launch, rows in pairs]

    def end(self) -> None:
        """Count the tokens. The caller always evaluates the result, because the rows' launches write new tokens."""
        if self._plan is not None:
            self._plan.count()
        elif self._batch is not None:
            self._batch.end_step()
        for sequence, count in self._chunks:
            sequence.end_pass(count)
