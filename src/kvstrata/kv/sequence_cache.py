"""The KV cache of one sequence: all of its layers. A model is called with them when the sequence runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.attention.segments import SegmentSource
from kvstrata.kv.attention_layer import AttentionLayer
from kvstrata.kv.buffers import round_up
from kvstrata.kv.chunked_layer import ChunkedLayer
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import LayerSpec, Layout, arrays_in, make_foreign_cache
from kvstrata.kv.precision_plan import CodecPair
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.recurrent_layer import RecurrentLayer
from kvstrata.kv.window_layer import WindowLayer


class LayerCache(Protocol):
    """A layer of one sequence: the interface for `SequenceCache`. mlx-lm's models call further methods."""

    @property
    def nbytes(self) -> int: ...

    def arrays(self) -> list[mx.array]:
        """Return the arrays that a pass has changed."""
        ...

    def grow(self, tokens: int) -> None:
        """Reserve memory for more tokens."""

    def end_pass(self) -> list[mx.array]:
        """Release objects that only the pass needed. Return the arrays that have to be issued before the next pass."""
        ...


class CompositeLayer:
    """Several caches in one entry, like mlx-lm's CacheList."""

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays()]

    def grow(self, tokens: int) -> None:
        for cache in self.caches:
            cache.grow(tokens)

    def end_pass(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.end_pass()]


