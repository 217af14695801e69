"""A chunk of one prompt and the tokens of streams in one pass: each has the logits that it has alone."""

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
from tests.kv.test_layers_same_output import TOLERANCE, steady_module
from tests.tiny import ARCHITECTURES, VOCAB

MIXING = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gemma4_text", "gpt_oss")
STREAM_TOKENS = 45  # past the window of 32


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def alone(model: Any, tokens: list[int]) -> mx.array:  # [tokens, vocab]
    """With mlx-lm's own caches."""
    return model(mx.array([tokens]), cache=make_prompt_cache(model))[0]


def prefilled(model: Any, layout: Layout, tokens: list[int], prefix: Prefix | None = None) -> SequenceCache:
    cache = SequenceCache(layout, model, 300, prefix)
    new = tokens[cache.num_tokens :]
    model(mx.array([new]), cache=cache.caches())
    cache.end_pass(len(new))
    mx.eval(cache.arrays())
    return cache


def run(model: Any, chunk: SequenceCache, tokens: list[int], rows: list[SequenceCache], inputs: list[int]) -> mx.array:
    return run_all(model, [(chunk, tokens)], rows, inputs)


def run_all(
    model: Any, chunks: list[tuple[SequenceCache, list[int]]], rows: list[SequenceCache], inputs: list[int]
) -> mx.array:
    mixed = MixedPass([(cache, len(tokens)) for cache, tokens in chunks], BatchCache(rows) if rows else None)
    tokens = [token for _, tokens in chunks for token in tokens]
    logits = model(mx.array([*tokens, *inputs])[:, None], cache=mixed.begin())
    mixed.end()
    mx.eval(logits, [cache.arrays() for cache, _ in chunks])
    return logits[:, -1]


def distance(a: mx.array, b: mx.array) -> float:
    value = mx.abs(a - b).max().item()
    assert isinstance(value, float)
    return value


def test_which_architectures_mix() -> None:
    assert {name for name in ARCHITECTURES if probe(steady_module(name)).mixes} == set(MIXING)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma4_text"])
@pytest.mark.parametrize("num_streams", [1, 3])
def test_each_has_the_output_that_it_has_alone(architecture: str, num_streams: int) -> None:
    model = steady_module(architecture)
    layout = probe(model)
    prompt, streams = ids(0, 120), [ids(1 + i, STREAM_TOKENS + 7 * i + 20) for i in range(num_streams)]
    wanted = [alone(model, tokens) for tokens in streams]
    rows = [prefilled(model, layout, tokens[:-20]) for tokens in streams]
    chunked = SequenceCache(layout, model, 300)
    start = 0
    for step, size in enumerate([1, 7, 40, 2, 30, 39]):
        places = [len(tokens) - 20 + step for tokens in streams]
        inputs = [tokens[place] for tokens, place in zip(streams, places, strict=True)]
        logits = run(model, chunked, prompt[start : start + size], rows, inputs)
        start += size
        # The output layer ran for the streams alone.
        assert logits.shape[0] == num_streams
        expected = mx.stack([w[place] for w, place in zip(wanted, places, strict=True)])
        assert distance(logits, expected) <= TOLERANCE
    last = model(mx.array([prompt[start:]]), cache=chunked.caches())[0, -1]
    assert distance(last, alone(model, prompt)[-1]) <= TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma4_text"])
