"""Speeds are tokens over time: by a clock that the test turns."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvstrata.engine.runner import PendingStep
from kvstrata.engine.scheduler import MIN_BESIDE_TOKENS
from kvstrata.engine.speeds import FRESH_CHUNKS, WINDOW_S, StepSpeeds, TokenRate
from kvstrata.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """Steps as a loop launches and reads them, on a device that computes while it launches."""

    def __init__(self, *, share: float = 0.5, max_chunk: int = 256) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.speeds = StepSpeeds(self.metrics, share=share, max_chunk=max_chunk, clock=self.clock)
        self._in_flight: PendingStep | None = None

    def launch(self, seconds: float, rows: int = 1, riding: int = 0) -> PendingStep:
        step = PendingStep(tuple(range(rows)), cast("Any", None), self.clock.now_s, riding)
        self.clock.now_s += seconds
        return step

    def overlapped(self, seconds: float, rows: int = 1) -> None:
        """Launch one, then read the one before."""
        before, self._in_flight = self._in_flight, self.launch(seconds, rows)
        if before is not None:
            self.speeds.count_step(before, len(before.ids), is_last=False, has_prompts=False)

    def drain(self, num_kept: int) -> None:
        assert self._in_flight is not None
        self.clock.now_s += 0.0003
        self.speeds.count_step(self._in_flight, num_kept, is_last=True, has_prompts=False)
        self._in_flight = None

    def single(self, seconds: float, rows: int = 1, riding: int = 0) -> None:
        step = self.launch(seconds, rows, riding)
        self.speeds.count_step(step, rows, is_last=True, has_prompts=True)

    def sampled(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("kvstrata_step_seconds_sum", {"kind": kind}) or 0.0


@pytest.mark.parametrize("reply_tokens", [2, 5, 100])
def test_the_speed_after_a_reply_has_ended_is_what_it_was(reply_tokens: int) -> None:
    engine = Engine()
    for _ in range(reply_tokens + 1):  # the last one was launched before the end was known
        engine.overlapped(0.05)
    engine.drain(num_kept=0)
    assert engine.speeds.decode.tokens_s == pytest.approx(20, rel=0.02 + 1 / reply_tokens)
    assert engine.speeds.decode.tokens_s <= 20


def test_a_rate_is_that_of_the_last_seconds_of_work() -> None:
    rate = TokenRate()
    assert rate.tokens_s == 0
    for _ in range(100):
        rate.add_work(10, 1.0)
    assert rate.tokens_s == 10
    for _ in range(int(WINDOW_S) + 1):
        rate.add_work(30, 1.0)
    assert rate.tokens_s == pytest.approx(30)
    rate.add_work(0, 1e9)
    rate.add_work(5, 2 * WINDOW_S)
    assert rate.tokens_s == pytest.approx(5 / (2 * WINDOW_S))


def test_a_step_of_overlapping_ones_takes_what_each_adds() -> None:
    engine = Engine()
    for _ in range(3):
        engine.overlapped(0.05)
    engine.drain(num_kept=1)
    assert engine.speeds.step_s == pytest.approx(0.05)
    # With stored KV worked on between two steps, it says nothing of a step.
    engine.overlapped(0.05)
    engine.overlapped(0.05)
    engine.speeds.note_background_work()
    engine.overlapped(5.0)
    assert engine.speeds.step_s == pytest.approx(0.05)


def test_a_mixed_pass_counts_for_both() -> None:
    engine = Engine()
    engine.single(0.05)
    for _ in range(200):
        engine.single(0.1, riding=10)
    assert engine.speeds.decode.tokens_s == pytest.approx(10)
    assert engine.speeds.prefill.tokens_s == pytest.approx(100)
    # Sums of time are those that passed.
    assert engine.sampled("prefill") == pytest.approx(200 * 0.05)
    assert engine.sampled("decode") == pytest.approx(201 * 0.05)
    assert engine.speeds.alone.tokens_s == 0


def test_separate_chunks_slow_streams_down_and_streams_them() -> None:
    engine = Engine()
    for _ in range(200):
        engine.clock.now_s += 0.05
        engine.speeds.count_chunk(16, 0.05, has_streams=True)
        engine.single(0.05)
    assert engine.speeds.decode.tokens_s == pytest.approx(10, rel=0.01)
    assert engine.speeds.prefill.tokens_s == pytest.approx(160, rel=0.01)
    engine.speeds.count_chunk(256, 1.0, has_streams=False)
    assert engine.speeds.alone.tokens_s == 256


def test_chunks_beside_streams_close_in_on_their_share() -> None:
    engine = Engine(share=0.5)
    assert engine.speeds.beside_tokens(1) == 0, "how long a step takes is not known yet"
    engine.speeds.count_chunk(800, 1.0, has_streams=False)
    engine.single(0.05)
    sizes = []
    for _ in range(FRESH_CHUNKS):
        sizes.append(engine.speeds.beside_tokens(1))
        engine.single(0.07 + 0.001 * sizes[-1], riding=sizes[-1])
    # 0.07 + 0.001 * 30 is two steps.
    assert sizes[0] == 40
    assert set(sizes[8:]) <= {29, 30, 31}
    # A step without a chunk tells anew how long streams take.
    assert engine.speeds.beside_tokens(1) == 0
    engine.single(0.06)
    assert engine.speeds.beside_tokens(1) > 0
    assert engine.speeds.beside_tokens(2) == 0, "nor is it known of two"


def test_the_share_is_what_prompts_get() -> None:
    sizes = []
    for share in (0.2, 0.5, 0.8):
        engine = Engine(share=share, max_chunk=1000)
        engine.single(0.1)
        for _ in range(50):
            size = engine.speeds.beside_tokens(1)
            engine.single(0.1 + 0.001 * size, riding=size)
        sizes.append(engine.speeds.beside_tokens(1))
    assert sizes == pytest.approx([25, 100, 400], rel=0.1)


def test_where_a_chunk_costs_much_before_its_first_token_steps_without_one_pay_for_it() -> None:
    """As on a CPU: a step of 45 ms, a chunk of 16 tokens 118 ms more, one of 4 tokens 72."""
    engine = Engine(share=0.5)
    engine.single(0.045)
    spent, prompt_tokens = 0.0, 0
    for _ in range(300):
        size = engine.speeds.beside_tokens(1)
        assert size in (0, MIN_BESIDE_TOKENS)
        cost = 0.058 + 0.0036 * size if size else 0.0
        spent += cost
        prompt_tokens += size
        engine.single(0.045 + cost, riding=size)
    whole = spent + 300 * 0.045
    assert 0.4 < spent / whole <= 0.51
    assert prompt_tokens / whole > 55
