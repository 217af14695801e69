"""Measured speeds, on a clock that the test advances."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvstrata.engine.runner import PendingStep
from kvstrata.engine.scheduler import MIN_CHUNK_BESIDE_STREAMS
from kvstrata.engine.speeds import FRESH_CHUNKS, WINDOW_S, StepSpeeds, TokenRate
from kvstrata.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """Launches and reads steps as an executor does, on a device whose launches take all the time."""

    def __init__(self, *, share: float = 0.5, max_chunk: int = 256) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.speeds = StepSpeeds(self.metrics, share=share, max_chunk=max_chunk, clock=self.clock)
        self._pending: PendingStep | None = None

    def launch(self, seconds: float, rows: int = 1, prompt_tokens_beside: int = 0) -> PendingStep:
        step = PendingStep(tuple(range(rows)), cast("Any", None), self.clock.now_s, prompt_tokens_beside)
        self.clock.now_s += seconds
        return step

    def run_overlapped(self, seconds: float, rows: int = 1) -> None:
        """Launch a step, then read the step before it."""
        before, self._pending = self._pending, self.launch(seconds, rows)
        if before is not None:
            self.speeds.count_step(before, len(before.ids), is_last=False, has_prompts=False)

    def drain(self, num_kept: int) -> None:
        assert self._pending is not None
        self.clock.now_s += 0.0003
        self.speeds.count_step(self._pending, num_kept, is_last=True, has_prompts=False)
        self._pending = None

    def run_single(self, seconds: float, rows: int = 1, prompt_tokens_beside: int = 0) -> None:
        step = self.launch(seconds, rows, prompt_tokens_beside)
        self.speeds.count_step(step, rows, is_last=True, has_prompts=True)

    def step_seconds(self, kind: str) -> float:
        return self.metrics.registry.get_sample_value("kvstrata_step_seconds_sum", {"kind": kind}) or 0.0


@pytest.mark.parametrize("reply_tokens", [2, 5, 100])
def test_decode_speed_is_unchanged_after_a_reply_ends(reply_tokens: int) -> None:
    engine = Engine()
    for _ in range(reply_tokens + 1):  # the last step was launched before the reply ended
        engine.run_overlapped(0.05)
    engine.drain(num_kept=0)
    assert engine.speeds.decode.tokens_s == pytest.approx(20, rel=0.02 + 1 / reply_tokens)
    assert engine.speeds.decode.tokens_s <= 20


def test_token_rate_covers_the_last_seconds_of_work() -> None:
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


def test_step_time_of_overlapping_steps_is_the_time_that_each_adds() -> None:
    engine = Engine()
    for _ in range(3):
        engine.run_overlapped(0.05)
    engine.drain(num_kept=1)
    assert engine.speeds.step_s == pytest.approx(0.05)
    # A step with background work in between does not count as usual.
    engine.run_overlapped(0.05)
    engine.run_overlapped(0.05)
    engine.speeds.note_background_work()
    engine.run_overlapped(5.0)
    assert engine.speeds.step_s == pytest.approx(0.05)


def test_mixed_pass_counts_for_decode_and_prefill() -> None:
    engine = Engine()
    engine.run_single(0.05)
    for _ in range(200):
        engine.run_single(0.1, prompt_tokens_beside=10)
    assert engine.speeds.decode.tokens_s == pytest.approx(10)
    assert engine.speeds.prefill.tokens_s == pytest.approx(100)
    # The sums of both kinds are the time that passed.
    assert engine.step_seconds("prefill") == pytest.approx(200 * 0.05)
    assert engine.step_seconds("decode") == pytest.approx(201 * 0.05)
    assert engine.speeds.alone.tokens_s == 0


def test_separate_chunks_and_streams_slow_each_other_down() -> None:
    engine = Engine()
    for _ in range(200):
        engine.clock.now_s += 0.05
        engine.speeds.count_chunk(16, 0.05, has_streams=True)
        engine.run_single(0.05)
    assert engine.speeds.decode.tokens_s == pytest.approx(10, rel=0.01)
    assert engine.speeds.prefill.tokens_s == pytest.approx(160, rel=0.01)
    engine.speeds.count_chunk(256, 1.0, has_streams=False)
    assert engine.speeds.alone.tokens_s == 256


def test_chunks_beside_streams_converge_to_their_share() -> None:
    engine = Engine(share=0.5)
    assert engine.speeds.chunk_tokens_beside_streams(1) == 0, "no step was measured yet"
    engine.speeds.count_chunk(800, 1.0, has_streams=False)
    engine.run_single(0.05)
    sizes = []
    for _ in range(FRESH_CHUNKS):
        sizes.append(engine.speeds.chunk_tokens_beside_streams(1))
        engine.run_single(0.07 + 0.001 * sizes[-1], prompt_tokens_beside=sizes[-1])
    # 0.07 + 0.001 * 30 is two steps.
    assert sizes[0] == 40
    assert set(sizes[8:]) <= {29, 30, 31}
    # A step without a chunk has to be measured again.
    assert engine.speeds.chunk_tokens_beside_streams(1) == 0
    engine.run_single(0.06)
    assert engine.speeds.chunk_tokens_beside_streams(1) > 0
    assert engine.speeds.chunk_tokens_beside_streams(2) == 0, "no step of two streams was measured"


def test_prompts_get_their_share_of_the_time() -> None:
    sizes = []
    for share in (0.2, 0.5, 0.8):
        engine = Engine(share=share, max_chunk=1000)
        engine.run_single(0.1)
        for _ in range(50):
            size = engine.speeds.chunk_tokens_beside_streams(1)
            engine.run_single(0.1 + 0.001 * size, prompt_tokens_beside=size)
        sizes.append(engine.speeds.chunk_tokens_beside_streams(1))
    assert sizes == pytest.approx([25, 100, 400], rel=0.1)


def test_chunks_with_a_high_fixed_cost_are_spread_over_steps() -> None:
    """Times of a CPU: 45 ms for a step, 118 ms more with a chunk of 16 tokens, 72 ms more with one of 4."""
    engine = Engine(share=0.5)
    engine.run_single(0.045)
    spent, prompt_tokens = 0.0, 0
    for _ in range(300):
        size = engine.speeds.chunk_tokens_beside_streams(1)
        assert size in (0, MIN_CHUNK_BESIDE_STREAMS)
        cost = 0.058 + 0.0036 * size if size else 0.0
        spent += cost
        prompt_tokens += size
        engine.run_single(0.045 + cost, prompt_tokens_beside=size)
    whole = spent + 300 * 0.045
    assert 0.4 < spent / whole <= 0.51
    assert prompt_tokens / whole > 55