class ForeignLayer:
    """A cache class that only mlx-lm knows: the model gets it as it is, one sequence at a time."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return arrays_in(self.cache)

    def grow(self, tokens: int) -> None:
        """Do nothing: the cache grows by itself."""

    def end_pass(self) -> list[mx.array]:
        """Return nothing: the layer keeps nothing for the pass, and MLX knows of all writes."""
        return []


class DenseLayer:
    """A layer's keys and values as plain arrays, for models that compute on the arrays that they fetch (MLA)."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer

    @property
    def offset(self) -> int:
        return self._layer.offset

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array | str | None:
        return self._layer.make_mask(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._layer.append(keys, values)
        return segments_to_arrays(self._layer.segments(), keys.dtype)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return segments_to_arrays(self._layer.segments(), self._layer.arrays()[0].dtype)


@dataclass(frozen=True)
class Prefix:
    """The cached tokens that a sequence resumes from, by flat layer (`Layout.flat`)."""

    num_tokens: int
    sources: tuple[tuple[SegmentSource, ...], ...]  # full layers; empty for the others
    # At num_tokens. Window and chunked layers: (k, v). Recurrent layers: their arrays. None for the others.
    states: tuple[Any, ...]


class SequenceCache:
    """The live cache of one sequence: `capacity` tokens after its prefix, more with `grow`.

    `raw_tokens`: largest number of tokens that have buffers at once; the engine encodes older tokens in time. None: no
    limit.
    """

    def __init__(
        self,
        layout: Layout,
        model: Any,
        capacity: int,
        prefix: Prefix | None = None,
        raw_tokens: int | None = None,
    ) -> None:
        self.capacity = capacity
        self._raw_tokens = raw_tokens
        self.start = prefix.num_tokens if prefix else 0
        self.num_tokens = self.start
        num_flat = len(layout.flat())
        sources = iter(prefix.sources if prefix else ((),) * num_flat)
        make = partial(_make_layer, model=model, capacity=capacity, raw_tokens=raw_tokens, sources=sources)
        self.layers: list[LayerCache] = [make(spec, index=i) for i, spec in enumerate(layout.layers)]
        self.flat: list[Any] = _flatten(self.layers)
        self._own = [layer.own for layer in self.flat if isinstance(layer, FullLayer)]
        self._batching = layout.batching
        if prefix:
            for layer, state in zip(self.flat, prefix.states, strict=True):
                if isinstance(layer, WindowLayer | ChunkedLayer):
                    k, v = state
                    layer.resume(k, v, prefix.num_tokens)
                elif isinstance(layer, RecurrentLayer):
                    layer.resume(state, prefix.num_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the sequence's own tokens, without its prefix, which spans own."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def free_tokens(self) -> int:
        return self.start + self.capacity - self.num_tokens

    @property
    def raw_capacity(self) -> int:
        """Tokens that buffers are reserved for, rounded up to the size of buffers. Encoded tokens need no buffer."""
        left = self.capacity - self._sealed_tokens
        return round_up(left if self._raw_tokens is None else min(left, max(self._raw_tokens, self.unsealed_tokens)))

    @property
    def unallocated_tokens(self) -> int:
        """Tokens that get a buffer only after earlier tokens were encoded and their buffers freed."""
        return max(0, self.capacity - self._sealed_tokens - self.raw_capacity)

    @property
    def unsealed_tokens(self) -> int:
        """The sequence's own tokens that are in buffers."""
        return self.num_tokens - self.start - self._sealed_tokens

    @property
    def _sealed_tokens(self) -> int:
        return min([own.sealed_tokens for own in self._own], default=0)

    @property
    def sealed_bytes(self) -> int:
        return sum([own.sealed_bytes for own in self._own])

    def arrays(self) -> list[mx.array]:
        """Return all arrays that a pass has changed."""
        return [array for layer in self.layers for array in layer.arrays()]

    def states(self) -> list[mx.array]:
        """Return arrays that a pass changes and its logits may not depend on: the caller evaluates them, because lazy
        graphs would grow from step to step."""
        stateful = (layer for layer in self.flat if isinstance(layer, RecurrentLayer | ForeignLayer))
        return [array for layer in stateful for array in layer.arrays()]

    def grow(self, tokens: int) -> None:
        self.capacity += tokens
        for layer in self.layers:
            layer.grow(tokens)

    def encode_past(self, pairs: Sequence[CodecPair], window: RawWindow) -> None:
        """Encode own tokens in every full-attention layer. Windows and recurrent states stay as they are."""
        for layer, pair in zip(self.flat, pairs, strict=True):
            if isinstance(layer, FullLayer):
                layer.own.encode_past_at_once(*pair, window)

    def drop_replaced_segments(self) -> None:
        """Drop segments of the prefix that were transcoded since the last step."""
        for layer in self.flat:
            if isinstance(layer, FullLayer):
                layer.drop_replaced_segments()

    def caches(self) -> list[Any]:
        """Return the caches that the model is called with."""
        return [_as_called(layer, self._batching) for layer in self.layers]

    def end_pass(self, num_tokens: int) -> None:
        """Count the tokens of a forward pass, issue its launches, and release objects that only the pass needed."""
        self.num_tokens += num_tokens
        mx.async_eval([array for layer in self.layers for array in layer.end_pass()])


def _make_layer(
    spec: LayerSpec,
    *,
    model: Any,
    index: int,
    capacity: int,
    raw_tokens: int | None,
    sources: Iterator[tuple[SegmentSource, ...]],
) -> LayerCache:
    if spec.kind == "composite":
        make = partial(_make_layer, model=model, index=index, capacity=capacity, raw_tokens=raw_tokens, sources=sources)
        return CompositeLayer([make(child) for child in spec.children])
    prefix = next(sources)
    if spec.kind == "full":
        return FullLayer(capacity, prefix, raw_tokens, spec.kv_shape)
    if spec.kind == "window":
        return WindowLayer(spec.max_size, spec.keep, spec.kv_shape)
    if spec.kind == "chunked":
        return ChunkedLayer(spec.max_size)
    if spec.kind == "recurrent":
        return RecurrentLayer(spec.num_arrays)
    return ForeignLayer(make_foreign_cache(model, index))


def _flatten(layers: Sequence[Any]) -> list[Any]:
    children = [layer.caches if isinstance(layer, CompositeLayer) else [layer] for layer in layers]
    return [layer for group in children for layer in group]


def _as_called(layer: LayerCache, batching: str) -> Any:
    if isinstance(layer, ForeignLayer):
        return layer.cache
    if isinstance(layer, CompositeLayer):
        return CompositeLayer([_as_called(child, batching) for child in layer.caches])
    if batching == "per_sequence" and isinstance(layer, AttentionLayer):
        return DenseLayer(layer)
    return layer
