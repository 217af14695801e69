"""Sampling by row, compared with a naive oracle, and reproducible in any batch."""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from kvstrata.engine import sampling as sampling_module
from kvstrata.engine.request import Sampling
from kvstrata.engine.runner import BatchRow, PendingStep, step_inputs
from kvstrata.engine.sampling import Sampler, sample

VOCAB = 40
LOGITS = arrays(np.float32, VOCAB, elements=st.floats(-8, 8, width=32), unique=True)


def draw_many(logits: np.ndarray, sampling: Sampling, times: int, prompt: tuple[int, ...] = ()) -> Counter[int]:
    """Return `times` independent draws, as rows of one batch."""
    samplers = [Sampler(dataclasses.replace(sampling, seed=i), prompt, VOCAB) for i in range(times)]
    return Counter(sample(mx.array(np.tile(logits, (times, 1))), samplers).read())


def allowed(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """Return the tokens that the filters keep, applied one after the other: the oracle."""
    probabilities = np.exp(logits / sampling.temperature - np.max(logits / sampling.temperature))
    # Different logits may have the same probability, and are kept together. A probability of 0 is never drawn.
    smallest = np.sort(probabilities)[-min(sampling.top_k or VOCAB, VOCAB)]
    kept = [token for token in range(VOCAB) if probabilities[token] >= smallest * (1 - 1e-6)]
    kept.sort(key=lambda token: -probabilities[token])
    enough = sampling.top_p * sum(probabilities[kept])
    by_p = [token for at, token in enumerate(kept) if at == 0 or sum(probabilities[kept[:at]]) < enough]
    floor = max(probabilities[by_p[-1]] * (1 - 1e-6), sampling.min_p * probabilities.max())
    return {token for token in kept if probabilities[token] >= floor}


class FixedDraw(Sampler):
    """A sampler that always draws the given number."""

    def __init__(self, sampling: Sampling, number: float) -> None:
        super().__init__(sampling, (), VOCAB)
        self._number = number

    def draw(self) -> float:
        return self._number


def shares(probabilities: list[float], sampling: Sampling, others: tuple[Sampling, ...] = ()) -> dict[int, float]:
    """Return the share of each token among 100 evenly spread draws, beside other rows."""
    logits = np.full(VOCAB, -100.0, dtype=np.float32)
    logits[: len(probabilities)] = np.log(probabilities)
    rows = [FixedDraw(sampling, (i + 0.5) / 100) for i in range(100)] + [Sampler(other, (), VOCAB) for other in others]
    drawn = Counter(sample(mx.array(np.tile(logits, (len(rows), 1))), rows).read()[:100])
    return {token: count / 100 for token, count in drawn.items()}


@given(LOGITS)
def test_greedy_samples_the_largest_logit(logits: np.ndarray) -> None:
    assert draw_many(logits, Sampling(temperature=0), 1) == {int(np.argmax(logits)): 1}


@given(
    LOGITS,
    st.floats(0.2, 2.0),
    st.sampled_from([0, 1, 3, 20, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_sample_draws_only_tokens_that_the_filters_keep(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = set(draw_many(logits, sampling, 64))
    # A token exactly on the edge of top_p may fall on either side of a rounding.
    wider = dataclasses.replace(sampling, top_p=min(1.0, top_p + 1e-5))
    assert drawn <= allowed(logits, wider)


@given(
    LOGITS,
    st.sets(st.integers(0, VOCAB - 1), min_size=1),
    st.sampled_from([0.0, 0.7, 2.0]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0.05, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5]),
)
def test_filters_ignore_tokens_that_the_grammar_masks(
    logits: np.ndarray, kept: set[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    mask = np.zeros((32, VOCAB), np.bool_)
    mask[:, sorted(kept)] = True
    mask[-1] = True  # a row without a grammar
    samplers = [Sampler(dataclasses.replace(sampling, seed=i), (), VOCAB) for i in range(32)]
    *drawn, free = sample(mx.array(np.tile(logits, (32, 1))), samplers, mask).read()
    alone = sample(mx.array(logits)[None], [Sampler(dataclasses.replace(sampling, seed=31), (), VOCAB)]).read()
    assert [free] == alone
    only = np.where(mask[0], logits, -np.inf)
    if temperature == 0:
        assert set(drawn) == {int(np.argmax(only))}
        return
    wider = dataclasses.replace(sampling, top_p=min(1.0, top_p + 1e-5))
    assert set(drawn) <= allowed(only, wider) & kept


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(top_k=2), [4 / 7, 3 / 7]),
        (Sampling(top_p=0.6), [4 / 7, 3 / 7]),
        (Sampling(top_p=0.75), [4 / 9, 3 / 9, 2 / 9]),
        (Sampling(top_p=0.39), [1.0]),
        # The first two of three tokens have 0.78 of their 0.9: enough for 0.75, though not of all four tokens.
        (Sampling(top_k=3, top_p=0.75), [4 / 7, 3 / 7]),
        (Sampling(top_k=3, top_p=0.8), [4 / 9, 3 / 9, 2 / 9]),
        (Sampling(min_p=0.6), [4 / 7, 3 / 7]),
        (Sampling(top_p=0.95, min_p=0.4), [4 / 9, 3 / 9, 2 / 9]),
        # Squared: 16, 9, 4 and 1 of 30. The first two have 0.83.
        (Sampling(temperature=0.5, top_p=0.8), [16 / 25, 9 / 25]),
    ],
)
def test_kept_tokens_are_drawn_by_their_probabilities(sampling: Sampling, expected: list[float]) -> None:
    drawn = shares([0.4, 0.3, 0.2, 0.1], sampling)
    assert [drawn.get(token, 0.0) for token in range(len(expected))] == pytest.approx(expected, abs=0.011)
    assert max(drawn) < len(expected)


def test_filters_apply_to_their_own_row_only() -> None:
    others = (Sampling(top_k=1, top_p=0.1, min_p=1.0), Sampling(temperature=0), Sampling(top_p=0.5, temperature=0.3))
    drawn = shares([0.4, 0.3, 0.2, 0.1], Sampling(), others)
    assert [drawn[token] for token in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=0.011)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1] + [1e-9] * (VOCAB - 4), dtype=np.float32))
    counts = draw_many(logits, Sampling(temperature=1.0), 4000)
    assert [counts[i] / 4000 for i in range(4)] == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


