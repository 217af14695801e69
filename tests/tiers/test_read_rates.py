"""Expected read time of blocks: measured, and faded with time."""

from __future__ import annotations

import pytest

from kvstrata.tiers.read_rates import HALF_LIFE_S, RateMeter
from tests.tiers.timing import Clock

MB = 10**6


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> RateMeter:
    return RateMeter(clock)


def read(meter: RateMeter, clock: Clock, nbytes: int, seconds: float) -> None:
    with meter.reading() as measure:
        clock.now_s += seconds
        measure(nbytes)


def test_rates_before_the_first_block_expect_no_time(meter: RateMeter) -> None:
    assert meter.rates().seconds_for(10**12, 10**6) == 0


def test_rates_of_equal_blocks_scale_with_their_bytes(meter: RateMeter, clock: Clock) -> None:
    for _ in range(5):
        read(meter, clock, 2 * MB, 0.2)
    assert meter.rates().seconds_for(10 * MB, 5) == pytest.approx(1.0)
    assert meter.rates().read_bytes_per_s == pytest.approx(10 * MB)


def test_rates_of_unequal_blocks_separate_block_and_byte_times(meter: RateMeter, clock: Clock) -> None:
    """The disk needs 50 ms for each file and reads 100 MB/s: blocks in fewer bits are hardly faster."""
    for nbytes in (1 * MB, 8 * MB, 1 * MB, 4 * MB):
        read(meter, clock, nbytes, 0.05 + nbytes / (100 * MB))
    rates = meter.rates()
    assert rates.block_s == pytest.approx(0.05)
    assert rates.seconds_for(100 * MB, 10) == pytest.approx(0.5 + 1.0)
    assert rates.seconds_for(10 * MB, 100) == pytest.approx(5.0 + 0.1)


@pytest.mark.parametrize(("small_s", "large_s"), [(0.3, 0.1), (0.0, 0.4)])
def test_rates_of_noisy_reads_are_never_negative(
    small_s: float, large_s: float, meter: RateMeter, clock: Clock
) -> None:
    """Noise can tilt the fitted line so far that one of its terms would be negative."""
    for _ in range(3):
        read(meter, clock, 1 * MB, small_s)
        read(meter, clock, 4 * MB, large_s)
    rates = meter.rates()
    assert rates.block_s >= 0
    assert rates.byte_s >= 0
    assert rates.seconds_for(15 * MB, 6) == pytest.approx(3 * (small_s + large_s), rel=0.1)


def test_rates_without_reads_fade(meter: RateMeter, clock: Clock) -> None:
    read(meter, clock, 1 * MB, 8.0)
    assert meter.rates().seconds_for(MB, 1) == pytest.approx(8.0)
    clock.now_s += 3 * HALF_LIFE_S
    assert meter.rates().seconds_for(MB, 1) == pytest.approx(1.0)
    # The next block outweighs a measurement that has faded.
    read(meter, clock, 1 * MB, 0.01)
    assert meter.rates().seconds_for(MB, 1) == pytest.approx((8.0 / 8 + 0.01) / (1 / 8 + 1), rel=0.1)
    # A disk that is still slow is avoided again.
    clock.now_s += 3 * HALF_LIFE_S
    read(meter, clock, 1 * MB, 8.0)
    assert meter.rates().seconds_for(MB, 1) > 6.0


def test_rates_during_a_read_include_it(meter: RateMeter, clock: Clock) -> None:
    with meter.reading():
        clock.now_s += 30.0
        assert meter.rates().seconds_for(0, 0) == pytest.approx(30.0)
    assert meter.rates().seconds_for(0, 0) == 0


def test_rates_count_overlapping_reads_once(meter: RateMeter, clock: Clock) -> None:
    with meter.reading() as first, meter.reading() as second:
        clock.now_s += 1.0
        first(MB)
        second(MB)
    assert meter.rates().seconds_for(2 * MB, 2) == pytest.approx(1.0, rel=0.05)


def test_rates_after_idle_days_and_an_empty_read_are_finite(meter: RateMeter, clock: Clock) -> None:
    """18 hours are 1,080 half-lives, and a weight faded by them is 0.0."""
    read(meter, clock, 1 * MB, 8.0)
    clock.now_s += 72 * 3600.0
    with meter.reading():
        assert meter.rates().seconds_for(MB, 1) == 0  # during the first read
    assert meter.rates().seconds_for(MB, 1) == 0  # the read found no block
    assert meter.rates().read_bytes_per_s == pytest.approx(MB / 8)
    read(meter, clock, 1 * MB, 0.5)
    assert meter.rates().seconds_for(MB, 1) == pytest.approx(0.5)


def test_rates_during_a_read_keep_measurements_faded(meter: RateMeter, clock: Clock) -> None:
    read(meter, clock, 1 * MB, 8.0)
    clock.now_s += 3 * HALF_LIFE_S
    with meter.reading():
        clock.now_s += 0.1
        assert meter.rates().seconds_for(MB, 1) == pytest.approx(0.1 + 1.0)
    assert meter.rates().seconds_for(MB, 1) == pytest.approx(1.0)
