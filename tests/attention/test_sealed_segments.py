"""Sealed segments: encoded, shared, mixed with raw ones, in a batch."""

from __future__ import annotations

import random
from itertools import cycle, islice
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.attention.dispatch import attend, segments_to_arrays
from kvstrata.attention.segments import SealedSegment, SegmentedKV
from kvstrata.codecs.registry import parse_for
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.buffers import round_up
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.probe import probe
from tests.attention.test_attend import distance, random_tokens
from tests.support.models import VOCAB, tiny_module

NAMES = [
    "raw",
    *(f"affine:{bits}" for bits in (8, 6, 5, 4, 3, 2)),
    *(f"planes:{bits}" for bits in (8, 4, 2)),
]
HEAD_DIMS = [64, 80, 96, 128, 192, 256]


def prefilled(model: Any, layout: Layout, tokens: int, seed: int, room: int = 64) -> SequenceCache:
    rng = random.Random(seed)
    cache = SequenceCache(layout, model, tokens + room)
    model(mx.array([[rng.randrange(VOCAB) for _ in range(tokens)]]), cache=cache.caches())
    cache.end_pass(tokens)
    mx.eval(cache.arrays())
    return cache


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("queries", [1, 9])
def test_attention_over_sealed_segments_equals_decoded_arrays(name: str, dim: int, queries: int) -> None:
    if name.startswith("affine") and dim == 80:
        pytest.skip("MLX's format has no groups that divide 80")
    mx.random.seed(dim)
    codec = parse_for(name, dim)
    layer = FullLayer(400)
    layer.append(random_tokens(2, 300, dim), random_tokens(2, 300, dim))
    assert layer.own.encode_past_at_once(codec, codec, RawWindow(4, 20)) == 276
    layer.append(random_tokens(2, queries, dim), random_tokens(2, queries, dim))
    parts = SegmentedKV((layer.segments(),))
    # The first tokens, the encoded ones and the raw newest; neighbours with the same codec are joined.
    assert len(parts.rows[0]) == (2 if name == "raw" else 3)
    q = random_tokens(4, queries, dim)
    k, v = segments_to_arrays(parts.rows[0], q.dtype)
    mask = "causal" if queries > 1 else None
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, mask=mask)
    assert distance(attend(q, parts, parts, None, dim**-0.5, mask), wanted) < 1e-4


def test_encode_past_keeps_the_raw_window_unchanged() -> None:
    k, v = random_tokens(2, 300, 64), random_tokens(2, 300, 64)
    layer = FullLayer(310)
    layer.append(k, v)
    codec = parse_for("planes:4", 64)
    layer.own.encode_past_at_once(codec, codec, RawWindow(4, 128))
    after_k, after_v = segments_to_arrays(layer.segments(), k.dtype)
    for before, after in ((k, after_k), (v, after_v)):
        assert distance(after[:, :, :4], before[:, :, :4]) == 0
        assert distance(after[:, :, -128:], before[:, :, -128:]) == 0
        assert 0 < distance(after[:, :, 4:-128], before[:, :, 4:-128]) < 1
    assert layer.own.encode_past_at_once(codec, codec, RawWindow(4, 128)) == 0  # nothing new to encode
    assert layer.offset == 300


