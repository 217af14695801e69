"""Kinds and bytes of layers, read from mlx-lm's caches."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from kvstrata.errors import ConfigError
from kvstrata.kv.layout import LayerSpec, Layout, _spec_of, measure_layers, read_layer_specs
from kvstrata.kv.sequence_cache import ForeignLayer


def test_spec_of_returns_the_kind_of_each_mlx_lm_cache() -> None:
    assert _spec_of(KVCache()).kind == "full"
    assert _spec_of(RotatingKVCache(8, keep=2)) == LayerSpec("window", max_size=8, keep=2)
    assert _spec_of(ChunkedKVCache(8)) == LayerSpec("chunked", max_size=8)
    assert _spec_of(ArraysCache(3)) == LayerSpec("recurrent", num_arrays=3)
    assert [c.kind for c in _spec_of(CacheList(KVCache(), ArraysCache(2))).children] == ["full", "recurrent"]


def test_composite_with_an_unknown_child_is_foreign() -> None:
    assert _spec_of(CacheList(KVCache(), ConcatenateKVCache())) == LayerSpec("foreign")


def test_foreign_cache_costs_its_tokens_without_preallocation() -> None:
    caches = [ChunkedKVCache(512), CacheList(ChunkedKVCache(512), ArraysCache(1))]
    tokens = mx.zeros((1, 2, 5, 16))
    caches[0].update_and_fetch(tokens, tokens)
    caches[1][0].update_and_fetch(tokens, tokens)
    caches[1][1][0] = mx.zeros((1, 7))
    specs = [LayerSpec("foreign")] * 2
    plain, mixed = measure_layers(specs, [ForeignLayer(cache) for cache in caches], 5)
    by_token = 2 * 2 * 16 * 4
    assert (plain.token_bytes, plain.state_bytes) == (by_token, 0)
    assert (mixed.token_bytes, mixed.state_bytes) == (by_token, 28)


def test_layout_bytes_are_the_sums_over_layers() -> None:
    children = (LayerSpec("full", token_bytes=3), LayerSpec("recurrent", state_bytes=11))
    layers = (LayerSpec("full", token_bytes=5), LayerSpec("window", max_size=4, token_bytes=7))
    layers += (LayerSpec("chunked", max_size=2, token_bytes=6),)
    layout = Layout((*layers, LayerSpec("composite", children=children)))
    assert layout.token_bytes == 8
    assert layout.fixed_bytes == 4 * 7 + 2 * 6 + 11


def test_max_kv_size_is_refused_for_foreign_layers() -> None:
    model = SimpleNamespace(make_cache=lambda: [KVCache(), ConcatenateKVCache()], layers=[])
    assert [spec.kind for spec in read_layer_specs(model)] == ["full", "foreign"]
    with pytest.raises(ConfigError, match="--max-kv-size"):
        read_layer_specs(model, 128)
