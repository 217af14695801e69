"""One step after another: plan, run, postprocess. No threads, no queues: the engine's thread calls in here.

Every sequence is either waiting (holds no KV) or running (prefills or decodes).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.endings import Endings
from kvstrata.engine.entrance import Entrance
from kvstrata.engine.fetching import Fetching
from kvstrata.engine.housekeeping import Housekeeping
from kvstrata.engine.limits import EngineState
from kvstrata.engine.membership import Membership
from kvstrata.engine.memory import Budget
from kvstrata.engine.passes import Passes
from kvstrata.engine.planner import Planner
from kvstrata.engine.rates import Speeds
from kvstrata.engine.replies import Replies
from kvstrata.engine.rungs import RAW, Plans
from kvstrata.engine.runner import Runner
from kvstrata.engine.scheduler import StepPlan
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences
from kvstrata.errors import Unavailable
from kvstrata.eviction.worth import Kind
from kvstrata.store.entry import Lease
from kvstrata.store.stock import Stock

MAX_REST_S = 1.0


@dataclass(eq=False)
class Loop:
    """`engine/make.py` puts it together."""

    stock: Stock
    plans: Plans
    sequences: Sequences
    capacity: Capacity
    fetching: Fetching
    entrance: Entrance
    planner: Planner
    membership: Membership
    passes: Passes
    replies: Replies
    endings: Endings
    housekeeping: Housekeeping
    speeds: Speeds
    runner: Runner
    is_stalled: bool = False  # the last step had nothing to do: those that wait, wait for the disk

    @property
    def budget(self) -> Budget:
        """Read by other threads."""
        return self.capacity.budget

    @property
    def has_broken_cache(self) -> bool:
        """Whether another loop should take over, with an empty cache."""
        return self.stock.failures.is_broken

    @property
    def idle(self) -> bool:
        return not self.sequences.all and self.passes.in_flight is None

    def enqueue(self, sequence: Sequence) -> None:
        self.sequences.waiting.append(sequence)
        with sequence.failing_alone():
            sequence.rung = self.budget.rung_for(len(sequence.request.prompt) + sequence.max_tokens - 1) or RAW
        self.endings.fail_those_that_cannot_go_on()

    def fail_all(self, message: str) -> None:
        """End everything that runs or waits, and start from nothing."""
        self.passes.in_flight = None
        self.endings.fail_all(message)
        self.stock.errands.fail(lambda: Unavailable(message))

    def take_over(self, failed: Loop) -> None:
        """Serve the requests of a loop whose cache is broken. Those that run keep the KV that they read, and leave
        nothing in the new cache; those that wait find it empty."""
        for sequence in failed.sequences.all:
            sequence.stored.withdraw_lookup()
            sequence.stored = sequence.stored.without_cache()
        for sequence in failed.sequences.running.values():
            sequence.stored.filing = self.stock.store.open_detached(Lease(Kind.FRESH))
        self.sequences.waiting.extend(failed.sequences.waiting)
        self.sequences.running.update(failed.sequences.running)
        self.passes.in_flight = failed.passes.in_flight
        self.capacity.budget = failed.capacity.budget
        failed.stock.errands.fail(lambda: Unavailable("The cache failed and was emptied. Try again."))
        self.stock.take_over(failed.stock)

    def end_all(self, message: str) -> None:
        """End everything that runs or waits before its time. What was computed stays in the cache, to be written."""
        try:
            self.replies.read(self.passes.take_in_flight(), is_overlapped=False)
            self.endings.end_all(message)
        finally:
            self.fail_all(message)

    def step(self) -> None:
        step_plan = self._plan()
        would_admit = bool(step_plan.admit)
        if would_admit and not self._has_to_read_first(step_plan):
            self._make_changes(step_plan)
            # What the store had for them may have come or gone since the plan was made: go by what they have now.
            step_plan = self.planner.plan_for([])
        if self._has_to_read_first(step_plan):
            self.replies.read(self.passes.take_in_flight(), is_overlapped=False)
            return
        has_passes = step_plan.prefill or step_plan.decode or self.passes.in_flight
        # One that was to be admitted and was not looks again at once: its prefix has changed.
        self.is_stalled = not (has_passes or step_plan.set_aside or would_admit)
        self._make_changes(step_plan)
        done = self.passes.run(step_plan)
        self.replies.read(done, is_overlapped=self.passes.in_flight is not None)
        self.housekeeping.relieve()
        if self.housekeeping.has_work:
            self.housekeeping.work_in_step(is_awaited=self.planner.awaits_chores)
            # What came from the disk may be all that a sequence waited for.
            self.is_stalled = False

    def _plan(self) -> StepPlan:
        schedule = self.planner.plan()
        while schedule.unservable is not None:
            self.endings.end_unservable(schedule.unservable)
            schedule = self.planner.plan()
        return schedule.plan

    def _has_to_read_first(self, step_plan: StepPlan) -> bool:
        """Only decode steps overlap. For anything else first see where everyone stands, then plan again."""
        return self.passes.in_flight is not None and bool(step_plan.set_aside or step_plan.prefill)

    def _make_changes(self, step_plan: StepPlan) -> None:
        self.membership.change(step_plan)
        self.housekeeping.make_room(self.speeds.step_s, has_grown=bool(step_plan.grow or step_plan.admit))

    def seconds_to_wait(self) -> float:
        """How long a stalled loop may rest before it should look again, unless something comes."""
        waiting, rate = self.sequences.waiting, self.speeds.alone.tokens_s
        seconds = [self.fetching.seconds_to_wait(sequence, rate) for sequence in waiting]
        # One that is past its patience waits for something else.
        seconds += [left_s for left_s in map(self.entrance.seconds_left, waiting) if left_s > 0]
        return min([MAX_REST_S, *(max(0.001, each) for each in seconds)])

    def state(self) -> EngineState:
        running = self.sequences.running.values()
        return EngineState(
            waiting=len(self.sequences.waiting),
            prefilling=sum(1 for s in running if s.prefill_left),
            running=len(running),
            kv_bytes=self.capacity.running_bytes + self.capacity.stored_bytes,
            stored_bytes=self.capacity.stored_bytes,
            kv_budget_bytes=self.budget.total_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            decode_tokens_s=self.speeds.decode.tokens_s,
            prefill_tokens_s=self.speeds.prefill.tokens_s,
        )
