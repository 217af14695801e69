"""Conversion between mlx-lm's prompt caches and spans: either side resumes from the other's cache."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.base import MismatchedArrays
from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import needs_checkpoints, take_checkpoint
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.mlx_caches import adopt_mlx_lm, to_mlx_lm
from kvstrata.kv.precision_plan import make_plan, raw_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import transcode_layer
from kvstrata.models.probe import probe
from tests.kv.drive import TOLERANCE, Text, address, distance, forward, sealed_span, text_for
from tests.support.memory import active_bytes
from tests.support.models import ARCHITECTURES

MIXED = [50, *[1] * 3, 17]  # a ring that was filled, rotated, refilled
RINGS = ("gemma3_text", "gpt_oss")


def mlx_forward(model: Any, caches: list[Any], tokens: tuple[int, ...]) -> mx.array:
    logits = model(mx.array([tokens]), cache=caches)[0]
    mx.eval(logits)
    return logits


def whole(span: Span) -> list[SpanRange]:
    return [SpanRange(span, 0, span.end)]


def resumed(text: Text, span: Span, capacity: int = 80) -> SequenceCache:
    prefix = prefix_of(text.layout, whole(span), span.checkpoints.get(span.end))
    return SequenceCache(text.layout, text.model, capacity, prefix)


def sealed(text: Text, cache: SequenceCache) -> Span:
    span = sealed_span(text.layout, cache)
    if needs_checkpoints(text.layout):
        span.checkpoints[span.end] = take_checkpoint(cache)
    return span


@pytest.mark.parametrize(
    ("architecture", "chunks"),
    [*((a, MIXED) for a in ARCHITECTURES), *((a, c) for a in RINGS for c in ([70], [20, *[1] * 50], [1] * 70))],
)
def test_sequence_resumes_from_an_adopted_mlx_lm_cache(architecture: str, chunks: list[int]) -> None:
    text = text_for(architecture)
    caches = make_prompt_cache(text.model)
    for start, size in zip(itertools.accumulate(chunks, initial=0), chunks, strict=False):
        mlx_forward(text.model, caches, text.ids[start : start + size])
    span = adopt_mlx_lm(text.layout, caches, 70)
    cache = resumed(text, span)
    text.advance(cache, 71)
    text.advance(cache, 90)
    # mlx-lm's cache continues too: neither sees the other's writes.
    text.check(mlx_forward(text.model, caches, text.ids[70:90]), 70)
    text.advance(resumed(text, span), 100)


@pytest.mark.parametrize(
    ("architecture", "end"), [*((a, 70) for a in ARCHITECTURES), *((a, n) for a in RINGS for n in (9, 31, 32, 33))]
)
def test_mlx_lm_resumes_from_a_converted_span(architecture: str, end: int) -> None:
    text = text_for(architecture)
    cache = SequenceCache(text.layout, text.model, end)
    text.advance(cache, end)
    span = sealed(text, cache)
    for is_sealed in (False, True):
        if is_sealed:
            for layer in span.layers:
                transcode_layer(span, layer, raw_plan(text.layout).pairs[layer])
        caches = to_mlx_lm(text.layout, whole(span), span.checkpoints.get(end))
        assert [type(c) for c in caches] == [type(c) for c in make_prompt_cache(text.model)]
        for start, stop in ((end, end + 1), (end + 1, end + 20), (end + 20, end + 21)):
            text.check(mlx_forward(text.model, caches, text.ids[start:stop]), start)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generate_step_resumes_from_a_converted_span(architecture: str) -> None:
    text = text_for(architecture)
    cache = SequenceCache(text.layout, text.model, 60)
    text.advance(cache, 60)
    span = sealed(text, cache)
    caches = to_mlx_lm(text.layout, whole(span), span.checkpoints.get(60))
    steps = generate_step(mx.array(text.ids[60:66]), text.model, max_tokens=4, prompt_cache=caches)
    wanted = generate_step(mx.array(text.ids[:66]), text.model, max_tokens=4)
    for (_, logprobs), (_, expected) in zip(steps, wanted, strict=True):
        assert distance(logprobs, expected) <= TOLERANCE
    # And back: prompt and reply are in the caches.
    assert adopt_mlx_lm(text.layout, caches, 66 + 4).end == 70


@pytest.mark.parametrize("names", [("raw", "planes:8"), ("planes:4", "planes:8")], ids="-".join)
def test_span_ranges_of_several_precisions_are_decoded_for_mlx_lm(names: tuple[str, str]) -> None:
    text = text_for("qwen3")
    cache = SequenceCache(text.layout, text.model, 90)
    text.advance(cache, 90)
    span = sealed(text, cache)
    for layer, name in zip(span.layers, names, strict=True):
        transcode_layer(span, layer, make_plan(text.layout, parse(name), parse(name)).pairs[layer])
    ranges = [SpanRange(span, 0, 50), SpanRange(span, 50, 80)]
    caches = to_mlx_lm(text.layout, ranges, None)
    ours = SequenceCache(text.layout, text.model, 20, prefix_of(text.layout, ranges, None))
    tokens = text.ids[80:90]
    assert distance(mlx_forward(text.model, caches, tokens), forward(text.model, ours, tokens)) <= TOLERANCE


# Quantized.


def quantized(text: Text, num_tokens: int, bits: int) -> list[Any]:
    caches: list[Any] = [QuantizedKVCache(bits=bits) for _ in text.layout.layers]
    mlx_forward(text.model, caches, text.ids[:num_tokens])
    return caches


def dequantized(caches: list[Any]) -> list[Any]:
    """The same values in full precision."""
    made = []
    for cache in caches:
        plain: Any = KVCache()
        options = {"group_size": cache.group_size, "bits": cache.bits}
        plain.keys, plain.values = (mx.dequantize(*arrays, **options) for arrays in cache.keys_and_values())
        plain.offset = cache.offset
        made.append(plain)
    return made


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_tokens", [70, 256])
def test_sequence_resumes_from_an_adopted_quantized_cache(bits: int, num_tokens: int) -> None:
    """A sequence adds raw tokens to the quantized ones, so the reference does so too."""
    text = text_for("qwen3", num_tokens=280, head_dim=64)
    caches = quantized(text, num_tokens, bits)
    span = adopt_mlx_lm(text.layout, caches, num_tokens)
    assert span.codec_pairs(0)[0][0].name == f"affine:{bits}"
    cache, plain = resumed(text, span), dequantized(caches)
    for start, stop in ((num_tokens, num_tokens + 1), (num_tokens + 1, num_tokens + 20)):
        tokens = text.ids[start:stop]
        got = forward(text.model, cache, tokens)
        assert distance(got, mlx_forward(text.model, plain, tokens)) <= TOLERANCE


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_cache_round_trip_is_bit_exact(bits: int) -> None:
    text = text_for("qwen3", num_tokens=280, head_dim=64)
    caches = quantized(text, 70, bits)
    back = to_mlx_lm(text.layout, whole(adopt_mlx_lm(text.layout, caches, 70)), None)
    assert {type(cache) for cache in back} == {QuantizedKVCache}
    for ours, theirs in zip(back, caches, strict=True):
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert all(mx.array_equal(x, y) for x, y in zip(a, b, strict=True))
    tokens = text.ids[70:90]
    assert distance(mlx_forward(text.model, back, tokens), mlx_forward(text.model, caches, tokens)) <= TOLERANCE


class Rounded(KVCache):
    """The raw values of a segment, then new tokens rounded as in a quantized cache."""

    def __init__(self, segment: SealedSegment, like: Any, num_tokens: int) -> None:
        super().__init__()
        self._options = {"group_size": like.group_size, "bits": like.bits}
        k, v = segment.dense(mx.float32)
        super().update_and_fetch(k[:, :, :num_tokens], v[:, :, :num_tokens])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self._rounded(keys), self._rounded(values))

    def _rounded(self, x: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(x, **self._options), **self._options)


@pytest.mark.parametrize("name", ["affine:8", "affine:4", "affine:4:g32"])
def test_mlx_lm_resumes_from_an_affine_span(name: str) -> None:
    text = text_for("qwen3", num_tokens=280, head_dim=64)
    cache = SequenceCache(text.layout, text.model, 70)
    text.advance(cache, 70)
    span = sealed(text, cache)
    for layer in span.layers:
        transcode_layer(span, layer, make_plan(text.layout, parse(name), parse(name)).pairs[layer])
    for ranges in (whole(span), [SpanRange(span, 0, 30), SpanRange(span, 30, 60)]):
        end = ranges[-1].end
        caches = to_mlx_lm(text.layout, ranges, None)
        reference = [Rounded(span.sealed(layer)[0], caches[0], end) for layer in span.layers]
        for start, stop in ((end, end + 1), (end + 1, end + 9)):
            got = mlx_forward(text.model, caches, text.ids[start:stop])
            assert distance(got, mlx_forward(text.model, reference, text.ids[start:stop])) <= TOLERANCE
    # And generate_step runs on it.
    caches = to_mlx_lm(text.layout, whole(span), None)
    assert len(list(generate_step(mx.array(text.ids[70:75]), text.model, max_tokens=3, prompt_cache=caches))) == 3


def test_different_affine_codecs_of_k_and_v_are_decoded() -> None:
    text = text_for("qwen3", num_tokens=280, head_dim=64)
    cache = SequenceCache(text.layout, text.model, 40)
    text.advance(cache, 40)
    span = sealed(text, cache)
    for layer in span.layers:
        transcode_layer(span, layer, make_plan(text.layout, parse("affine:8"), parse("affine:4")).pairs[layer])
    assert {type(c) for c in to_mlx_lm(text.layout, whole(span), None)} == {KVCache}


# Memory.


def test_full_buffer_is_adopted_and_a_larger_one_trimmed() -> None:
    text = text_for("llama", num_tokens=280)
    caches = make_prompt_cache(text.model)
    mlx_forward(text.model, caches, text.ids[:256])
    span = adopt_mlx_lm(text.layout, caches, 256)
    assert address(span.sealed(0)[0].k.arrays["values"]) == address(caches[0].keys)
    mlx_forward(text.model, caches, text.ids[256:270])
    before = active_bytes()
    longer = adopt_mlx_lm(text.layout, caches, 270)
    assert active_bytes() - before == pytest.approx(longer.kv_bytes, rel=0.02)
    assert longer.kv_bytes == 270 * text.layout.token_bytes


def test_sealed_raw_span_is_converted_without_a_copy() -> None:
    text = text_for("llama")
    cache = SequenceCache(text.layout, text.model, 60)
    text.advance(cache, 60)
    span = sealed(text, cache)
    for layer in span.layers:
        transcode_layer(span, layer, raw_plan(text.layout).pairs[layer])
    caches = to_mlx_lm(text.layout, whole(span), None)
    assert address(caches[0].keys) == address(span.sealed(0)[0].k.arrays["values"])
    mlx_forward(text.model, caches, text.ids[60:70])
    text.advance(resumed(text, span), 70)


# Other kinds.


def test_composite_cache_round_trip_keeps_its_structure() -> None:
    children = (
        LayerSpec("full", kv_heads=1, k_dim=4, v_dim=4),
        LayerSpec("recurrent", num_arrays=2, state_bytes=24),
        LayerSpec("window", max_size=8, keep=2, kv_heads=1, k_dim=4, v_dim=4),
    )
    layout = Layout((children[0], LayerSpec("composite", children=children)))
    first: Any = KVCache()
    full: Any = KVCache()
    ring: Any = RotatingKVCache(8, keep=2)
    state = ArraysCache(2)
    for i in range(13):
        tokens = mx.full((1, 1, 1, 4), float(i))
        for cache in (first, full, ring):
            cache.update_and_fetch(tokens, -tokens)
    state[1] = mx.arange(6.0)[None]
    span = adopt_mlx_lm(layout, [first, CacheList(full, state, ring)], 13)
    back_first, back = to_mlx_lm(layout, whole(span), span.checkpoints[13])
    assert type(back) is CacheList
    assert mx.array_equal(back_first.keys, first.keys[:, :, :13])
    assert mx.array_equal(back[0].values, full.values[:, :, :13])
    assert back[1][0] is None
    assert mx.array_equal(back[1][1], state[1])
    assert back[2].keys[0, 0, :, 0].tolist() == [0, 1, 7, 8, 9, 10, 11, 12]
    for cache in (ring, back[2]):
        cache.update_and_fetch(mx.full((1, 1, 1, 4), 13.0), mx.zeros((1, 1, 1, 4)))
    assert sorted(back[2].keys[0, 0, :, 0].tolist()) == sorted(ring.keys[0, 0, :, 0].tolist())


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("num_tokens", [3, 20, 24, 25, 60])
def test_bounded_window_round_trip_has_the_logits_of_mlx_lm(keep: int, num_tokens: int) -> None:
    """Rings with kept tokens, token by token: in chunks mlx-lm masks the kept ones."""
    text = text_for("llama")
    layout = probe(text.model, max_kv_size=24)
    if keep == 0:
        layout = Layout(tuple(LayerSpec(**{**vars(spec), "keep": 0}) for spec in layout.layers), layout.batching)
    theirs: list[Any] = [RotatingKVCache(24, keep=keep) for _ in layout.layers]
    for token in text.ids[:num_tokens]:
        mlx_forward(text.model, theirs, (token,))
    span = adopt_mlx_lm(layout, theirs, num_tokens)
    checkpoint = span.checkpoints[num_tokens]
    ours = SequenceCache(layout, text.model, 1, prefix_of(layout, whole(span), checkpoint))
    back = to_mlx_lm(layout, whole(span), checkpoint)
    for token in text.ids[num_tokens : num_tokens + 40]:
        wanted = mlx_forward(text.model, theirs, (token,))
        assert distance(forward(text.model, ours, [token]), wanted) <= TOLERANCE
        assert distance(mlx_forward(text.model, back, (token,)), wanted) <= TOLERANCE


def test_mismatched_caches_are_refused_with_a_reason() -> None:
    text = text_for("llama")
    caches = make_prompt_cache(text.model)
    mlx_forward(text.model, caches, text.ids[:10])
    for bad, num_tokens, match in (
        (caches, 11, "holds 10 tokens, not 11"),
        (caches, 0, "nothing to resume from"),
        (caches[:-1], 10, "another model's"),
        ([RotatingKVCache(8), *caches[1:]], 10, "no RotatingKVCache"),
        ([KVCache(), *caches[1:]], 10, "holds 0 tokens"),
    ):
        with pytest.raises(MismatchedArrays, match=match):
            adopt_mlx_lm(text.layout, bad, num_tokens)
    other = text_for("qwen3", num_tokens=280, head_dim=64)
    with pytest.raises(MismatchedArrays, match="another model's"):
        adopt_mlx_lm(other.layout, caches, 10)
    for cache in caches:
        cache.keys, cache.values = (mx.concatenate([array, array]) for array in (cache.keys, cache.values))
    with pytest.raises(MismatchedArrays, match="one at a time"):
        adopt_mlx_lm(text.layout, caches, 10)
