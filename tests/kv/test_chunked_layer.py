"""Chunked attention (llama4), compared with mlx-lm's own cache."""

from __future__ import annotations

import functools
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama4
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache

from kvstrata.codecs.registry import parse
from kvstrata.kv.checkpoints import reaches, take_checkpoint
from kvstrata.kv.chunked_layer import ChunkedLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.mlx_caches import adopt_mlx_lm, to_mlx_lm
from kvstrata.kv.precision_plan import make_plan, raw_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import SpanRange, prefix_of
from kvstrata.kv.transcode import transcode_checkpoints, transcode_layer
from kvstrata.models.probe import probe
from tests.kv.drive import sealed_span
from tests.support.models import VOCAB

CHUNK = 16
NUM_TOKENS = 400
TOLERANCE = 1e-4

TEXT = {
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": CHUNK,
    "head_dim": 16,
    "hidden_size": 64,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vocab_size": VOCAB,
    "floor_scale": 32,  # so that the temperature of its full layers changes within a test
}


@functools.cache
def tiny_llama4() -> tuple[Any, Layout]:
    mx.random.seed(0)
    model = llama4.Model(llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": TEXT}))
    model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model, probe(model)


@functools.cache
def ids() -> tuple[int, ...]:
    rng = random.Random(4)
    return tuple(rng.randrange(VOCAB) for _ in range(NUM_TOKENS))


@functools.cache
def wanted() -> mx.array:  # [tokens, vocab]
    model, _ = tiny_llama4()
    cache = make_prompt_cache(model)
    rows = []
    for start in range(0, NUM_TOKENS, 50):
        rows.append(model(mx.array([ids()[start : start + 50]]), cache=cache)[0])
        mx.eval(rows)
    return mx.concatenate(rows)


def advance(cache: SequenceCache, end: int) -> None:
    model, _ = tiny_llama4()
    start = cache.num_tokens
    logits = model(mx.array([ids()[start:end]]), cache=cache.caches())[0]
    cache.end_pass(end - start)
    mx.eval(logits, cache.arrays())
    assert mx.abs(logits - wanted()[start:end]).max().item() <= TOLERANCE  # pyright: ignore[reportOperatorIssue]


def test_layout_of_llama4_has_chunked_and_full_layers() -> None:
    _, layout = tiny_llama4()
    assert layout.count_by_kind() == {"chunked": 3, "full": 1}
    # The model makes masks from integer offsets, so sequences run one after the other.
    assert layout.batching == "per_sequence"
    assert layout.fixed_bytes == 3 * CHUNK * 2 * 2 * 16 * 4


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40, 64])
def test_chunked_layer_has_the_output_of_mlx_lms_cache(prompt: int) -> None:
    model, layout = tiny_llama4()
    cache = SequenceCache(layout, model, NUM_TOKENS)
    advance(cache, prompt)
    for end in range(prompt + 1, prompt + 60):
        advance(cache, end)
    # Passes of any size, from anywhere in a chunk.
    for size in (2, 15, 1, 16, 17, 5, 50):
        advance(cache, cache.num_tokens + size)


def test_chunked_layer_memory_is_constant_over_hundreds_of_steps() -> None:
    model, layout = tiny_llama4()
    cache = SequenceCache(layout, model, NUM_TOKENS)
    advance(cache, 3)
    chunked = [layer for layer in cache.flat if isinstance(layer, ChunkedLayer)]
    before = [layer.nbytes for layer in chunked]
    assert before == [CHUNK * 2 * 2 * 16 * 4] * 3
    for end in range(4, NUM_TOKENS + 1):
        advance(cache, end)
    assert [layer.nbytes for layer in chunked] == before
    assert {array.shape[2] for layer in chunked for array in layer.arrays()} == {CHUNK}


def test_sequence_resumes_at_checkpoints_and_at_chunk_starts() -> None:
    model, layout = tiny_llama4()
    owner = SequenceCache(layout, model, NUM_TOKENS)
    checkpoints = []
    for end in (10, 32, 57, 80):
        advance(owner, end)
        checkpoints.append(take_checkpoint(owner))
    span = sealed_span(layout, owner)
    reached = {
        checkpoint.position: [at for at in range(1, 81) if reaches(checkpoint, layout, at)]
        for checkpoint in checkpoints
    }
    assert reached[10] == [*range(1, 11)]
    assert reached[32] == [*range(16, 33)]
    assert reached[57] == [16, 32, *range(48, 58)]
    assert reached[80] == [16, 32, 48, *range(64, 81)]
    for is_sealed in (False, True):
        if is_sealed:
            for layer in span.layers:
                transcode_layer(span, layer, raw_plan(layout).pairs[layer])
        for checkpoint in checkpoints:
            for at in {checkpoint.position, reached[checkpoint.position][0], reached[checkpoint.position][-2]}:
                cache = SequenceCache(layout, model, 100, prefix_of(layout, [SpanRange(span, 0, at)], checkpoint))
                advance(cache, at + 1)
                advance(cache, at + 30)


def test_checkpoint_of_chunked_layers_is_transcoded_by_the_plan() -> None:
    model, layout = tiny_llama4()
    cache = SequenceCache(layout, model, 60)
    advance(cache, 60)
    span = sealed_span(layout, cache)
    span.checkpoints[60] = take_checkpoint(cache)
    raw = span.checkpoint_bytes
    assert raw == 3 * 12 * 2 * 2 * 16 * 4
    list(transcode_checkpoints(span, make_plan(layout, parse("planes:8"), parse("planes:8"))))
    assert span.checkpoint_bytes < 0.5 * raw
    resumed = SequenceCache(layout, model, 60, prefix_of(layout, [SpanRange(span, 0, 60)], span.checkpoints[60]))
    model(mx.array([ids()[60:90]]), cache=resumed.caches())


@pytest.mark.parametrize("num_tokens", [7, 16, 30, 32, 57])
def test_chunked_caches_convert_to_mlx_lm_and_back(num_tokens: int) -> None:
    model, layout = tiny_llama4()
    mlx_caches = make_prompt_cache(model)
    model(mx.array([ids()[:5]]), cache=mlx_caches)
    model(mx.array([ids()[5:num_tokens]]), cache=mlx_caches)
    span = adopt_mlx_lm(layout, mlx_caches, num_tokens)
    ranges, checkpoint = [SpanRange(span, 0, num_tokens)], span.checkpoints[num_tokens]
    resumed = SequenceCache(layout, model, 100, prefix_of(layout, ranges, checkpoint))
    advance(resumed, num_tokens + 1)
    advance(resumed, num_tokens + 40)
    back = to_mlx_lm(layout, ranges, checkpoint)
    assert isinstance(back[0], ChunkedKVCache)
    for start, end in ((num_tokens, num_tokens + 1), (num_tokens + 1, num_tokens + 40)):
        logits = model(mx.array([ids()[start:end]]), cache=back)[0]
        assert mx.abs(logits - wanted()[start:end]).max().item() <= TOLERANCE  # pyright: ignore[reportOperatorIssue]