def test_largest_draw_of_a_truncated_row_gives_a_kept_token() -> None:
    # The largest draw below 1 must not run past the last token.
    logits = mx.array(np.linspace(5, -5, VOCAB, dtype=np.float32))[None]
    sampler = FixedDraw(Sampling(temperature=1.0, top_k=3), (2**23 - 1) / 2**23)
    assert sample(logits, [sampler]).read() == [2]


@given(st.integers(0, 2**31), st.integers(0, 5))
def test_seed_gives_the_same_tokens_in_any_batch(seed: int, place: int) -> None:
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
def test_extreme_temperature_gives_a_token_of_the_vocabulary(temperature: float) -> None:
    logits = np.linspace(-8, 8, VOCAB, dtype=np.float32)
    drawn = draw_many(logits, Sampling(temperature=temperature, top_p=0.99), 16)
    assert max(drawn) < VOCAB
    assert temperature > 1 or set(drawn) == {VOCAB - 1}


def test_nan_logits_give_a_token_of_the_vocabulary() -> None:
    logits = np.full(VOCAB, np.nan, dtype=np.float32)
    assert all(0 <= token < VOCAB for token in draw_many(logits, Sampling(temperature=1.0), 4))


def test_requests_without_seeds_draw_different_tokens() -> None:
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


def test_logprobs_are_taken_before_bias_and_penalties() -> None:
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


@pytest.mark.parametrize("count", [0, 1, VOCAB - 1, VOCAB, VOCAB + 5])
def test_number_of_logprobs_is_clamped_to_the_vocabulary(count: int) -> None:
    logits = np.linspace(3, -1, VOCAB, dtype=np.float32)
    sampled = sample(mx.array(logits)[None], [Sampler(Sampling(temperature=0, num_logprobs=count), (), VOCAB)])
    row = sampled.logprobs[0].read(sampled.read()[0])
    assert [id_ for id_, _ in row.top] == list(range(min(count, VOCAB)))


# MLX compiles these kernels at their first use on CUDA, for seconds.
COMPILED_LATE = {"Gather", "GatherAxis", "Scatter", "ScatterAxis", "MaskedScatter"}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0),
        Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1),
        Sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((3, 2.0),)),
    ],
    ids=["greedy", "truncated", "adjusted"],
)
def test_sample_uses_no_kernel_that_is_compiled_late(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "_descending", lambda x: -mx.sort(-x, axis=-1))  # as on a GPU
    samplers = [Sampler(each, (1, 2), VOCAB) for each in (sampling, Sampling(temperature=0))]
    sampled = sample(mx.zeros((2, VOCAB)), samplers)
    used = operations(*sampled.arrays(), *(array for each in samplers for array in each.arrays()))
    assert "ArgReduce" in used
    assert not used & COMPILED_LATE


def test_step_inputs_of_a_changed_batch_use_no_kernel_that_is_compiled_late() -> None:
    """A row has left, another is new, and two continue in another order."""
    sampled = sample(
        mx.array(np.eye(3, VOCAB, dtype=np.float32)), [Sampler(Sampling(temperature=0), (), VOCAB) for _ in range(3)]
    )
    before = PendingStep((1, 2, 3), sampled, began_s=0.0)
    cache: Any = None  # step_inputs reads no cache
    rows = [BatchRow(id_, cache, tokens) for id_, tokens in ((3, ()), (4, (7,)), (1, ()))]
    tokens = step_inputs(rows, before)
    used = operations(tokens)
    assert "Concatenate" in used
    assert not used & COMPILED_LATE
    assert tokens.tolist() == [2, 7, 0]
    assert tokens.dtype == mx.int32


def operations(*arrays_of_graph: mx.array) -> set[str]:
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays_of_graph)
    return set(re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue()))
