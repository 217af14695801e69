"""Plans a step: asks the scheduler, and makes room for those that it would let in.

The scheduler is pure. What it is told and what follows from its answer before anything runs is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.entrance import Entrance
from kvstrata.engine.first_in_line import FirstInLine, Unservable
from kvstrata.engine.rates import Speeds
from kvstrata.engine.scheduler import StepPlan, Terms, Waiting, plan
from kvstrata.engine.sequences import Sequences
from kvstrata.engine.view import View


@dataclass(frozen=True)
class Pacing:
    """How many run at once, and how much of a prompt is computed at a time."""

    speeds: Speeds
    max_running: int
    joined_context: int  # that several chunks of one pass may read in all
    mixes: bool  # chunks ride along with the streams' step, and several with each other

    def terms(self, free_bytes: int, num_streams: int) -> Terms:
        speeds = self.speeds
        chunk_tokens, beside_tokens = speeds.chunk_tokens(), speeds.beside_tokens(num_streams)
        return Terms(
            *(free_bytes, self.max_running, chunk_tokens, beside_tokens),
            mixes=self.mixes,
            turn=speeds.num_passes,
            joined_tokens=speeds.pass_cost.pass_tokens,
            joined_context=self.joined_context,
        )


@dataclass(frozen=True)
class Schedule:
    """Plan of a step, and the request that has to end before any step can be planned for those that wait."""

    plan: StepPlan
    unservable: Unservable | None = None


class Planner:
    def __init__(
        self,
        sequences: Sequences,
        view: View,
        first: FirstInLine,
        entrance: Entrance,
        capacity: Capacity,
        pacing: Pacing,
    ) -> None:
        self._sequences = sequences
        self._view = view
        self._first = first
        self._entrance = entrance
        self._capacity = capacity
        self._pacing = pacing
        self.awaits_chores = False  # a request waits for room in memory, or until its prefix is encoded

    def plan(self) -> Schedule:
        """Plan the next step. The caller ends an unservable request, and plans again."""
        running = self._sequences.running
        waiting = self._look()
        step_plan = self.plan_for(waiting)
        while not running and not step_plan.admit:
            outcome = self._first.make_room(waiting)
            if isinstance(outcome, Unservable):
                return Schedule(step_plan, outcome)
            if outcome == "unchanged":
                break
            waiting = self._look()
            step_plan = self.plan_for(waiting)
        if step_plan.set_aside and len(running) == 1 and self._drop_marks():
            step_plan = self.plan_for(waiting)
        num_in = self._let_in(step_plan)
        needs_room = num_in < len(step_plan.admit)
        self.awaits_chores = needs_room or self._view.awaits_encoding
        if needs_room:
            step_plan = self.plan_for([w for w in waiting if w.id in step_plan.admit[:num_in]])
        return Schedule(step_plan)

    def plan_for(self, waiting: list[Waiting]) -> StepPlan:
        terms = self._pacing.terms(self._capacity.free_bytes, self._sequences.num_streams)
        return plan(waiting, self._view.running(), terms)

    def _look(self) -> list[Waiting]:
        return self._view.look(self._pacing.max_running, self._pacing.speeds.alone.tokens_s)

    def _drop_marks(self) -> bool:
        """The only one that runs has no room to grow. False: it has none."""
        (sequence,) = self._sequences.running.values()
        return self._view.drop_marks(sequence)

    def _let_in(self, step_plan: StepPlan) -> int:
        """How many of those that are planned there is room for now. Where none decodes, what has to be
        done before they fit is done at once."""
        sequences = self._sequences
        new = [sequences.waiting_at(key) for key in step_plan.admit]
        if not new:
            self._entrance.let_go()
            return 0
        own_bytes = [self._view.first_bytes(sequence) for sequence in new]
        growing_bytes = sum(self._view.running_one(sequences.running[key]).grow_bytes for key in step_plan.grow)
        limit_bytes = self._capacity.left_bytes(growing_bytes)
        return self._entrance.let_in(new, own_bytes, limit_bytes, slice_s=0.0 if sequences.has_streams else math.inf)
