"""Mixed passes: chunks of prompts and decode rows in one pass, compared with each sequence alone."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvstrata.attention.segments import SegmentedKV
from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.layout import Layout
from kvstrata.kv.mixed_pass import MixedPass
from kvstrata.kv.sequence_cache import Prefix, SequenceCache
from kvstrata.models.probe import probe
from tests.kv.test_batch_cache import TOLERANCE
from tests.support.models import ARCHITECTURES, VOCAB, steady_module

MIXING = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "gpt_oss")
REPLY_TOKENS = 45  # past the window of 32


def random_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def logits_of_mlx_lm(model: Any, tokens: list[int]) -> mx.array:  # [tokens, vocab]
    """Return the logits of mlx-lm's own caches."""
    return model(mx.array([tokens]), cache=make_prompt_cache(model))[0]


def prefilled(model: Any, layout: Layout, tokens: list[int], prefix: Prefix | None = None) -> SequenceCache:
    cache = SequenceCache(layout, model, 300, prefix)
    new = tokens[cache.num_tokens :]
    model(mx.array([new]), cache=cache.caches())
    cache.end_pass(len(new))
    mx.eval(cache.arrays())
    return cache


def run_chunk(
    model: Any, chunk: SequenceCache, tokens: list[int], rows: list[SequenceCache], inputs: list[int]
) -> mx.array:
    return run_chunks(model, [(chunk, tokens)], rows, inputs)


def run_chunks(
    model: Any, chunks: list[tuple[SequenceCache, list[int]]], rows: list[SequenceCache], inputs: list[int]
) -> mx.array:
    mixed = MixedPass([(cache, len(tokens)) for cache, tokens in chunks], BatchCache(rows) if rows else None)
    tokens = [token for _, tokens in chunks for token in tokens]
    logits = model(mx.array([*tokens, *inputs])[:, None], cache=mixed.begin())
    mixed.end()
    # Without rows nothing reads the logits, which are empty: MLX crashes on some empty arrays on CUDA.
    mx.eval(logits if rows else [], [cache.arrays() for cache, _ in chunks])
    return logits[:, -1]


def distance(a: mx.array, b: mx.array) -> float:
    value = mx.abs(a - b).max().item()
    assert isinstance(value, float)
    return value


