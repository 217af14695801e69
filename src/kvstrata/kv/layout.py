"""Layout of a model: kinds of its layers, read from the caches that mlx-lm would make, and bytes of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    _BaseCache,
    make_prompt_cache,
)

from kvstrata.codecs.backends import HeadKind, VectorKind
from kvstrata.codecs.rope import RopeRotation
from kvstrata.errors import ConfigError
from kvstrata.kv.buffers import KvShape

Kind = Literal["full", "window", "chunked", "recurrent", "composite", "foreign"]


@dataclass(frozen=True)
class LayerSpec:
    """An entry of the cache list that a model is called with."""

    kind: Kind
    max_size: int = 0  # window: tokens in the ring. chunked: tokens of a chunk
    keep: int = 0  # window: first tokens that are never overwritten
    num_arrays: int = 0  # recurrent: entries of the state
    children: tuple[LayerSpec, ...] = ()  # composite
    token_bytes: int = 0  # full, foreign: for each token. window, chunked: for each of max_size tokens
    state_bytes: int = 0  # recurrent, foreign: independent of the number of tokens
    kv_heads: int = 0  # full, window, chunked: shape and dtype of K and V
    k_dim: int = 0
    v_dim: int = 0
    dtype: mx.Dtype = mx.float32
    k_rotation: RopeRotation | None = None  # RoPE rotation of its keys; None: none, or not known
    v_rotation: RopeRotation | None = None  # RoPE rotation of its values, in models that pass keys as values
    rotation_reason: str = ""  # why the rotation is not known

    @property
    def kv_shape(self) -> KvShape | None:
        """Shape and dtype of K and V; None: not measured yet, or the layer keeps no K and V."""
        return KvShape(self.kv_heads, self.k_dim, self.v_dim, self.dtype) if self.kv_heads else None

    @property
    def signature(self) -> str:
        """Kind and shape of the layer's cached state as text, for the identity of the model's KV."""
        if self.kind in ("window", "chunked"):
            return f"{self.kind}:{self.max_size}:{self.keep}:{self.kv_heads}:{self.k_dim}:{self.v_dim}"
        if self.kind == "recurrent":
            return f"recurrent:{self.num_arrays}:{self.state_bytes}"
        return f"{self.kind}:{self.kv_heads}:{self.k_dim}:{self.v_dim}"

    def fixed_bytes(self) -> int:
        buffer = self.max_size * self.token_bytes if self.kind in ("window", "chunked") else 0
        return buffer + self.state_bytes + sum(child.fixed_bytes() for child in self.children)

    def growing_bytes(self) -> int:
        """Return the bytes that each further token takes."""
        own = self.token_bytes if self.kind in ("full", "foreign") else 0
        return own + sum(child.growing_bytes() for child in self.children)


@dataclass(frozen=True)
class Layout:
    """All layers of a model, and the form in which a forward pass reads them."""

    layers: tuple[LayerSpec, ...]
    batching: Literal["batched", "per_sequence"] = "batched"  # passes: one for the batch, or one for each sequence
    reason: str = ""
    mixes: bool = False  # a chunk of a prompt and decode rows may share a pass
    compiles: bool = False  # a decode step may be compiled

    @property
    def fixed_bytes(self) -> int:
        return sum(layer.fixed_bytes() for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        return sum(layer.growing_bytes() for layer in self.layers)

    def flat(self) -> tuple[LayerSpec, ...]:
        """Return the layers with composites replaced by their children: the flat layers that spans and plans number."""
        return self._flat

    @cached_property
    def _flat(self) -> tuple[LayerSpec, ...]:
        return tuple(spec for layer in self.layers for spec in (layer.children or (layer,)))

    def head_kinds(self) -> set[HeadKind]:
        """Return the keys and values of the layers that attend to segments."""
        return {
            HeadKind(
                VectorKind(spec.dtype, spec.k_dim, spec.k_rotation), VectorKind(spec.dtype, spec.v_dim, spec.v_rotation)
            )
            for spec in self.flat()
            if spec.kind in ("full", "window")
        }

    def describe_rope(self) -> dict[str, Any]:
        """Count layers with RoPE-aware means and without RoPE, and list the others by reason. For people to read."""
        keys = [(i, spec) for i, spec in enumerate(self.flat()) if spec.kind in ("full", "window", "chunked")]
        unknown: dict[str, list[int]] = {}
        for i, spec in keys:
            if spec.rotation_reason:
                unknown.setdefault(spec.rotation_reason, []).append(i)
        return {
            "rope_aware_layers": sum(spec.k_rotation is not None or spec.v_rotation is not None for _, spec in keys),
            "layers_without_rope": sum(
                not (spec.k_rotation or spec.v_rotation or spec.rotation_reason) for _, spec in keys
            ),
            "plain_because": unknown,
        }

    def count_by_kind(self) -> dict[str, int]:
        return dict(Counter(layer.kind for layer in self.layers))


# First tokens that a bounded sequence never drops, because they are attention sinks.
KEPT_TOKENS = 4


def read_layer_specs(model: Any, max_kv_size: int | None = None) -> tuple[LayerSpec, ...]:
    """Return the kind of each layer. `max_kv_size`: full attention becomes a window of that many tokens."""
    specs = tuple(_spec_of(cache) for cache in make_prompt_cache(model))
    return specs if max_kv_size is None else tuple(_bounded(spec, max_kv_size) for spec in specs)


def _bounded(spec: LayerSpec, max_kv_size: int) -> LayerSpec:
    if spec.kind == "full":
        return LayerSpec("window", max_size=max_kv_size, keep=KEPT_TOKENS)
    if spec.kind == "foreign":
        raise ConfigError(
            "--max-kv-size cannot hold for this model: some of its layers bring a cache of their own kind, which only "
            "the model can bound. Serve it without --max-kv-size."
        )
    return replace(spec, children=tuple(_bounded(child, max_kv_size) for child in spec.children))


def make_foreign_cache(model: Any, index: int) -> Any:
    return make_prompt_cache(model)[index]


def _spec_of(cache: Any) -> LayerSpec:
    # Exact types: a subclass may keep its state elsewhere.
    if type(cache) is KVCache:
        return LayerSpec("full")
    if type(cache) is RotatingKVCache:
        return LayerSpec("window", max_size=cache.max_size, keep=cache.keep)
    if type(cache) is ChunkedKVCache:
        return LayerSpec("chunked", max_size=cache.chunk_size)
    if type(cache) is ArraysCache:
        return LayerSpec("recurrent", num_arrays=len(cache.cache))
    children = tuple(_spec_of(child) for child in cache.caches) if type(cache) is CacheList else ()
    if children and all(child.kind != "foreign" for child in children):
        return LayerSpec("composite", children=children)
    return LayerSpec("foreign")


def measure_layers(specs: Sequence[LayerSpec], caches: Sequence[Any], tokens: int) -> tuple[LayerSpec, ...]:
    """Fill in shapes and bytes, from caches that have seen at least `tokens` tokens."""
    return tuple(_measured(spec, cache, tokens) for spec, cache in zip(specs, caches, strict=True))


def _measured(spec: LayerSpec, cache: Any, tokens: int) -> LayerSpec:
    if spec.kind in ("full", "window", "chunked"):
        k, v = cache.arrays()
        return replace(
            spec,
            token_bytes=cache.token_bytes,
            kv_heads=k.shape[1],
            k_dim=k.shape[3],
            v_dim=v.shape[3],
            dtype=k.dtype,
        )
    if spec.kind == "recurrent":
        return replace(spec, state_bytes=cache.nbytes)
    if spec.kind == "composite":
        return replace(spec, children=measure_layers(spec.children, cache.caches, tokens))
    return _measured_foreign(spec, cache.arrays(), tokens)


def _measured_foreign(spec: LayerSpec, arrays: Sequence[mx.array], tokens: int) -> LayerSpec:
    """Measure a foreign cache: arrays that look like [batch, heads, tokens, dim] grow with the third axis, which may be
    allocated ahead; the others are state."""
    growing = [array for array in arrays if array.ndim == 4 and array.shape[2] >= tokens]
    by_token = sum(array.nbytes // array.shape[2] for array in growing)
    fixed = sum(array.nbytes for array in arrays) - sum(array.nbytes for array in growing)
    return replace(spec, token_bytes=by_token, state_bytes=fixed)


def arrays_in(value: Any) -> list[mx.array]:
    """Return every array inside a cache of mlx-lm, at any depth."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, _BaseCache):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [array for item in value for array in arrays_in(item)]
    return []
