"""Step executor: schedule, run, postprocess.

Every sequence is either waiting (holds no KV) or running (prefills or decodes). Decode steps overlap where a device
works by itself: the host reads one step while the device runs the next. Kernels for a CPU run on the host, so a token
is read when its step ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from kvstrata.engine.admission import Entrance, MemoryAccount, Planner, Unservable
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.budget import FULL_PRECISION, Budget, FormatCatalog
from kvstrata.engine.prefix_lookup import Fetching, Resume
from kvstrata.engine.request import EngineState, Failed, Finished, FinishReason, Request
from kvstrata.engine.runner import BatchRow, GrammarState, ModelRunner, PendingStep, PromptChunk
from kvstrata.engine.scheduler import Chunk, StepPlan
from kvstrata.engine.sequence import Sequence, SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.errors import Unavailable
from kvstrata.metrics import Metrics
from kvstrata.prefix_cache.entries import Lease
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.text.detokenizer import Detokenizer


class Endings:
    def __init__(
        self,
        sequences: SequenceTable,
        resume: Resume,
        fetching: Fetching,
        entrance: Entrance,
        runner: ModelRunner,
        metrics: Metrics,
    ) -> None:
        self._sequences = sequences
        self._resume = resume
        self._fetching = fetching
        self._entrance = entrance
        self._runner = runner
        self._metrics = metrics

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        try:
            self._remove(sequence)
        finally:
            self._metrics.requests.labels(outcome=reason).inc()
            self._metrics.request_s.observe(time.monotonic() - sequence.submitted_s)
            sequence.end(Finished(reason, sequence.usage, sequence.stop_found, sequence.reply_ids))

    def fail(self, sequence: Sequence, failed: Failed) -> None:
        try:
            self._remove(sequence)
        finally:
            self._tell_failure(sequence, failed)

    def end_unservable(self, unservable: Unservable) -> None:
        """End a request that memory has no room for."""
        sequence = unservable.sequence
        if unservable.failure is not None:
            self.fail(sequence, unservable.failure)
        else:
            sequence.end_at_memory_limit()
            self.finish(sequence, "length")

    def fail_those_that_cannot_go_on(self) -> None:
        """Work for each of them failed; it costs no other request anything."""
        for sequence in self._sequences.all:
            if sequence.failure is not None:
                self.fail(sequence, sequence.failure)

    def end(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """Before the model ends it."""
        for sequence in self._sequences.all:
            if sequence.request.id == request_id:
                self.finish(sequence, reason)

    def end_all(self, message: str) -> None:
        """End each sequence as if it had ended by itself: what it has computed stays in the cache."""
        for sequence in self._sequences.all:
            with sequence.contain_failure():
                self.fail(sequence, Failed(message))

    def fail_all(self, message: str) -> None:
        """End everything that runs or waits, and start from nothing."""
        sequences = self._sequences.all
        self._sequences.waiting = []
        self._sequences.running.clear()
        try:
            self._runner.abandon()
        finally:
            for sequence in sequences:
                self._tell_failure(sequence, Failed(message))
        for sequence in sequences:
            self._fetching.forget(sequence)

    def _tell_failure(self, sequence: Sequence, failed: Failed) -> None:
        self._metrics.requests.labels(outcome="failed").inc()
        sequence.end(failed)

    def _remove(self, sequence: Sequence) -> None:
        """First from the tables, so that no fault leaves one behind that has ended."""
        if self._sequences.running.pop(sequence.arrival, None) is not None:
            # The batch keeps the caches of its rows alive, and recurrent state.
            self._runner.disband()
            self._resume.end(sequence)
            self._resume.pin(sequence)
        else:
            self._sequences.waiting.remove(sequence)
            self._fetching.forget(sequence)
            self._entrance.let_go()


class Membership:
    def __init__(
        self, sequences: SequenceTable, capacity: MemoryAccount, resume: Resume, runner: ModelRunner, metrics: Metrics
    ) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._resume = resume
        self._runner = runner
        self._metrics = metrics

    def change(self, step_plan: StepPlan) -> None:
        running = self._sequences.running
        for key in step_plan.preempt:
            self._set_aside(running[key])
        for key in step_plan.grow:
            self._grow(running[key])
        for key in step_plan.admit:
            self._admit(self._sequences.waiting_at(key))

    def _set_aside(self, sequence: Sequence) -> None:
        """Give its memory to an older one; it goes on when there is room, from its own text."""
        self._runner.disband()
        self._sequences.preempt_sequence(sequence)
        self._resume.end(sequence)
        sequence.preempt()
        self._metrics.set_aside.inc()

    def _grow(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        sequence.cache.grow(self._capacity.tokens_at_growth(sequence))

    def _admit(self, sequence: Sequence) -> None:
        """Unless the store has less for it than when the plan was made, and it does not fit any more."""
        is_first = sequence.cached_tokens is None
        if not self._resume.begin(
            sequence, self._runner, lambda found: self._capacity.fitting_tokens_at_start(sequence, found)
        ):
            return
        sequence.stored.awaits_room_s = None
        if is_first:
            self._metrics.prefix_queries.inc(len(sequence.request.prompt))
            self._metrics.prefix_hits.inc(sequence.cached_tokens or 0)
        self._sequences.start_sequence(sequence)
        sequence.report_prefill()


class Passes:
    def __init__(
        self,
        runner: ModelRunner,
        sequences: SequenceTable,
        resume: Resume,
        speeds: StepSpeeds,
        metrics: Metrics,
        *,
        vocab_size: int,
        overlaps: bool,
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._resume = resume
        self._speeds = speeds
        self._metrics = metrics
        self._vocab_size = vocab_size
        self.overlaps = overlaps
        self.in_flight: PendingStep | None = None

    def run(self, step_plan: StepPlan) -> list[PendingStep]:
        """Tells which steps are over, so that their tokens can be read."""
        chunks = [self._chunk_of(chunk) for chunk in step_plan.prefill]
        if chunks and not step_plan.is_mixed:
            self._prefill(chunks)
        riding = chunks if step_plan.is_mixed else []
        rows = self._rows(step_plan.decode)
        if riding and not rows:
            self._prefill(riding)
            riding = []
        brings_first = any(not self._sequences.running[row.id].num_generated for row in rows)
        done = self._replace_in_flight(self._launch(rows, riding))
        self._after_chunks(riding)
        if not self.overlaps or chunks or brings_first or self._sequences.has_prompts:
            # Steps beside a prompt never overlap: how long each takes is what chunks are sized by. Nor does a step that
            # brings a first token: its client would wait until the next step is issued, too.
            done += self.take_in_flight()
        return done

    def take_in_flight(self) -> list[PendingStep]:
        """The step that is in flight, if there is one: it is to be read."""
        return self._replace_in_flight(None)

    def _replace_in_flight(self, launched: PendingStep | None) -> list[PendingStep]:
        done, self.in_flight = self.in_flight, launched
        return [done] if done is not None else []

    def _chunk_of(self, chunk: Chunk) -> PromptChunk:
        sequence = self._sequences.running[chunk.id]
        assert sequence.cache is not None
        start = sequence.cache.num_tokens
        return PromptChunk(chunk.id, sequence.cache, sequence.tokens[start : start + chunk.num_tokens])

    def _prefill(self, chunks: list[PromptChunk]) -> None:
        has_streams = self._sequences.has_streams
        began_s = time.perf_counter()
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        if len(chunks) > 1 or (num_tokens == 1 and self._runner.mixes):
            # One token alone would attend as a stream does: on CUDA by kernels that MLX compiles then, for seconds.
            self._runner.prefill_together(chunks)
        else:
            self._runner.prefill(chunks[0].cache, chunks[0].tokens)
        self._speeds.count_chunk(num_tokens, time.perf_counter() - began_s, has_streams=has_streams)
        self._after_chunks(chunks)

    def _after_chunks(self, chunks: list[PromptChunk]) -> None:
        for chunk in chunks:
            sequence = self._sequences.running[chunk.id]
            with sequence.contain_failure():
                self._resume.after_chunk(sequence)
            self._metrics.prefill_tokens.inc(len(chunk.tokens))
            sequence.report_prefill()

    def _rows(self, keys: tuple[int, ...]) -> list[BatchRow]:
        """Of those that can decode: a grammar that fails ends its own request."""
        rows: list[BatchRow] = []
        for key in keys:
            sequence = self._sequences.running[key]
            with sequence.contain_failure():
                rows.append(self._row(sequence))
        return rows

    def _launch(self, rows: list[BatchRow], riding: list[PromptChunk]) -> PendingStep | None:
        if not rows:
            return None
        launched = self._runner.launch(rows, self.in_flight, riding)
        for row in rows:
            self._sequences.running[row.id].num_launched += 1
        return launched

    def _row(self, sequence: Sequence) -> BatchRow:
        assert sequence.cache is not None
        if sequence.prefill_left:
            # Rather none than wrong ones: its last token would take the place of one that is not computed yet.
            raise RuntimeError(f"{sequence.prefill_left} tokens of a prompt are not computed: it cannot decode yet")
        known = sequence.num_launched == sequence.num_generated
        token = sequence.tokens[-1] if known else None
        sampler, matcher = sequence.sampler(self._vocab_size), sequence.matcher()
        guide = None if matcher is None else GrammarState(matcher, sequence.num_generated)
        return BatchRow(sequence.arrival, sequence.cache, sampler, token, guide)


class Replies:
    def __init__(
        self,
        sequences: SequenceTable,
        resume: Resume,
        endings: Endings,
        speeds: StepSpeeds,
        metrics: Metrics,
        detokenizer: Callable[[Request], Detokenizer],
    ) -> None:
        self._sequences = sequences
        self._resume = resume
        self._endings = endings
        self._speeds = speeds
        self._metrics = metrics
        self._detokenizer = detokenizer

    def read(self, done: list[PendingStep], *, is_overlapped: bool) -> None:
        """`is_overlapped`: another step was launched before these are read."""
        running = self._sequences.running
        for step in done:
            tokens = step.sampled.read()
            # Rows of sequences that have ended since were computed for nothing.
            kept = [(row, key) for row, key in enumerate(step.ids) if key in running]
            is_last = step is done[-1] and not is_overlapped
            self._speeds.count_step(step, len(kept), is_last=is_last, has_prompts=self._sequences.has_prompts)
            for row, key in kept:
                if key in step.failures:
                    self._endings.fail(running[key], Failed(_cannot_follow(step.failures[key]), "grammar"))
                else:
                    with running[key].contain_failure():
                        self._accept(running[key], tokens[row], step, row)
        self._endings.fail_those_that_cannot_go_on()

    def _accept(self, sequence: Sequence, token: int, step: PendingStep, row: int) -> None:
        logprobs = step.sampled.logprobs.get(row)
        before_s = sequence.last_token_s
        sequence.accept_token(token, logprobs.read(token) if logprobs else None, self._detokenizer)
        self._metrics.generation_tokens.inc()
        self._resume.after_step(sequence)
        if sequence.last_token_s is not None and before_s is not None:
            self._metrics.inter_token_s.observe(sequence.last_token_s - before_s)
        elif sequence.last_token_s is not None:
            self._metrics.first_token_s.observe(sequence.last_token_s - sequence.submitted_s)
        if sequence.finish_reason is not None:
            self._endings.finish(sequence, sequence.finish_reason)


def _cannot_follow(reason: str) -> str:
    return f"The schema or grammar of this request could not be followed further: {reason}. Make it simpler."


MAX_REST_S = 1.0


@dataclass(eq=False)
class Loop:
    """`engine/make.py` puts it together."""

    stock: Stock
    plans: FormatCatalog
    sequences: SequenceTable
    capacity: MemoryAccount
    fetching: Fetching
    entrance: Entrance
    planner: Planner
    membership: Membership
    passes: Passes
    replies: Replies
    endings: Endings
    housekeeping: BackgroundPacer
    speeds: StepSpeeds
    runner: ModelRunner
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
        with sequence.contain_failure():
            sequence.kv_format = (
                self.budget.format_for(len(sequence.request.prompt) + sequence.max_tokens - 1) or FULL_PRECISION
            )
        self.endings.fail_those_that_cannot_go_on()

    def fail_all(self, message: str) -> None:
        """End everything that runs or waits, and start from nothing."""
        self.passes.in_flight = None
        self.endings.fail_all(message)
        self.stock.tasks.fail(lambda: Unavailable(message))

    def take_over(self, failed: Loop) -> None:
        """Serve the requests of a loop whose cache is broken. Those that run keep the KV that they read, and leave
        nothing in the new cache; those that wait find it empty."""
        for sequence in failed.sequences.all:
            sequence.stored.withdraw_lookup()
            sequence.stored = sequence.stored.without_cache()
        for sequence in failed.sequences.running.values():
            sequence.stored.filing = self.stock.store.insert_detached(Lease(ReuseClass.FRESH))
        self.sequences.waiting.extend(failed.sequences.waiting)
        self.sequences.running.update(failed.sequences.running)
        self.passes.in_flight = failed.passes.in_flight
        self.capacity.budget = failed.capacity.budget
        failed.stock.tasks.fail(lambda: Unavailable("The cache failed and was emptied. Try again."))
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
        self.is_stalled = not (has_passes or step_plan.preempt or would_admit)
        self._make_changes(step_plan)
        done = self.passes.run(step_plan)
        self.replies.read(done, is_overlapped=self.passes.in_flight is not None)
        self.housekeeping.step_down_early()
        if self.housekeeping.has_work:
            self.housekeeping.run_between_steps(is_awaited=self.planner.awaits_chores)
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
        return self.passes.in_flight is not None and bool(step_plan.preempt or step_plan.prefill)

    def _make_changes(self, step_plan: StepPlan) -> None:
        self.membership.change(step_plan)
        self.housekeeping.reclaim_memory(self.speeds.step_s, has_grown=bool(step_plan.grow or step_plan.admit))

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
            kv_bytes=self.capacity.running_bytes + self.capacity.cached_bytes,
            cached_bytes=self.capacity.cached_bytes,
            kv_budget_bytes=self.budget.total_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            decode_tokens_s=self.speeds.decode.tokens_s,
            prefill_tokens_s=self.speeds.prefill.tokens_s,
        )
