"""Memory of spans: their byte counts equal MLX's allocations, and no step copies a buffer that a sequence writes."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.attention.segments import SealedSegment
from kvstrata.codecs.registry import parse
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.checkpoints import take_checkpoint
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.precision_plan import RAW, make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import shrink, transcode_checkpoints, transcode_layer
from kvstrata.models.probe import probe
from tests.kv.drive import (
    LAYOUT,
    TOKEN_BYTES,
    address,
    distance,
    filled_layer,
    forward,
    live_span_of,
    random_kv,
    random_span,
    sealed_span,
    text_for,
)
from tests.support.memory import active_bytes, peak_bytes
from tests.support.models import VOCAB, tiny_module

CODECS = ["raw", "affine:4", "planes:8", "planes:4", "planes:2"]
OWNED_TOKENS = 6000
NUM_STEPS = 4


# A span that is shared while its owner writes.


def model_of_wide_heads() -> Any:
    return tiny_module("qwen3", head_dim=64, num_hidden_layers=2)


def with_random_past(cache: SequenceCache, num_tokens: int) -> SequenceCache:
    for i, layer in enumerate(cache.flat):
        layer.append(*random_kv(num_tokens, seed=i))
    cache.end_pass(num_tokens)
    mx.eval(cache.arrays())
    return cache


def step_together(model: Any, batch: BatchCache, tokens: list[int]) -> mx.array:
    logits = model(mx.array(tokens)[:, None], cache=batch.begin_step())[:, -1]
    batch.end_step()
    mx.eval(logits, batch.states())
    return logits


def step_in_turn(model: Any, caches: Sequence[SequenceCache], tokens: Sequence[int]) -> mx.array:
    return mx.concatenate([forward(model, cache, [token]) for cache, token in zip(caches, tokens, strict=True)])


def owner_and_reader(model: Any) -> tuple[SequenceCache, SequenceCache]:
    layout = probe(model)
    owner = with_random_past(SequenceCache(layout, model, OWNED_TOKENS + 100), OWNED_TOKENS)
    span = sealed_span(layout, owner)
    reader = SequenceCache(layout, model, 100, prefix_of(layout, [SpanRange(span, 0, OWNED_TOKENS - 500)], None))
    return owner, reader


@pytest.mark.usefixtures("attention_path")
@pytest.mark.parametrize("together", [True, False])
def test_live_span_is_read_and_written_without_copying_buffers(together: bool) -> None:
    model = model_of_wide_heads()
    owner, reader = owner_and_reader(model)
    batch = BatchCache([owner, reader])

    def steps() -> None:
        for token in range(NUM_STEPS):
            step_together(model, batch, [token] * 2) if together else step_in_turn(model, [owner, reader], [token] * 2)

    steps()  # the reader's own buffers are allocated by its first token
    before = [address(array) for array in owner.arrays()]
    one_buffer = owner.arrays()[0].nbytes
    assert peak_bytes(steps) < one_buffer / 4
    assert [address(array) for array in owner.arrays()] == before


@pytest.mark.usefixtures("attention_path")
def test_reader_of_a_live_span_has_the_logits_of_a_full_sequence() -> None:
    model = model_of_wide_heads()
    owner, reader = owner_and_reader(model)
    alone = SequenceCache(probe(model), model, OWNED_TOKENS)
    for layer, other in zip(alone.flat, owner.flat, strict=True):
        k, v = other.arrays()
        layer.append(k[:, :, : reader.start], v[:, :, : reader.start])
    alone.end_pass(reader.start)
    mx.eval(alone.arrays())
    batch = BatchCache([owner, reader])
    for token in range(NUM_STEPS):
        logits = step_together(model, batch, [50 - token, token])
        assert distance(logits[1:], forward(model, alone, [token])) < 1e-4


@pytest.mark.parametrize("names", [("planes:8", "planes:2"), ("affine:8", "affine:4")])
def test_batch_over_spans_of_different_precisions_has_the_logits_alone(names: tuple[str, str]) -> None:
    """One owner that writes and seven readers, after two sealed spans: no buffer is copied."""
    model = model_of_wide_heads()
    layout = probe(model)
    spans = [span_of(model, at, name) for at, name in zip((0, 600), names, strict=True)]
    ranges = [SpanRange(spans[0], 0, 600), SpanRange(spans[1], 600, 1000)]
    owner_prefix = prefix_of(layout, ranges, None)

    def caches() -> list[SequenceCache]:
        owner = with_random_past(SequenceCache(layout, model, OWNED_TOKENS + 20, owner_prefix), OWNED_TOKENS)
        span = sealed_span(layout, owner)
        ends = [1000 + OWNED_TOKENS - 700 * i for i in range(7)]
        runs = [[*ranges, SpanRange(span, 1000, end)] for end in ends]
        return [owner, *(SequenceCache(layout, model, 20, prefix_of(layout, run, None)) for run in runs)]

    together, alone = caches(), caches()
    batch = BatchCache(together)
    rng = random.Random(1)
    for _ in range(NUM_STEPS):
        tokens = [rng.randrange(VOCAB) for _ in together]
        assert distance(step_together(model, batch, tokens), step_in_turn(model, alone, tokens)) < 1e-4
    # A copy would have another address. Scratch is ignored, because affine KV is decoded for the step.
    before = [address(array) for array in together[0].arrays()]
    step_together(model, batch, [1] * 8)
    assert [address(array) for array in together[0].arrays()] == before


def span_of(model: Any, position: int, name: str) -> Span:
    """Return a sealed span of 600 random tokens from `position` on."""
    layout = probe(model)
    plan = make_plan(layout, parse(name), parse(name))
    held: dict[int, Any] = {}
    for layer, (k_codec, v_codec) in enumerate(plan.pairs):
        k, v = (array.squeeze(0) for array in random_kv(600, seed=position + layer))
        held[layer] = (SealedSegment(k_codec.encode(k, position), v_codec.encode(v, position)),)
    return Span(layout, position, 600, held)


# A sequence ends.


def test_exactly_filled_buffer_is_adopted_by_the_span() -> None:
    layer = filled_layer(100, capacity=100)
    before = [address(array) for array in layer.arrays()]
    span = live_span_of(layer)
    transcode_layer(span, 0, RAW)
    segment = span.sealed(0)[0]
    assert [address(array) for array in segment.arrays()] == before
    assert span.kv_bytes == 100 * TOKEN_BYTES


@pytest.mark.parametrize("name", CODECS)
def test_larger_buffer_is_trimmed_and_freed(name: str) -> None:
    before = active_bytes()
    span = live_span_of(filled_layer(5000, capacity=20_000))
    transcode_layer(span, 0, make_plan(LAYOUT, parse(name), parse(name)).pairs[0])
    assert active_bytes() - before == pytest.approx(span.kv_bytes, rel=0.02)
    assert span.kv_bytes <= 5000 * TOKEN_BYTES


def test_transcode_joins_buffers_to_one_segment() -> None:
    layer = filled_layer(100, capacity=100)
    layer.grow(200)
    layer.append(*random_kv(50, seed=1))
    before = [array for segment in layer.segments() for array in (segment.dense(random_kv(1)[0].dtype))]
    span = live_span_of(layer)
    transcode_layer(span, 0, RAW)
    k, v = span.sealed(0)[0].dense(random_kv(1)[0].dtype)
    assert distance(k, mx.concatenate(before[::2], axis=2)) == 0
    assert distance(v, mx.concatenate(before[1::2], axis=2)) == 0


def test_transcode_of_an_empty_span_is_refused() -> None:
    layer = filled_layer(10, capacity=10)
    span = Span(LAYOUT, 0, 0, {0: layer.own})
    with pytest.raises(ValueError, match="0 tokens"):
        transcode_layer(span, 0, RAW)


def test_thousand_transcode_and_cut_cycles_leak_no_memory() -> None:
    pairs = [make_plan(LAYOUT, parse(name), parse(name)).pairs[0] for name in CODECS]

    def cycle(i: int) -> None:
        span = live_span_of(filled_layer(70, capacity=70 + i % 2))
        transcode_layer(span, 0, pairs[i % len(CODECS)])
        span.cut(0, 40)
        shrink(span, 0)

    for i in range(len(CODECS)):
        cycle(i)
    before = active_bytes()
    for i in range(1000):
        cycle(i)
    assert active_bytes() == before


def test_sequences_that_resume_and_end_leak_no_memory() -> None:
    text = text_for("gemma3_text", num_tokens=20)
    layout = text.layout
    plans = [make_plan(layout, parse(name), parse(name)) for name in ("raw", "planes:8")]
    base = SequenceCache(layout, text.model, 12)
    text.advance(base, 12)
    checkpoint = take_checkpoint(base)
    root = sealed_span(layout, base)

    def cycle(i: int) -> None:
        cache = SequenceCache(layout, text.model, 4, prefix_of(layout, [SpanRange(root, 0, 12)], checkpoint))
        forward(text.model, cache, text.ids[12:14])
        span = sealed_span(layout, cache)
        span.checkpoints[14] = take_checkpoint(cache)
        for layer in span.layers:
            transcode_layer(span, layer, plans[i % 2].pairs[layer])
        list(transcode_checkpoints(span, plans[i % 2]))

    for i in range(4):
        cycle(i)
    before = active_bytes()
    for i in range(40):
        cycle(i)
    assert active_bytes() == before


# Cut spans never keep the memory of the whole alive.


@pytest.mark.parametrize("name", ["raw", "affine:4", "planes:8"])
@pytest.mark.parametrize(("start", "end"), [(7, 19_990), (19_000, 20_000)])
def test_shrunk_cut_owns_its_memory(name: str, start: int, end: int) -> None:
    before = active_bytes()
    span = random_span(20_000, name)
    span.cut(start, end)
    shrink(span, 0)
    # A small array may get a freed buffer that is up to two pages larger.
    slack = 0 if end - start > 10_000 else 2 * mmap.PAGESIZE * len(span.sealed(0)[0].arrays())
    assert active_bytes() - before == pytest.approx(span.kv_bytes, rel=0.02, abs=slack)
    assert span.kv_bytes < (end - start) * TOKEN_BYTES * 1.01


def test_joined_span_frees_the_memory_of_its_sources() -> None:
    before = active_bytes()
    first, second = random_span(3000, "planes:4"), random_span(2000, "planes:4", position=3000)
    first.append(second)
    del second
    held = first.kv_bytes
    assert active_bytes() - before == pytest.approx(held, rel=0.02)
    transcode_layer(first, 0, make_plan(LAYOUT, parse("planes:4"), parse("planes:4")).pairs[0])
    assert len(first.sealed(0)) == 1
    assert active_bytes() - before == pytest.approx(first.kv_bytes, rel=0.02)
    assert first.kv_bytes <= held


@pytest.mark.parametrize("act", [FullLayer.segments, lambda layer: layer.own.segments(10, 20)])
def test_write_after_a_released_view_copies_no_buffer(act: Callable[[FullLayer], object]) -> None:
    """A kept view would make MLX copy the whole buffer at the owner's next write."""
    layer = filled_layer(10_000, capacity=10_010)
    act(layer)

    def write() -> None:
        layer.append(*random_kv(1))
        mx.eval(layer.arrays())

    assert peak_bytes(write) < layer.nbytes / 20


def test_checkpoint_owns_its_memory() -> None:
    text = text_for("qwen3_next", num_tokens=60)
    cache = SequenceCache(text.layout, text.model, 60)
    text.advance(cache, 50)
    before = active_bytes()
    checkpoint = take_checkpoint(cache)
    assert active_bytes() - before == pytest.approx(checkpoint.nbytes, rel=0.02)
