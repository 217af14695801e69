"""Expected latency of a query: measured, and faded with time."""

from __future__ import annotations

import pytest

from kvstrata.tiers.interface import TierCounters
from kvstrata.tiers.remote.health import LATENCY_HALF_LIFE_S, REMOTE_EVENTS, StoreHealth
from tests.tiers.timing import Clock


def ask(health: StoreHealth, clock: Clock, seconds: float) -> None:
    with health.query(measures=True):
        clock.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> StoreHealth:
    return StoreHealth(TierCounters(REMOTE_EVENTS), first_pause_s=1.0, longest_pause_s=60.0, clock=clock)


def test_expected_latency_of_a_slow_answer_fades_with_time(health: StoreHealth, clock: Clock) -> None:
    assert health.expected_latency_s == 0
    ask(health, clock, 2.0)
    assert health.expected_latency_s == pytest.approx(2.0)
    clock.now_s += 3 * LATENCY_HALF_LIFE_S
    assert health.expected_latency_s == pytest.approx(0.25)
    assert health.latency_s == pytest.approx(2.0), "the displayed latency does not fade"
    clock.now_s += 86_400.0
    assert health.expected_latency_s == pytest.approx(0.0)


def test_expected_latency_after_a_faded_answer_is_that_of_the_newest(health: StoreHealth, clock: Clock) -> None:
    ask(health, clock, 2.0)
    ask(health, clock, 0.01)
    assert health.expected_latency_s == pytest.approx(0.7 * 2.0 + 0.3 * 0.01, rel=0.01)
    clock.now_s += 86_400.0
    ask(health, clock, 0.01)
    assert health.expected_latency_s == pytest.approx(0.01, rel=0.01)
