"""How much of the time work on stored KV gets between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstrata.engine.background import BackgroundPacer
from tests.prefix_cache.kv import new_stock

SLICE_S = 0.005


class House:
    """Streams, and chores that never end: each slice takes as long as it may, and `waits_s` for the step in flight."""

    def __init__(self, step_s: float, waits_s: float = 0.0, plans_anew: float | None = None) -> None:
        self.now_s = 1.0
        self.step_s = step_s
        self.slices: list[float] = []
        self._waits_s = waits_s
        self._plans_anew = plans_anew  # of a slice, what the plan after it takes; None: steps are not planned
        self.background = SimpleNamespace(run_background=self._work, is_asked_for=False, is_rewriting=True)
        self.requantizer = SimpleNamespace(is_running=False)
        self.sequences = SimpleNamespace(has_streams=True, drop_replaced_spans=lambda: None)
        self.runner = SimpleNamespace(plans_steps=plans_anew is not None, planning_s=0.0)
        nothing: Any = SimpleNamespace(
            shrink_to=lambda *_, **__: "done", nearly_fits=lambda _: True, fits=lambda _: True
        )
        stock: Any = SimpleNamespace(
            background=self.background,
            reclaimer=nothing,
            evictor=None,
            candidates=None,
            pins=None,
            requantizer=self.requantizer,
            failures=new_stock().failures,
        )
        self.capacity = SimpleNamespace(
            budget=SimpleNamespace(total_bytes=100), running_bytes=20, cached_bytes=20, keeps_growth_free=False
        )
        capacity: Any = self.capacity
        speeds: Any = SimpleNamespace(step_s=step_s, note_background_work=lambda: None)
        runner, sequences = self.runner, self.sequences
        self.keeping = BackgroundPacer(
            stock,
            sequences,  # pyright: ignore[reportArgumentType]
            capacity,
            speeds,
            runner,  # pyright: ignore[reportArgumentType]
            slice_s=SLICE_S,
            clock=lambda: self.now_s,
        )

    def _work(self, slice_s: float) -> None:
        self.slices.append(slice_s)
        self.now_s += self._waits_s + slice_s

    def step(self, *, is_awaited: bool = False) -> float:
        """Tells how long it took for the streams."""
        began_s, num_slices = self.now_s, len(self.slices)
        self.now_s += self.step_s + self.runner.planning_s
        self.keeping.run_between_steps(is_awaited=is_awaited)
        has_worked = len(self.slices) > num_slices
        self.runner.planning_s = self.slices[-1] * self._plans_anew if has_worked and self._plans_anew else 0.0
        return self.now_s - began_s


@given(step_s=st.floats(0.001, 0.2), waits_s=st.floats(0.0, 0.02))
def test_work_that_no_client_waits_for_takes_a_fifth_of_the_time_at_most(step_s: float, waits_s: float) -> None:
    house = House(step_s, waits_s)
    for _ in range(400):
        house.step()
    worked_s = sum(house.slices) + waits_s * len(house.slices)
    assert worked_s <= 0.2 * (house.now_s - 1.0) + SLICE_S + waits_s
    # And where steps are long, it gets its slice after each.
    assert step_s < 5 * (SLICE_S + waits_s) or len(house.slices) == 400


def test_while_memory_fills_up_it_may_have_half_of_the_time() -> None:
    house = House(0.004, 0.01)
    house.capacity.cached_bytes = 70
    for _ in range(400):
        house.step()
    worked_s = sum(house.slices) + 0.01 * len(house.slices)
    assert 0.35 <= worked_s / (house.now_s - 1.0) <= 0.5


@pytest.mark.parametrize("reason", ["asked", "idle", "awaited", "changing"])
def test_what_a_client_waits_for_does_not_rest(reason: str) -> None:
    house = House(0.004, 0.01)
    house.background.is_asked_for = reason == "asked"
    house.sequences.has_streams = reason != "idle"
    house.requantizer.is_running = reason == "changing"
    for _ in range(20):
        house.step(is_awaited=reason == "awaited")
    assert house.slices == [SLICE_S] * 20


@given(step_s=st.floats(0.001, 0.2), plans_anew=st.floats(0.0, 5.0))
def test_a_change_and_the_plan_after_it_take_no_longer_than_a_step(step_s: float, plans_anew: float) -> None:
    house = House(step_s, plans_anew=plans_anew)
    house.requantizer.is_running = True
    took = [house.step() for _ in range(60)]
    most_s = max(SLICE_S, step_s)
    assert max(took) <= step_s + 1.01 * most_s
    # And it gets on: the time that it may have is used.
    assert took[-1] >= step_s + 0.6 * most_s
    house.requantizer.is_running = False
    house.step()
    house.requantizer.is_running = True
    house.now_s += 10
    house.step()
    assert house.slices[-1] <= most_s / 8
