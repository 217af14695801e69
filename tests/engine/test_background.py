"""Share of the time that background work gets between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstrata.engine.background import BackgroundPacer
from tests.prefix_cache.kv import new_cache

SLICE_S = 0.005


class Machine:
    """Streams beside endless background work: each slice takes its full time, and `pending_s` for the pending step."""

    def __init__(self, step_s: float, pending_s: float = 0.0, replan_share: float | None = None) -> None:
        self.now_s = 1.0
        self.step_s = step_s
        self.slices: list[float] = []
        self._pending_s = pending_s
        self._replan_share = replan_share  # of a slice, what the plan after it takes; None: steps are not planned
        self.requantizer = SimpleNamespace(is_running=False, update_progress=lambda: None)
        self.sequences = SimpleNamespace(has_streams=True, drop_replaced_spans=lambda: None)
        self.runner = SimpleNamespace(plans_steps=replan_share is not None, planning_s=0.0)
        nothing: Any = SimpleNamespace(
            shrink_to=lambda *_, **__: "done", fits_for_now=lambda _: True, fits=lambda _: True
        )
        self.cache = SimpleNamespace(
            run_background=self._run_background,
            has_awaited_work=False,
            is_transcoding=True,
            reclaimer=nothing,
            evictor=None,
            candidates=None,
            pins=None,
            conversations=None,
            requantizer=self.requantizer,
            failures=new_cache().failures,
        )
        cache: Any = self.cache
        self.memory = SimpleNamespace(
            budget=SimpleNamespace(total_bytes=100), running_bytes=20, cached_bytes=20, keeps_growth_free=False
        )
        memory: Any = self.memory
        speeds: Any = SimpleNamespace(step_s=step_s, note_background_work=lambda: None)
        runner, sequences = self.runner, self.sequences
        self.pacer = BackgroundPacer(
            cache,
            sequences,  # pyright: ignore[reportArgumentType]
            memory,
            speeds,
            runner,  # pyright: ignore[reportArgumentType]
            slice_s=SLICE_S,
            clock=lambda: self.now_s,
        )

    def _run_background(self, slice_s: float) -> None:
        self.slices.append(slice_s)
        self.now_s += self._pending_s + slice_s

    def step(self, *, is_awaited: bool = False) -> float:
        """Return the time that the step took for the streams."""
        began_s, num_slices = self.now_s, len(self.slices)
        self.now_s += self.step_s + self.runner.planning_s
        self.pacer.run_between_steps(is_awaited=is_awaited)
        has_worked = len(self.slices) > num_slices
        self.runner.planning_s = self.slices[-1] * self._replan_share if has_worked and self._replan_share else 0.0
        return self.now_s - began_s


@given(step_s=st.floats(0.001, 0.2), pending_s=st.floats(0.0, 0.02))
@pytest.mark.perf
def test_unawaited_work_takes_at_most_a_fifth_of_the_time(step_s: float, pending_s: float) -> None:
    machine = Machine(step_s, pending_s)
    for _ in range(400):
        machine.step()
    worked_s = sum(machine.slices) + pending_s * len(machine.slices)
    assert worked_s <= 0.2 * (machine.now_s - 1.0) + SLICE_S + pending_s
    # And where steps are long, it gets its slice after each.
    assert step_s < 5 * (SLICE_S + pending_s) or len(machine.slices) == 400


def test_unawaited_work_takes_up_to_half_of_the_time_under_pressure() -> None:
    machine = Machine(0.004, 0.01)
    machine.memory.cached_bytes = 70
    for _ in range(400):
        machine.step()
    worked_s = sum(machine.slices) + 0.01 * len(machine.slices)
    assert 0.35 <= worked_s / (machine.now_s - 1.0) <= 0.5


@pytest.mark.parametrize("reason", ["asked", "idle", "awaited", "changing"])
def test_awaited_work_does_not_rest(reason: str) -> None:
    machine = Machine(0.004, 0.01)
    machine.cache.has_awaited_work = reason == "asked"
    machine.sequences.has_streams = reason != "idle"
    machine.requantizer.is_running = reason == "changing"
    for _ in range(20):
        machine.step(is_awaited=reason == "awaited")
    assert machine.slices == [SLICE_S] * 20


@given(step_s=st.floats(0.001, 0.2), replan_share=st.floats(0.0, 5.0))
def test_requantization_and_the_next_plan_take_at_most_a_step(step_s: float, replan_share: float) -> None:
    machine = Machine(step_s, replan_share=replan_share)
    machine.requantizer.is_running = True
    took = [machine.step() for _ in range(60)]
    most_s = max(SLICE_S, step_s)
    assert max(took) <= step_s + 1.01 * most_s
    # And it gets on: the time that it may have is used.
    assert took[-1] >= step_s + 0.6 * most_s
    machine.requantizer.is_running = False
    machine.step()
    machine.requantizer.is_running = True
    machine.now_s += 10
    machine.step()
    assert machine.slices[-1] <= most_s / 8
