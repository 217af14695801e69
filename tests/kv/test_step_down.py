"""Stepping planes down from 8 to 4 to 2 bits: no copies of remaining planes, and the values of direct encoding."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvstrata.bench
from kvstrata.bench.quality import kl_of, logprobs_of
from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import take_checkpoint
from kvstrata.kv.precision_plan import make_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange, prefix_of
from kvstrata.kv.transcode import transcode_checkpoints, transcode_layer
from kvstrata.models.load import LoadedModel
from kvstrata.models.probe import probe
from kvstrata.text.tokenizer import encode_prompt
from tests.kv.drive import address, distance, random_kv, random_span, sealed_span, text_for
from tests.support.memory import active_bytes

SAMPLE = Path(kvstrata.bench.__file__).parent / "sample.txt"


def transcode_all(span: Span, k: str, v: str) -> None:
    plan = make_plan(span.layout, parse(k), parse(v))
    for layer in span.layers:
        transcode_layer(span, layer, plan.pairs[layer])
    list(transcode_checkpoints(span, plan))


def plane_addresses(span: Span) -> dict[str, int]:
    segment = span.sealed(0)[0]
    sides = (("k", segment.k), ("v", segment.v))
    return {f"{side}.{name}": address(array) for side, encoded in sides for name, array in encoded.arrays.items()}


def test_step_down_keeps_buffers_of_remaining_planes_and_frees_the_others() -> None:
    before = active_bytes()
    span = random_span(20_000, "planes:8")
    for k, v in (
        ("planes:8", "planes:4"),
        ("planes:4", "planes:4"),
        ("planes:4", "planes:2"),
        ("planes:2", "planes:2"),
    ):
        held, allocated, where = span.kv_bytes, active_bytes(), plane_addresses(span)
        transcode_all(span, k, v)
        freed = held - span.kv_bytes
        assert freed > 0
        assert allocated - active_bytes() == pytest.approx(freed, rel=0.02)
        assert plane_addresses(span).items() < where.items()
    assert active_bytes() - before == pytest.approx(span.kv_bytes, rel=0.02)


@pytest.mark.parametrize("name", ["planes:4", "planes:2"])
def test_step_down_equals_direct_encoding(name: str) -> None:
    stepped, direct = random_span(700, "planes:8"), random_span(700, name)
    transcode_all(stepped, "planes:4", "planes:4")
    transcode_all(stepped, name, name)
    like = random_kv(1)[0]
    for a, b in zip(stepped.sealed(0)[0].dense(like.dtype), direct.sealed(0)[0].dense(like.dtype), strict=True):
        assert distance(a, b) == 0


def test_readers_read_stepped_down_segments_at_their_next_step() -> None:
    text = text_for("qwen3")
    owner = SequenceCache(text.layout, text.model, 100)
    text.advance(owner, 100)
    span = sealed_span(text.layout, owner)
    transcode_all(span, "planes:8", "planes:8")

    def resumed() -> SequenceCache:
        prefix = prefix_of(text.layout, [SpanRange(span, 0, 90)], None)
        return SequenceCache(text.layout, text.model, 20, prefix)

    reader = resumed()
    before = active_bytes()
    held = span.kv_bytes
    for token in text.ids[90:95]:
        text.model(mx.array([[token]]), cache=reader.caches())
        reader.end_pass(1)
    transcode_all(span, "planes:4", "planes:4")
    later = resumed()
    for layer, other in zip(later.flat, reader.flat, strict=True):
        # The reader's own tokens, so that both attend to the same tokens.
        k, v = (array[:, :, :5] for array in other.arrays())
        layer.append(k, v)
    later.end_pass(5)
    tokens = mx.array([[text.ids[95]]])
    assert distance(text.model(tokens, cache=reader.caches()), text.model(tokens, cache=later.caches())) < 1e-4
    reader.end_pass(1)
    # The reader has released the replaced segments.
    assert held - span.kv_bytes > 0
    assert active_bytes() - before < reader.nbytes + later.nbytes


def test_step_down_shrinks_windows_in_checkpoints() -> None:
    text = text_for("gemma3_text")
    cache = SequenceCache(text.layout, text.model, 60)
    text.advance(cache, 60)
    span = sealed_span(text.layout, cache)
    span.checkpoints[60] = take_checkpoint(cache)
    sizes = []
    for name in ("raw", "planes:8", "planes:4", "planes:2"):
        transcode_all(span, name, name)
        sizes.append(span.checkpoint_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_step_down_has_the_kl_of_direct_encoding(default_model: LoadedModel) -> None:
    """On the default model, over forced tokens of a text after a cached prefix."""
    ids = encode_prompt(default_model.tokenizer, SAMPLE.read_text(encoding="utf-8"))[:120]
    model, layout = default_model.module, probe(default_model.module)
    prompt, fed = ids[:104], ids[104:]
    cache = SequenceCache(layout, model, len(prompt))
    model(mx.array([prompt]), cache=cache.caches())
    cache.end_pass(len(prompt))

    def stored_as(names: tuple[str, ...]) -> Span:
        span = sealed_span(layout, cache)
        for name in names:
            transcode_all(span, name, name)
        return span

    def logprobs(span: Span) -> np.ndarray:
        cache = SequenceCache(layout, model, len(fed), prefix_of(layout, [SpanRange(span, 0, len(prompt))], None))
        return logprobs_of(model(mx.array([fed]), cache=cache.caches())[0])

    reference = logprobs(stored_as(("raw",)))
    for path, direct in ((("planes:8", "planes:4"), "planes:4"), (("planes:8", "planes:4", "planes:2"), "planes:2")):
        stepped_kl = kl_of(reference, logprobs(stored_as(path))).mean()
        direct_kl = kl_of(reference, logprobs(stored_as((direct,)))).mean()
        assert direct_kl > 1e-4
        assert stepped_kl == pytest.approx(direct_kl, rel=0.05)
