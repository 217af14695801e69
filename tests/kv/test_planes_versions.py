"""Version 1 of planes, with plain means of keys, beside version 2, with RoPE-aware means."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from kvstrata.attention.dispatch import segments_to_arrays
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.registry import parse
from kvstrata.kv.layout import Layout
from kvstrata.kv.packing import join_blocks, unpack
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import becomes, is_transcoded, transcode_layer
from kvstrata.prefix_cache.jobs import run_to_end
from kvstrata.tiers.block import BlockContent
from tests.codecs.arrays import some_rotation
from tests.kv.drive import LAYOUT, distance, packed, random_span, sealed_span, text_for

ROTATION = some_rotation("halves", 64)
ROPE_LAYOUT = Layout((replace(LAYOUT.layers[0], k_rotation=ROTATION),))


def with_rotation(span: Span) -> Span:
    """Return the same memory in a layout with a RoPE rotation of keys."""
    return Span(ROPE_LAYOUT, span.position, span.num_tokens, {0: span.sealed(0)})


def transcoded(span: Span, name: str, *, upward: bool = False) -> PlanesCodec:
    transcode_layer(span, 0, make_plan(span.layout, parse(name), parse(name)).pairs[0], upward=upward)
    codec = span.sealed(0)[0].k.codec
    assert isinstance(codec, PlanesCodec)
    return codec


def test_plan_gives_keys_the_rotation_of_their_layer() -> None:
    k, v = make_plan(ROPE_LAYOUT, parse("planes:4"), parse("planes:8")).pairs[0]
    assert (k, v) == (PlanesCodec(4, ROTATION), PlanesCodec(8))
    assert make_plan(ROPE_LAYOUT, parse("affine:4"), parse("raw")).pairs[0][0].name == "affine:4"


@pytest.mark.parametrize("upward", [False, True])
def test_transcode_keeps_plain_means_of_planes(upward: bool) -> None:
    span = with_rotation(random_span(700, "planes:8"))
    arrays = span.sealed(0)[0].k.arrays
    assert is_transcoded(span, 0, make_plan(ROPE_LAYOUT, parse("planes:8"), parse("planes:8")).pairs[0], upward=upward)
    assert transcoded(span, "planes:4", upward=upward) == PlanesCodec(4)
    assert all(span.sealed(0)[0].k.arrays[name] is arrays[name] for name in ("top", "next", "scales", "means"))


def test_transcode_of_other_codecs_makes_rope_aware_means() -> None:
    assert transcoded(with_rotation(random_span(700, "raw")), "planes:8") == PlanesCodec(8, ROTATION)
    # With more bits it is decoded and encoded again, because a client asked for it.
    assert transcoded(with_rotation(random_span(700, "planes:4")), "planes:8", upward=True) == PlanesCodec(8, ROTATION)


def test_becomes_lowers_bits_and_keeps_the_means() -> None:
    def found(held: PlanesCodec, wanted: PlanesCodec) -> PlanesCodec:
        codec = becomes(held, wanted, 64, mx.float32)
        assert isinstance(codec, PlanesCodec)
        return codec

    assert found(PlanesCodec(8), PlanesCodec(4, ROTATION)) == PlanesCodec(4)
    assert found(PlanesCodec(8, ROTATION), PlanesCodec(4)) == PlanesCodec(4, ROTATION)
    assert found(PlanesCodec(4), PlanesCodec(8, ROTATION)) == PlanesCodec(4)


def blocks_of(span: Span) -> BlockContent:
    block = packed(span, span.position, span.end)
    return BlockContent(block.tensors, json.loads(json.dumps(block.description)))


def test_blocks_of_both_versions_unpack_and_join() -> None:
    old = with_rotation(random_span(300, "planes:8"))
    new = with_rotation(random_span(300, "raw", position=300, seed=1))
    transcoded(new, "planes:8")
    blocks = [blocks_of(span) for span in (old, new)]
    specs = [each.description["groups"][0]["k"]["spec"] for each in blocks]
    assert [spec["version"] for spec in specs] == [1, 2]
    unpacked = [unpack(ROPE_LAYOUT, each, a, a + 300) for each, a in zip(blocks, (0, 300), strict=True)]
    joined = run_to_end(join_blocks(ROPE_LAYOUT, unpacked, 0, 600))
    assert [segment.k.codec for segment in joined.sealed(0)] == [PlanesCodec(8), PlanesCodec(8, ROTATION)]
    like = mx.zeros(())
    found = segments_to_arrays(joined.segments(0, 0, 600), like.dtype)
    wanted = [segments_to_arrays(span.segments(0, span.position, span.end), like.dtype) for span in (old, new)]
    for side in (0, 1):
        assert distance(found[side], mx.concatenate([pair[side] for pair in wanted], axis=2)) == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_sequence_resumes_from_planes_with_rope_aware_means(architecture: str) -> None:
    """8-bit keys with RoPE-aware means change the logits little."""
    text = text_for(architecture)
    owner = SequenceCache(text.layout, text.model, 130)
    text.advance(owner, 100)
    span = sealed_span(text.layout, owner)
    plan = make_plan(text.layout, parse("planes:8"), parse("planes:8"))
    for layer in span.layers:
        transcode_layer(span, layer, plan.pairs[layer])
    segments = [span.sealed(layer)[0] for layer in span.layers]
    codecs = {side.codec for segment in segments for side in (segment.k, segment.v)}
    assert any(isinstance(codec, PlanesCodec) and codec.rotation is not None for codec in codecs)
    if text.layout.batching == "batched" and architecture == "llama":
        reader = SequenceCache(text.layout, text.model, 40, prefix_of(text.layout, [SpanRange(span, 0, 100)], None))
        logits = text.model(mx.array([text.ids[100:130]]), cache=reader.caches())[0]
        wanted = text.wanted[100:130]
        assert distance(logits, wanted) < 0.05 * float(mx.std(wanted)) + 0.01
