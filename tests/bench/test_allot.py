"""Bits by layer from losses: within the budget, and as good as the best where that can be looked up."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvstrata.bench.allot import Choice, allot

BITS = (8, 4, 2)


def made(losses: list[tuple[float, float, float]], num_values: int = 16) -> list[Choice[int]]:
    return [Choice(i, num_values, dict(zip(BITS, each, strict=True))) for i, each in enumerate(losses)]


def total(choices: list[Choice[int]], bits: Mapping[int, int]) -> float:
    return sum(choice.losses[bits[choice.key]] for choice in choices)


# Each step down loses more for each bit than the one before it, as it does in models.
convex = st.tuples(st.floats(0, 1), st.floats(1, 10)).map(
    lambda step: (0.0, 4 * step[0], 4 * step[0] + 2 * step[0] * step[1])
)


@given(st.lists(convex, min_size=1, max_size=5), st.integers(0, 5 * 8 * 16))
def test_the_budget_is_kept_and_no_bits_that_fit_are_left(losses: list, budget: int) -> None:
    choices = made(losses)
    bits = allot(choices, budget)
    used = sum(16 * each for each in bits.values())
    assert used <= budget or set(bits.values()) == {2}
    assert all(each == 8 or used + 16 * each > budget for each in bits.values())


@given(st.lists(convex, min_size=1, max_size=4), st.integers(0, 4 * 8 * 16))
def test_no_plan_is_better_by_more_than_one_step(losses: list, budget: int) -> None:
    choices = made(losses)
    bits = allot(choices, budget)
    fitting = [
        dict(enumerate(each))
        for each in product(BITS, repeat=len(choices))
        if 16 * sum(each) <= max(budget, 32 * len(choices))
    ]
    best = min(total(choices, each) for each in fitting)
    largest = max(choice.losses[2] for choice in choices)
    assert total(choices, bits) <= best + largest + 1e-9


def test_what_loses_least_steps_down_first() -> None:
    choices = made([(0, 0.1, 9), (0, 0.4, 9), (0, 0.2, 9)])
    assert allot(choices, 16 * 24) == {0: 8, 1: 8, 2: 8}
    assert allot(choices, 16 * 20) == {0: 4, 1: 8, 2: 8}
    assert allot(choices, 16 * 17) == {0: 4, 1: 8, 2: 4}
    assert allot(choices, 16 * 12) == {0: 4, 1: 4, 2: 4}
    assert allot(choices, 0) == {0: 2, 1: 2, 2: 2}


def test_a_large_layer_counts_by_its_bytes() -> None:
    large, small = Choice("large", 100, {8: 0.0, 4: 1.0}), Choice("small", 10, {8: 0.0, 4: 0.5})
    assert allot([large, small], 8 * 110 - 1) == {"large": 4, "small": 8}
