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

from kvstrata.codecs.backends import runtime
from kvstrata.engine.admission import Admission, MemoryAccount, Unservable
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.budget import FULL_PRECISION, Budget, FormatCatalog
from kvstrata.engine.prefix_lookup import PrefixLookup
from kvstrata.engine.request import EngineState, Failed, Finished, FinishReason, Request, TokenLogprob
from kvstrata.engine.runner import BatchRow, ModelRunner, PendingStep
from kvstrata.engine.scheduler import Chunk, StepPlan
from kvstrata.engine.sequence import Sequence, SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.errors import Unavailable
from kvstrata.metrics import Metrics
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.text.detokenizer import Detokenizer


class StepExecutor:
    """Runs the steps that admission plans, reads their tokens, and ends sequences."""

    def __init__(
        self,
        sequences: SequenceTable,
        admission: Admission,
        prefixes: PrefixLookup,
        runner: ModelRunner,
        speeds: StepSpeeds,
        pacer: BackgroundPacer,
        metrics: Metrics,
        detokenizer_for: Callable[[Request], Detokenizer],
        *,
        vocab_size: int,
    ) -> None:
        self._sequences = sequences
        self._admission = admission
        self._memory = admission.memory
        self._prefixes = prefixes
        self._runner = runner
        self._speeds = speeds
        self._pacer = pacer
        self._metrics = metrics
        self._detokenizer_for = detokenizer_for
        self._vocab_size = vocab_size
        self.overlaps = runtime().backend != "cpu"
        self._pending: PendingStep | None = None
        self.is_stalled = False  # the last step had nothing to do: waiting requests wait for the disk

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs, and no step is pending."""
        return not self._sequences.all and self._pending is None

    def enqueue_sequence(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting ones, with the KV format that lets it fit in memory."""
        self._prefixes.track_sequence(sequence)
        self._sequences.waiting.append(sequence)
        with sequence.contain_failure():
            num_tokens = len(sequence.request.prompt) + sequence.max_tokens - 1
            sequence.kv_format = self._memory.budget.format_for(num_tokens) or FULL_PRECISION
        self._fail_contained()

    def step(self) -> None:
        """Schedule, run, postprocess."""
        plan = self._schedule()
        admits = bool(plan.admit)
        if admits and not self._must_read_first(plan):
            self._change_membership(plan)
            # The cache may have more or less for an admitted sequence than when it was scheduled.
            plan = self._admission.plan_running()
        if self._must_read_first(plan):
            self._read_steps(self._take_pending(), is_overlapped=False)
            return
        has_passes = plan.prefill or plan.decode or self._pending
        # An admitted sequence that did not start is scheduled again at once: its cached prefix has changed.
        self.is_stalled = not (has_passes or plan.preempt or admits)
        self._change_membership(plan)
        finished = self._run_plan(plan)
        self._read_steps(finished, is_overlapped=self._pending is not None)
        self._pacer.step_down_early()
        if self._pacer.has_work:
            self._pacer.run_between_steps(is_awaited=self._admission.waits_for_memory)
            # What came from the disk may be all that a sequence waited for.
            self.is_stalled = False

    def _schedule(self) -> StepPlan:
        schedule = self._admission.schedule()
        while schedule.unservable is not None:
            self._end_unservable(schedule.unservable)
            schedule = self._admission.schedule()
        return schedule.plan

    def _must_read_first(self, plan: StepPlan) -> bool:
        """Whether the pending step has to be read, and the next step planned again. Only decode steps overlap."""
        return self._pending is not None and bool(plan.preempt or plan.prefill)

    # Membership: which sequences run.

    def _change_membership(self, plan: StepPlan) -> None:
        running = self._sequences.running
        for id_ in plan.preempt:
            self._preempt(running[id_])
        for id_ in plan.grow:
            cache = running[id_].cache
            assert cache is not None
            cache.grow(self._memory.tokens_at_growth(running[id_]))
        for id_ in plan.admit:
            self._start(self._sequences.waiting_with_id(id_))
        self._pacer.reclaim_memory(self._speeds.step_s, has_grown=bool(plan.grow or plan.admit))

    def _preempt(self, sequence: Sequence) -> None:
        """Give the memory of a sequence to an older one. It is resumed from its own tokens when memory has space."""
        self._runner.disband()
        self._sequences.preempt_sequence(sequence)
        self._prefixes.finish(sequence, "preempted")
        sequence.preempt()
        self._metrics.preemptions.inc()

    def _start(self, sequence: Sequence) -> None:
        """Start an admitted sequence, unless its cached prefix has shrunk and it does not fit any more."""
        is_first = sequence.cached_tokens is None
        if not self._prefixes.start(
            sequence, lambda cached_tokens: self._memory.fitting_tokens_at_start(sequence, cached_tokens)
        ):
            return
        self._admission.record_start(sequence)
        if is_first:
            self._metrics.prefix_queries.inc(len(sequence.request.prompt))
            self._metrics.prefix_hits.inc(sequence.cached_tokens or 0)
        self._sequences.start_sequence(sequence)
        sequence.report_prefill()

    # Forward passes.

    def _run_plan(self, plan: StepPlan) -> list[PendingStep]:
        """Run the passes of a step. Return the steps that are over, so that their tokens can be read."""
        chunks = [self._chunk_row(chunk) for chunk in plan.prefill]
        if chunks and not plan.is_mixed:
            self._prefill(chunks)
        rows = self._decode_rows(plan.decode)
        riding = chunks if plan.is_mixed else []
        if riding and not rows:
            self._prefill(riding)
            riding = []
        brings_first = any(not self._sequences.running[row.id].num_generated for row in rows)
        finished = self._replace_pending(self._launch(rows, riding))
        self._commit_chunks(riding)
        if not self.overlaps or chunks or brings_first or self._sequences.has_prompts:
            # Steps beside a prompt never overlap: chunks are sized by how long each takes. Nor does a step that brings
            # a first token: its client would wait until the next step is launched, too.
            finished += self._take_pending()
        return finished

    def _take_pending(self) -> list[PendingStep]:
        """Return the pending step, if there is one: the caller reads it."""
        return self._replace_pending(None)

    def _replace_pending(self, launched: PendingStep | None) -> list[PendingStep]:
        before, self._pending = self._pending, launched
        return [before] if before is not None else []

    def _chunk_row(self, chunk: Chunk) -> BatchRow:
        sequence = self._sequences.running[chunk.id]
        assert sequence.cache is not None
        start = sequence.cache.num_tokens
        return BatchRow(chunk.id, sequence.cache, sequence.tokens[start : start + chunk.num_tokens])

    def _prefill(self, chunks: list[BatchRow]) -> None:
        has_streams = self._sequences.has_streams
        began_s = time.perf_counter()
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        self._runner.prefill_chunks(chunks)
        self._speeds.count_chunk(num_tokens, time.perf_counter() - began_s, has_streams=has_streams)
        self._commit_chunks(chunks)

    def _commit_chunks(self, chunks: list[BatchRow]) -> None:
        for chunk in chunks:
            sequence = self._sequences.running[chunk.id]
            with sequence.contain_failure():
                self._prefixes.commit_chunk(sequence)
            self._metrics.prefill_tokens.inc(len(chunk.tokens))
            sequence.report_prefill()

    def _decode_rows(self, ids: tuple[int, ...]) -> list[BatchRow]:
        """Return the rows of a decode step. A grammar that fails ends its own request."""
        rows: list[BatchRow] = []
        for id_ in ids:
            sequence = self._sequences.running[id_]
            with sequence.contain_failure():
                rows.append(self._decode_row(sequence))
        return rows

    def _decode_row(self, sequence: Sequence) -> BatchRow:
        assert sequence.cache is not None
        if sequence.prefill_left:
            # Refuse to decode before prefill has finished; the row would overwrite an uncomputed position.
            raise RuntimeError(f"{sequence.prefill_left} tokens of a prompt are not computed: it cannot decode yet")
        is_known = sequence.num_launched == sequence.num_generated
        tokens = sequence.tokens[-1:] if is_known else ()
        sampler, matcher = sequence.sampler(self._vocab_size), sequence.matcher()
        return BatchRow(sequence.id, sequence.cache, tokens, sampler, matcher, sequence.num_generated)

    def _launch(self, rows: list[BatchRow], riding: list[BatchRow]) -> PendingStep | None:
        if not rows:
            return None
        launched = self._runner.launch([*riding, *rows], self._pending)
        for row in rows:
            self._sequences.running[row.id].num_launched += 1
        return launched

    # Tokens of finished steps.

    def _read_steps(self, finished: list[PendingStep], *, is_overlapped: bool) -> None:
        """Read the tokens of steps. `is_overlapped`: another step was launched before."""
        running = self._sequences.running
        for step in finished:
            tokens = step.sampled.read()
            # Rows of sequences that have ended since were computed for nothing.
            kept = [(row, id_) for row, id_ in enumerate(step.ids) if id_ in running]
            is_last = step is finished[-1] and not is_overlapped
            self._speeds.count_step(step, len(kept), is_last=is_last, has_prompts=self._sequences.has_prompts)
            for row, id_ in kept:
                if id_ in step.failures:
                    self._fail(running[id_], Failed(_grammar_message(step.failures[id_]), "grammar"))
                else:
                    token, logprobs = tokens[row], step.sampled.logprobs.get(row)
                    with running[id_].contain_failure():
                        self.accept_tokens(running[id_], [token], [logprobs.read(token) if logprobs else None])
        self._fail_contained()

    def accept_tokens(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob | None]) -> None:
        """Append tokens to a reply, today always one. Tokens after the one that ends the reply are dropped."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            before_s = sequence.last_token_s
            sequence.accept_token(token, logprob, self._detokenizer_for)
            self._metrics.generation_tokens.inc()
            self._prefixes.commit_token(sequence)
            if sequence.last_token_s is not None and before_s is not None:
                self._metrics.inter_token_s.observe(sequence.last_token_s - before_s)
            elif sequence.last_token_s is not None:
                self._metrics.first_token_s.observe(sequence.last_token_s - sequence.submitted_s)
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)
                return

    # End of a sequence: it leaves the tables first, then the client hears of it.

    def end_request(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request before the model ends it. An unknown id is ignored: the request may have ended already."""
        for sequence in self._sequences.all:
            if sequence.request.id == request_id:
                self._finish(sequence, reason)

    def end_all(self, message: str) -> None:
        """End each sequence before its time, as if it had ended by itself: what it has computed stays cached."""
        try:
            self._read_steps(self._take_pending(), is_overlapped=False)
            for sequence in self._sequences.all:
                with sequence.contain_failure():
                    self._fail(sequence, Failed(message))
        finally:
            self.fail_all(message)

    def fail_all(self, message: str) -> None:
        """End all sequences after a failed forward pass. What they have computed is lost."""
        self._pending = None
        sequences = self._sequences.all
        self._sequences.waiting = []
        self._sequences.running.clear()
        try:
            self._runner.abandon()
        finally:
            for sequence in sequences:
                self._send_failure(sequence, Failed(message))
        for sequence in sequences:
            self._prefixes.finish(sequence, "abandoned")

    def take_over(self, failed: StepExecutor) -> None:
        """Read the pending step of an executor whose cache has failed."""
        self._pending = failed._pending

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        try:
            self._remove(sequence)
        finally:
            self._metrics.requests.labels(outcome=reason).inc()
            self._metrics.request_s.observe(time.monotonic() - sequence.submitted_s)
            sequence.end(Finished(reason, sequence.usage, sequence.stop_found, sequence.reply_ids))

    def _fail(self, sequence: Sequence, failed: Failed) -> None:
        try:
            self._remove(sequence)
        finally:
            self._send_failure(sequence, failed)

    def _send_failure(self, sequence: Sequence, failed: Failed) -> None:
        self._metrics.requests.labels(outcome="failed").inc()
        sequence.end(failed)

    def _fail_contained(self) -> None:
        """Fail each sequence whose work raised; no other request is concerned."""
        for sequence in self._sequences.all:
            if sequence.failure is not None:
                self._fail(sequence, sequence.failure)

    def _end_unservable(self, unservable: Unservable) -> None:
        """End a request that memory has no space for."""
        sequence = unservable.sequence
        if unservable.failure is not None:
            self._fail(sequence, unservable.failure)
        else:
            sequence.end_at_memory_limit()
            self._finish(sequence, "length")

    def _remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the tables first, so that no fault leaves one behind that has ended."""
        if self._sequences.running.pop(sequence.id, None) is not None:
            # The batch keeps the caches of its rows alive, and recurrent state.
            self._runner.disband()
            self._prefixes.finish(sequence, "ended")
        else:
            self._sequences.waiting.remove(sequence)
            self._prefixes.finish(sequence, "ended")
            self._admission.forget_sequence(sequence)


def _grammar_message(reason: str) -> str:
    return f"The schema or grammar of this request could not be followed further: {reason}. Make it simpler."


@dataclass(eq=False)
class EngineCore:
    """Prefix cache, sequences, and the objects that serve them. `build_core` constructs a new core after a failed
    forward pass, and after a fault that breaks the cache."""

    prefix_cache: PrefixCache
    sequences: SequenceTable
    runner: ModelRunner
    speeds: StepSpeeds
    prefix_lookup: PrefixLookup
    admission: Admission
    pacer: BackgroundPacer
    executor: StepExecutor
    catalog: FormatCatalog

    @property
    def memory(self) -> MemoryAccount:
        return self.admission.memory

    @property
    def budget(self) -> Budget:
        """Budget of the memory for KV. Other threads read it."""
        return self.memory.budget

    @property
    def has_broken_cache(self) -> bool:
        """Whether another core should take over, with an empty cache."""
        return self.prefix_cache.failures.is_broken

    def fail_all(self, message: str) -> None:
        """End all sequences and all tasks of clients after a failed forward pass."""
        self.executor.fail_all(message)
        self.prefix_cache.tasks.fail(lambda: Unavailable(message))

    def end_all(self, message: str) -> None:
        """End all sequences and all tasks of clients before their time. What was computed stays cached, to be
        written."""
        try:
            self.executor.end_all(message)
        finally:
            self.prefix_cache.tasks.fail(lambda: Unavailable(message))

    def take_over(self, failed: EngineCore) -> None:
        """Serve the sequences of a core whose cache is broken."""
        self.prefix_lookup.take_over(failed.prefix_lookup, failed.sequences)
        self.sequences.waiting.extend(failed.sequences.waiting)
        self.sequences.running.update(failed.sequences.running)
        self.executor.take_over(failed.executor)
        self.memory.budget = failed.budget
        failed.prefix_cache.tasks.fail(lambda: Unavailable("The cache failed and was emptied. Try again."))
        self.prefix_cache.take_over(failed.prefix_cache)

    def state(self) -> EngineState:
        """Return a snapshot for other threads."""
        running = self.sequences.running.values()
        return EngineState(
            waiting=len(self.sequences.waiting),
            prefilling=sum(1 for s in running if s.prefill_left),
            running=len(running),
            kv_bytes=self.memory.running_bytes + self.memory.cached_bytes,
            cached_bytes=self.memory.cached_bytes,
            kv_budget_bytes=self.budget.total_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            decode_tokens_s=self.speeds.decode.tokens_s,
            prefill_tokens_s=self.speeds.prefill.tokens_s,
        )
