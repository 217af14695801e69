"""Batches that sequences of different lengths join and leave, compared with each sequence alone."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from kvstrata.kv.batch_cache import BatchCache
from kvstrata.kv.layout import Layout
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.probe import probe
from tests.support.models import ARCHITECTURES, VOCAB, steady_module, tiny_module

NUM_SEQUENCES = 8

TOLERANCE = 1e-4

# A model of each kind of layer, over steps that fill a ring nine times and three buffers. Slow: all models, longer.
QUICK_STEPS = 300

QUICK = [(name, QUICK_STEPS) for name in ("llama", "gemma3_text", "qwen3_next")]

RUNS = [*QUICK, *(pytest.param(name, 1000, marks=pytest.mark.slow) for name in ARCHITECTURES)]


class ForcedSequence:
    """A sequence with a fixed prompt and reply, and the step at which it joins the batch."""

    def __init__(self, rng: random.Random, index: int, num_steps: int, prompt_tokens: int | None = None) -> None:
        self.prompt = [rng.randrange(VOCAB) for _ in range(prompt_tokens or rng.randint(2, 90))]
        # The first runs in all steps; the others join and leave, and for a while all run.
        all_from = num_steps // 3
        self.join = 0 if index == 0 else rng.randrange(all_from)
        self.num_steps = num_steps if index == 0 else rng.randint(all_from + 20, num_steps) - self.join
        self.reply = [rng.randrange(VOCAB) for _ in range(self.num_steps)]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.reply


def expected_logits(model: Any, sequence: ForcedSequence) -> mx.array:  # [steps, vocab]
    """Return the logits of the sequence alone with mlx-lm's own caches."""
    cache = make_prompt_cache(model)
    rows = []
    for start in range(0, len(sequence.ids), 64):
        rows.append(model(mx.array([sequence.ids[start : start + 64]]), cache=cache)[0])
        mx.eval(rows[-1])
    return mx.concatenate(rows)[len(sequence.prompt) - 1 : len(sequence.prompt) - 1 + sequence.num_steps]


def prefilled(model: Any, layout: Layout, sequence: ForcedSequence, buffer_tokens: int) -> SequenceCache:
    """Return a cache with all but the prompt's last token and a buffer for `buffer_tokens` more."""
    cache = SequenceCache(layout, model, len(sequence.prompt) + buffer_tokens)
    tokens = sequence.prompt[:-1]
    model(mx.array([tokens]), cache=cache.caches())
    cache.end_pass(len(tokens))
    mx.eval(cache.arrays())
    return cache


def forward(
    model: Any, layout: Layout, batch: BatchCache | None, caches: list[SequenceCache], tokens: list[int]
) -> Any:
    if layout.batching == "batched" and len(caches) > 1:
        assert batch is not None
        logits = model(mx.array(tokens)[:, None], cache=batch.begin_step())[:, -1]
        batch.end_step()
        mx.eval(logits, batch.states())
        return logits
    rows = []
    for token, cache in zip(tokens, caches, strict=True):
        rows.append(model(mx.array([[token]]), cache=cache.caches())[:, -1])
        cache.end_pass(1)
    logits = mx.concatenate(rows)
    mx.eval(logits, [cache.arrays() for cache in caches])
    return logits


@pytest.mark.parametrize(("architecture", "num_steps"), RUNS)
def test_batched_sequences_have_the_logits_of_mlx_lm_alone(architecture: str, num_steps: int) -> None:
    model = steady_module(architecture)
    layout = probe(model)
    rng = random.Random(architecture)
    sequences = [ForcedSequence(rng, i, num_steps) for i in range(NUM_SEQUENCES)]
    expected = [expected_logits(model, sequence) for sequence in sequences]
    caches: dict[int, SequenceCache] = {}
    batch: BatchCache | None = None
    worst, most = 0.0, 0
    for step in range(num_steps):
        active = [i for i, s in enumerate(sequences) if s.join <= step < s.join + s.num_steps]
        most = max(most, len(active))
        if active != list(caches):
            if batch is not None:
                batch.release()
            caches = {i: caches.get(i) or prefilled(model, layout, sequences[i], buffer_tokens=100) for i in active}
            batch = BatchCache(list(caches.values())) if layout.batching == "batched" and len(caches) > 1 else None
        for cache in caches.values():
            if not cache.free_tokens:
                cache.grow(300)
        places = [step - sequences[i].join for i in active]
        tokens = [sequences[i].ids[len(sequences[i].prompt) - 1 + p] for i, p in zip(active, places, strict=True)]
        logits = forward(model, layout, batch, list(caches.values()), tokens)
        wanted = mx.stack([expected[i][p] for i, p in zip(active, places, strict=True)])
        worst = max(worst, mx.abs(logits - wanted).max().item())  # pyright: ignore[reportArgumentType, reportAssignmentType]
    assert most == NUM_SEQUENCES
    assert worst <= TOLERANCE


@pytest.mark.parametrize(("architecture", "num_steps"), RUNS)
def test_single_sequence_has_the_logits_of_mlx_lm(architecture: str, num_steps: int) -> None:
    """The sequence grows by further buffers."""
    model = steady_module(architecture)
    layout = probe(model)
    sequence = ForcedSequence(random.Random(7), 0, num_steps, prompt_tokens=200)
    wanted = expected_logits(model, sequence)
    cache = prefilled(model, layout, sequence, buffer_tokens=num_steps // 2)
    rows = []
    for token in sequence.ids[len(sequence.prompt) - 1 : -1]:
        if not cache.free_tokens:
            cache.grow(num_steps // 3)
        rows.append(forward(model, layout, None, [cache], [token])[0])
    assert len(rows) == num_steps
    assert mx.abs(mx.stack(rows) - wanted).max().item() <= TOLERANCE  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_bounded_sequence_has_the_logits_of_mlx_lms_rotating_cache(architecture: str, chunk: int) -> None:
    model = tiny_module(architecture)
    layout = probe(model, max_kv_size=24)
    rng = random.Random(1)
    ids = [rng.randrange(VOCAB) for _ in range(150)]
    mlx_caches = [RotatingKVCache(24, keep=4) if type(c) is KVCache else c for c in make_prompt_cache(model)]
    # Token by token: in chunks mlx-lm masks the kept tokens for all but the first query.
    wanted = [model(mx.array([[id_]]), cache=mlx_caches)[0, -1] for id_ in ids]
    cache = SequenceCache(layout, model, 1)
    for start in range(0, len(ids), chunk):
        tokens = ids[start : start + chunk]
        logits = model(mx.array([tokens]), cache=cache.caches())[0]
        cache.end_pass(len(tokens))
        mx.eval(logits, cache.arrays())
        for place, row in enumerate(logits):
            assert mx.abs(row - wanted[start + place]).max().item() <= TOLERANCE  # pyright: ignore[reportOperatorIssue]
