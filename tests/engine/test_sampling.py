"""Sampling by row: against a plain reading of each rule, and reproducible whatever the batch."""

from __future__ import annotations

import dataclasses
from collections import Counter

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from kvstrata.engine.request import Sampling
from kvstrata.engine.sampling import Sampler, sample

VOCAB = 40
LOGITS = arrays(np.float32, VOCAB, elements=st.floats(-8, 8, width=32), unique=True)


def draw_many(logits: np.ndarray, sampling: Sampling, times: int, prompt: tuple[int, ...] = ()) -> Counter[int]:
    """`times` independent draws, as rows of one batch."""
    samplers = [Sampler(dataclasses.replace(sampling, seed=i), prompt, VOCAB) for i in range(times)]
    return Counter(sample(mx.array(np.tile(logits, (times, 1))), samplers).read())


def allowed(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """Which tokens may come, read off the rules one by one."""
    probabilities = np.exp(logits / sampling.temperature - np.max(logits / sampling.temperature))
    probabilities /= probabilities.sum()
    descending = -np.sort(-probabilities)
    before = np.cumsum(descending) - descending
    num_by_p = max(1, int((before < sampling.top_p).sum()))
    # Different logits may have the same probability: then all of them stay.
    last = descending[min(sampling.top_k or VOCAB, num_by_p, VOCAB) - 1] * (1 - 1e-6)
    floor = max(last, sampling.min_p * probabilities.max())
    return {token for token in range(VOCAB) if probabilities[token] >= floor}


@given(LOGITS)
def test_greedy_takes_the_largest(logits: np.ndarray) -> None:
    assert draw_many(logits, Sampling(temperature=0), 1) == {int(np.argmax(logits)): 1}


@given(
    LOGITS,
    st.floats(0.2, 2.0),
    st.sampled_from([0, 1, 3, 20, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_only_what_the_rules_allow_is_drawn(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = set(draw_many(logits, sampling, 64))
    # A token exactly on the edge of top_p may fall on either side of a rounding.
    wider = dataclasses.replace(sampling, top_p=min(1.0, top_p + 1e-5))
    assert drawn <= allowed(logits, wider)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1] + [1e-9] * (VOCAB - 4), dtype=np.float32))
    counts = draw_many(logits, Sampling(temperature=1.0), 4000)
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


def test_every_draw_of_a_truncated_row_is_a_real_token() -> None:
    # The very last draw below 1 must not run past the end.
    class AlmostOne(Sampler):
        def draw(self) -> float:
            return (2**23 - 1) / 2**23

    logits = mx.array(np.linspace(5, -5, VOCAB, dtype=np.float32))[None]
    sampler = AlmostOne(Sampling(temperature=1.0, top_k=3), (), VOCAB)
    assert sample(logits, [sampler]).read() == [2]


@given(st.integers(0, 2**31), st.integers(0, 5))
def test_a_seed_gives_the_same_tokens_in_any_batch(seed: int, place: int) -> None:
    rng = np.random.default_rng(1)
    steps = rng.normal(size=(6, VOCAB)).astype(np.float32)
    sampling = Sampling(temperature=1.1, top_p=0.95, seed=seed)
    alone = Sampler(sampling, (), VOCAB)
    expected = [sample(mx.array(step)[None], [alone]).read()[0] for step in steps]
    mine = Sampler(sampling, (), VOCAB)
    others = [Sampler(Sampling(temperature=0.7, top_k=5), (1,), VOCAB) for _ in range(5)]
    rows = [*others[:place], mine, *others[place:]]
    together = []
    for step in steps:
        logits = rng.normal(size=(6, VOCAB)).astype(np.float32)
        logits[place] = step
        together.append(sample(mx.array(logits), rows).read()[place])
    assert together == expected


@pytest.mark.parametrize("temperature", [1e-46, 1e-40, 1e-6, 2.0])
def test_any_temperature_gives_a_token_of_the_vocabulary(temperature: float) -> None:
    logits = np.linspace(-8, 8, VOCAB, dtype=np.float32)
    drawn = draw_many(logits, Sampling(temperature=temperature, top_p=0.99), 16)
    assert max(drawn) < VOCAB
    assert temperature > 1 or set(drawn) == {VOCAB - 1}


def test_logits_that_are_no_numbers_still_give_a_token() -> None:
    logits = np.full(VOCAB, np.nan, dtype=np.float32)
    assert all(0 <= token < VOCAB for token in draw_many(logits, Sampling(temperature=1.0), 4))


def test_without_a_seed_two_requests_differ() -> None:
    flat = mx.zeros((2, VOCAB))
    samplers = [Sampler(Sampling(temperature=1.0), (), VOCAB) for _ in range(2)]
    drawn = [sample(flat, samplers).read() for _ in range(20)]
    assert any(a != b for a, b in drawn)


def test_penalties_and_bias_change_the_logits_as_documented() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[1, 2, 3]] = [4.0, -4.0, 1.0]
    sampling = Sampling(
        temperature=0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((3, 0.5), (7, -100.0)),
    )
    sampler = Sampler(sampling, (1, 2), VOCAB)
    for token in (3, 3):
        sampler.record(mx.array(token))
    adjusted = np.array(sampler.adjust(mx.array(logits)))
    assert adjusted[1] == pytest.approx(2.0)  # in the prompt: divided
    assert adjusted[2] == pytest.approx(-8.0)  # in the prompt, negative: multiplied
    assert adjusted[3] == pytest.approx((1.0 + 0.5) / 2 - 0.5 - 2 * 0.25)  # twice in the reply
    assert adjusted[7] == pytest.approx(-100.0)
    assert adjusted[8] == 0.0


def test_logprobs_are_those_of_the_model_before_any_rule() -> None:
    logits = np.linspace(-1, 3, VOCAB, dtype=np.float32)
    sampling = Sampling(temperature=0, logit_bias=((0, 100.0),), num_logprobs=3)
    sampled = sample(mx.array(logits)[None], [Sampler(sampling, (), VOCAB)])
    token = sampled.read()[0]
    row = sampled.logprobs[0].read(token)
    expected = logits - np.log(np.exp(logits).sum())
    assert token == 0
    assert row.logprob == pytest.approx(expected[0], abs=1e-5)
    assert [id_ for id_, _ in row.top] == [VOCAB - 1, VOCAB - 2, VOCAB - 3]
    assert [value for _, value in row.top] == pytest.approx(expected[:-4:-1], abs=1e-5)