@pytest.mark.parametrize("num_streams", [0, 2])
def test_prompts_that_share_a_pass_have_the_output_that_each_has_alone(architecture: str, num_streams: int) -> None:
    model = steady_module(architecture)
    layout = probe(model)
    prompts = [ids(10 + i, count) for i, count in enumerate((70, 41, 3))]
    streams = [ids(1 + i, STREAM_TOKENS + 7 * i) for i in range(num_streams)]
    wanted = [alone(model, tokens) for tokens in streams]
    rows = [prefilled(model, layout, tokens[:-2]) for tokens in streams]
    chunked = [SequenceCache(layout, model, 300) for _ in prompts]
    for step in range(2):
        # All but the last token of each, in two passes; the shortest is done with the first.
        chunks = [
            (cache, prompt[cache.num_tokens : len(prompt) - 1 if step else max(2, len(prompt) // 2)])
            for cache, prompt in zip(chunked, prompts, strict=True)
            if cache.num_tokens < len(prompt) - 1
        ]
        logits = run_all(model, chunks, rows, [tokens[-2 + step] for tokens in streams])
        for number, tokens in enumerate(streams):
            assert distance(logits[number], wanted[number][len(tokens) - 2 + step]) <= TOLERANCE
    for cache, prompt in zip(chunked, prompts, strict=True):
        last = model(mx.array([prompt[-1:]]), cache=cache.caches())[0, -1]
        assert distance(last, alone(model, prompt)[-1]) <= TOLERANCE


class Reader:
    """The first tokens of a sequence that runs, as another goes on from them."""

    def __init__(self, layer: FullLayer, num_tokens: int) -> None:
        self._layer = layer
        self.num_tokens = num_tokens

    @property
    def version(self) -> Hashable:
        return self._layer.own.buffers.version

    def segments(self) -> tuple[Any, ...]:
        return self._layer.own.segments(0, self.num_tokens)


def reading(owner: SequenceCache, num_tokens: int) -> Prefix:
    sources = tuple((Reader(layer, num_tokens),) for layer in owner.flat)
    return Prefix(num_tokens, sources, (None,) * len(sources))


@pytest.mark.parametrize("chunk_reads", [True, False])
def test_one_goes_on_from_what_the_other_writes(chunk_reads: bool) -> None:
    """A prompt that shares a stream's beginning, and a stream that shares that of a prompt still to be computed."""
    model = steady_module("llama")
    layout = probe(model)
    shared = ids(0, 40)
    prompt, stream = shared + ids(1, 60), shared + ids(2, 30)
    if chunk_reads:
        row = prefilled(model, layout, stream[:-10])
        chunked = SequenceCache(layout, model, 300, reading(row, len(shared)))
    else:
        chunked = prefilled(model, layout, shared)
        row = prefilled(model, layout, stream[:-10], reading(chunked, len(shared)))
    wanted = alone(model, stream)
    for step in range(5):
        start = len(shared) + 10 * step
        place = len(stream) - 10 + step
        before = mx.get_active_memory()
        logits = run(model, chunked, prompt[start : start + 10], [row], [stream[place]])
        assert distance(logits[0], wanted[place]) <= TOLERANCE
        del logits
        if step:  # the first one allocates
            assert mx.get_active_memory() - before < 4096, "a buffer was copied"
    rest = model(mx.array([prompt[len(shared) + 50 :]]), cache=chunked.caches())[0, -1]
    assert distance(rest, alone(model, prompt)[-1]) <= TOLERANCE


def test_stock_attention_over_a_mixed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels of ours, as on Metal."""
    monkeypatch.setattr("kvstrata.attention.cpu.step.available", lambda: False)
    test_one_goes_on_from_what_the_other_writes(chunk_reads=True)
    test_one_goes_on_from_what_the_other_writes(chunk_reads=False)
    test_each_has_the_output_that_it_has_alone("gpt_oss", 3)


def test_keys_of_a_mixed_layer_are_those_that_were_written() -> None:
    model = steady_module("llama")
    layout = probe(model)
    row, chunked = prefilled(model, layout, ids(0, 9)), SequenceCache(layout, model, 50)
    first = MixedPass([(chunked, 4)], BatchCache([row])).begin()[0]
    keys, _ = first.update_and_fetch(mx.zeros((5, 2, 1, 16)), mx.zeros((5, 2, 1, 16)))
    assert first.keys_and_values() == (keys, keys)
    (chunk,) = keys.chunks
    assert isinstance(chunk.kv, SegmentedKV)
    with pytest.raises(ValueError, match="single tokens"):
        first.make_mask(2)