@pytest.mark.parametrize(("tokens", "grown"), [(290, 0), (290, 40), (330, 40), (300, 40)])
def test_encode_past_keeps_the_free_slots_of_all_buffers(tokens: int, grown: int) -> None:
    codec = parse_for("planes:8", 64)
    layer = FullLayer(300)
    if grown:
        layer.grow(grown)
    k, v = random_tokens(2, tokens, 64), random_tokens(2, tokens, 64)
    layer.append(k, v)
    capacity = layer.own.buffers.capacity
    assert layer.own.encode_past_at_once(codec, codec, RawWindow(4, 20)) == tokens - 24
    assert layer.own.buffers.capacity == round_up(capacity - (tokens - 20))
    room = layer.own.buffers.capacity - 20
    more_k, more_v = random_tokens(2, room, 64), random_tokens(2, room, 64)
    layer.append(more_k, more_v)
    (tail,) = layer.own.segments(tokens - 20, tokens + room)
    dense_k, dense_v = tail.dense(k.dtype)
    assert mx.array_equal(dense_k, mx.concatenate([k[:, :, -20:], more_k], axis=2))
    assert mx.array_equal(dense_v, mx.concatenate([v[:, :, -20:], more_v], axis=2))
    with pytest.raises(IndexError, match="do not fit"):
        layer.append(k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize("raw_tokens", [None, 640])
def test_encode_past_in_chunks_copies_no_free_slots(raw_tokens: int | None) -> None:
    """Free slots are allocated when they are needed, so each seal copies a bounded number of tokens."""
    codec = parse_for("planes:4", 64)
    layer = FullLayer(20_000, raw_tokens=raw_tokens)
    k, v = random_tokens(2, 256, 64), random_tokens(2, 256, 64)
    for at in range(0, 19_968, 256):
        layer.append(k, v)
        layer.own.encode_past_at_once(codec, codec, RawWindow(4, 128))
        mx.eval(layer.arrays())
        assert layer.own.buffers.capacity - (layer.offset - layer.own.sealed_tokens) == round_up(20_000 - at - 256)
        assert layer.nbytes - layer.own.sealed_bytes <= round_up(128 + 512) * 2 * 2 * 64 * 4
    assert layer.own.num_to_encode(RawWindow(4, 128)) == 0
    after_k, after_v = segments_to_arrays(layer.segments(), k.dtype)
    for before, after in ((k, after_k), (v, after_v)):
        assert after.shape[2] == 19_968
        assert distance(after, mx.tile(before, (1, 1, 78, 1))) < 1
        assert distance(after[:, :, -128:], before[:, :, -128:]) == 0


def test_raw_limit_does_not_reduce_capacity_without_sealing() -> None:
    layer = FullLayer(2000, raw_tokens=300)
    k, v = random_tokens(2, 1900, 64), random_tokens(2, 1900, 64)
    for at in range(0, 1900, 100):
        layer.append(k[:, :, at : at + 100], v[:, :, at : at + 100])
    layer.grow(50)
    assert layer.own.buffers.capacity >= 2050
    assert mx.array_equal(segments_to_arrays(layer.segments(), k.dtype)[0], k)


def test_encode_past_frees_the_counted_bytes() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    layer = FullLayer(20_000)
    layer.append(random_tokens(2, 20_000, 64), random_tokens(2, 20_000, 64))
    mx.eval(layer.arrays())
    codec = parse_for("planes:8", 64)
    layer.own.encode_past_at_once(codec, codec, RawWindow(4, 0))
    mx.clear_cache()
    assert mx.get_active_memory() - before == pytest.approx(layer.nbytes, rel=0.02)
    assert layer.nbytes < 20_000 * 2 * 64 * 2 * 4 * 0.27


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_batch_of_different_precisions_equals_each_alone(dim: int, half: int) -> None:
    model = tiny_module("qwen3", head_dim=dim, num_hidden_layers=2)
    layout = probe(model)
    fitting = [name for name in NAMES if not (name.startswith("affine") and dim == 80)]
    names = [*islice(cycle(fitting if half == 0 else fitting[::-1]), 7), None]

    def caches() -> list[SequenceCache]:
        made = [prefilled(model, layout, 150 + 20 * i, seed=i) for i in range(len(names))]
        for name, cache in zip(names, made, strict=True):
            if name is not None:
                cache.encode_past([(parse_for(name, dim), parse_for(name, dim))] * len(cache.flat), RawWindow(4, 30))
        # One more of another precision in the same sequence.
        made[5].encode_past(
            [(parse_for("planes:2", dim), parse_for("planes:8", dim))] * len(made[5].flat), RawWindow(4, 3)
        )
        return made

    alone, together = caches(), caches()
    batch = BatchCache(together)
    for step in range(6):
        tokens = [(7 * step + i) % VOCAB for i in range(len(names))]
        logits = model(mx.array(tokens)[:, None], cache=batch.begin_step())[:, -1]
        batch.end_step()
        mx.eval(logits, batch.states())
        for i, cache in enumerate(alone):
            wanted = model(mx.array([[tokens[i]]]), cache=cache.caches())[:, -1]
            cache.end_pass(1)
            assert distance(logits[i : i + 1], wanted) < 1e-4


def test_sequences_share_a_sealed_segment_without_copies() -> None:
    owner = FullLayer(8192)
    owner.append(random_tokens(2, 8192, 64), random_tokens(2, 8192, 64))
    codec = parse_for("planes:8", 64)
    owner.own.encode_past_at_once(codec, codec, RawWindow(0, 0))
    shared: tuple[SealedSegment, ...] = owner.own.sealed
    mx.clear_cache()
    before = mx.get_active_memory()
    rows = [FullLayer(16, shared) for _ in range(8)]
    for row in rows:
        row.append(random_tokens(2, 1, 64), random_tokens(2, 1, 64))
        mx.eval(row.arrays())
    assert [row.offset for row in rows] == [8193] * 8
    tail_bytes = 16 * 2 * (64 + 64) * 4
    assert mx.get_active_memory() - before == pytest.approx(8 * tail_bytes, rel=0.02)
