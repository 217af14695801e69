"""Who joins the batch, who leaves it for an older one, and who gets more room."""

from __future__ import annotations

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.resume import Resume
from kvstrata.engine.runner import Runner
from kvstrata.engine.scheduler import StepPlan
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences
from kvstrata.metrics import Metrics


class Membership:
    def __init__(
        self, sequences: Sequences, capacity: Capacity, resume: Resume, runner: Runner, metrics: Metrics
    ) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._resume = resume
        self._runner = runner
        self._metrics = metrics

    def change(self, step_plan: StepPlan) -> None:
        running = self._sequences.running
        for key in step_plan.set_aside:
            self._set_aside(running[key])
        for key in step_plan.grow:
            self._grow(running[key])
        for key in step_plan.admit:
            self._admit(self._sequences.waiting_at(key))

    def _set_aside(self, sequence: Sequence) -> None:
        """Give its memory to an older one; it goes on when there is room, from its own text."""
        self._runner.disband()
        self._sequences.set_aside(sequence)
        self._resume.end(sequence)
        sequence.set_aside()
        self._metrics.set_aside.inc()

    def _grow(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        sequence.cache.grow(self._capacity.next_tokens(sequence))

    def _admit(self, sequence: Sequence) -> None:
        """Unless the store has less for it than when the plan was made, and it does not fit any more."""
        is_first = sequence.cached_tokens is None
        if not self._resume.begin(
            sequence, self._runner, lambda found: self._capacity.first_tokens_that_fit(sequence, found)
        ):
            return
        sequence.stored.awaits_room_s = None
        if is_first:
            self._metrics.prefix_queries.inc(len(sequence.request.prompt))
            self._metrics.prefix_hits.inc(sequence.cached_tokens or 0)
        self._sequences.start(sequence)
        sequence.report_prefill()