def test_probe_allows_mixed_passes_for_attention_only_models() -> None:
    assert {name for name in ARCHITECTURES if probe(steady_module(name)).mixes} == set(MIXING)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma4_text"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_chunk_and_decode_rows_have_the_logits_alone(architecture: str, num_rows: int) -> None:
    model = steady_module(architecture)
    layout = probe(model)
    prompt, replies = random_ids(0, 120), [random_ids(1 + i, REPLY_TOKENS + 7 * i + 20) for i in range(num_rows)]
    wanted = [logits_of_mlx_lm(model, tokens) for tokens in replies]
    rows = [prefilled(model, layout, tokens[:-20]) for tokens in replies]
    chunked = SequenceCache(layout, model, 300)
    start = 0
    for step, size in enumerate([1, 7, 40, 2, 30, 39]):
        places = [len(tokens) - 20 + step for tokens in replies]
        inputs = [tokens[place] for tokens, place in zip(replies, places, strict=True)]
        logits = run_chunk(model, chunked, prompt[start : start + size], rows, inputs)
        start += size
        # The output layer ran for the decode rows only.
        assert logits.shape[0] == num_rows
        expected = mx.stack([w[place] for w, place in zip(wanted, places, strict=True)])
        assert distance(logits, expected) <= TOLERANCE
    last = model(mx.array([prompt[start:]]), cache=chunked.caches())[0, -1]
    assert distance(last, logits_of_mlx_lm(model, prompt)[-1]) <= TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma4_text"])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_chunks_that_share_a_pass_have_the_logits_alone(architecture: str, num_rows: int) -> None:
    model = steady_module(architecture)
    layout = probe(model)
    prompts = [random_ids(10 + i, count) for i, count in enumerate((70, 41, 3))]
    replies = [random_ids(1 + i, REPLY_TOKENS + 7 * i) for i in range(num_rows)]
    wanted = [logits_of_mlx_lm(model, tokens) for tokens in replies]
    rows = [prefilled(model, layout, tokens[:-2]) for tokens in replies]
    chunked = [SequenceCache(layout, model, 300) for _ in prompts]
    for step in range(2):
        # All but the last token of each, in two passes. The shortest is done after the first.
        chunks = [
            (cache, prompt[cache.num_tokens : len(prompt) - 1 if step else max(2, len(prompt) // 2)])
            for cache, prompt in zip(chunked, prompts, strict=True)
            if cache.num_tokens < len(prompt) - 1
        ]
        logits = run_chunks(model, chunks, rows, [tokens[-2 + step] for tokens in replies])
        for number, tokens in enumerate(replies):
            assert distance(logits[number], wanted[number][len(tokens) - 2 + step]) <= TOLERANCE
    for cache, prompt in zip(chunked, prompts, strict=True):
        last = model(mx.array([prompt[-1:]]), cache=cache.caches())[0, -1]
        assert distance(last, logits_of_mlx_lm(model, prompt)[-1]) <= TOLERANCE


class LivePrefix:
    """The first tokens of a running sequence, as the source of another sequence."""

    def __init__(self, layer: FullLayer, num_tokens: int) -> None:
        self._layer = layer
        self.num_tokens = num_tokens

    @property
    def version(self) -> Hashable:
        return self._layer.own.buffers.version

    def segments(self) -> tuple[Any, ...]:
        return self._layer.own.segments(0, self.num_tokens)


def live_prefix(owner: SequenceCache, num_tokens: int) -> Prefix:
    sources = tuple((LivePrefix(layer, num_tokens),) for layer in owner.flat)
    return Prefix(num_tokens, sources, (None,) * len(sources))


@pytest.mark.parametrize("chunk_reads", [True, False])
def test_mixed_pass_over_a_shared_live_prefix_has_the_logits_alone(chunk_reads: bool) -> None:
    """The chunk reads a prefix that the decode row's sequence owns, or the decode row one that the chunk's owns."""
    model = steady_module("llama")
    layout = probe(model)
    shared = random_ids(0, 40)
    prompt, reply = shared + random_ids(1, 60), shared + random_ids(2, 30)
    if chunk_reads:
        row = prefilled(model, layout, reply[:-10])
        chunked = SequenceCache(layout, model, 300, live_prefix(row, len(shared)))
    else:
        chunked = prefilled(model, layout, shared)
        row = prefilled(model, layout, reply[:-10], live_prefix(chunked, len(shared)))
    wanted = logits_of_mlx_lm(model, reply)
    for step in range(5):
        start = len(shared) + 10 * step
        place = len(reply) - 10 + step
        before = mx.get_active_memory()
        logits = run_chunk(model, chunked, prompt[start : start + 10], [row], [reply[place]])
        assert distance(logits[0], wanted[place]) <= TOLERANCE
        del logits
        if step:  # the first one allocates
            assert mx.get_active_memory() - before < 4096, "a buffer was copied"
    rest = model(mx.array([prompt[len(shared) + 50 :]]), cache=chunked.caches())[0, -1]
    assert distance(rest, logits_of_mlx_lm(model, prompt)[-1]) <= TOLERANCE


def test_mixed_pass_without_cpu_kernels_has_the_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Metal, where MLX's operations run."""
    monkeypatch.setattr("kvstrata.attention.cpu.step.available", lambda: False)
    test_mixed_pass_over_a_shared_live_prefix_has_the_logits_alone(chunk_reads=True)
    test_mixed_pass_over_a_shared_live_prefix_has_the_logits_alone(chunk_reads=False)
    test_chunk_and_decode_rows_have_the_logits_alone("gpt_oss", 3)


def test_mixed_layer_returns_the_written_keys_and_refuses_long_masks() -> None:
    model = steady_module("llama")
    layout = probe(model)
    row, chunked = prefilled(model, layout, random_ids(0, 9)), SequenceCache(layout, model, 50)
    first = MixedPass([(chunked, 4)], BatchCache([row])).begin()[0]
    keys, _ = first.update_and_fetch(mx.zeros((5, 2, 1, 16)), mx.zeros((5, 2, 1, 16)))
    assert first.keys_and_values() == (keys, keys)
    (chunk,) = keys.chunks
    assert isinstance(chunk.kv, SegmentedKV)
    with pytest.raises(ValueError, match="single tokens"):
        first.make_mask(2)
