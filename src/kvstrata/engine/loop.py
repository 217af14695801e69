"""One step after another: plan, run, postprocess. No threads, no queues: the engine's thread calls in here.

Every sequence is either waiting (holds no KV) or running (prefills or decodes). Decode steps overlap: while the device
works on one, the host reads the one before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import mlx.core as mx

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.entrance import Entrance
from kvstrata.engine.limits import EngineState, Limits
from kvstrata.engine.memory import Budget, no_room_beside_pins
from kvstrata.engine.rates import Speeds
from kvstrata.engine.report import CacheUsage, cache_usage
from kvstrata.engine.request import Failed, Finished, FinishReason, Request
from kvstrata.engine.resume import Resume
from kvstrata.engine.rungs import RAW
from kvstrata.engine.runner import Launched, PromptChunk, Row, Runner
from kvstrata.engine.scheduler import Plan, Running, Waiting, plan
from kvstrata.engine.scratch import max_chunk
from kvstrata.engine.sequence import Sequence
from kvstrata.errors import InvalidRequest
from kvstrata.index.identity import owner_of
from kvstrata.layers.buffers import without_cache
from kvstrata.metrics import Metrics
from kvstrata.store.entry import Entry
from kvstrata.store.precision.requantize import Change, Changed, Progress
from kvstrata.store.store import Store
from kvstrata.text.detokenizer import Detokenizer

# Waiting requests that are looked at past those that could be admitted: some may wait for the prefill of another.
MAX_FOLLOWERS = 16
MAX_REST_S = 1.0


class Loop:
    def __init__(
        self,
        runner: Runner,
        resume: Resume,
        budget: Budget,
        limits: Limits,
        metrics: Metrics,
        *,
        vocab_size: int,
        detokenizer: Callable[[Request], Detokenizer],
    ) -> None:
        self._runner = runner
        self._resume = resume
        self._limits = limits
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._detokenizer = detokenizer
        self._max_chunk = max_chunk()
        self._entrance = Entrance(resume.store)
        self._waiting: list[Sequence] = []  # by arrival
        self._running: dict[int, Sequence] = {}  # by arrival
        self._capacity = Capacity(resume.with_rungs(budget), self._running, resume.store, limits.tail_step_tokens)
        self._in_flight: Launched | None = None
        self._num_chunks = 0
        self._speeds = Speeds(metrics, share=limits.prefill_share)
        self._needs_room = False  # a request that may begin waits for room in memory
        self.is_stalled = False  # the last step had nothing to do: those that wait, wait for the disk

    @property
    def budget(self) -> Budget:
        """Read by other threads."""
        return self._capacity.budget

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and self._in_flight is None

    def state(self) -> EngineState:
        running = self._running.values()
        return EngineState(
            waiting=len(self._waiting),
            prefilling=sum(1 for s in running if s.prefill_left),
            running=len(running),
            kv_bytes=self._capacity.running_bytes + self._capacity.stored_bytes,
            stored_bytes=self._capacity.stored_bytes,
            kv_budget_bytes=self.budget.total_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=mx.get_peak_memory(),
            decode_tokens_s=self._speeds.decode.tokens_s,
            prefill_tokens_s=self._speeds.prefill.tokens_s,
        )

    def usage(self, owner: str | None = None) -> CacheUsage:
        """Of what is under an owner's salts; None: all."""
        return cache_usage(self._resume, self.budget, self._running.values(), owner)

    def requantize(self, change: Change) -> Changed:
        """Raises ConfigError for a precision that the model's layers cannot be stored in."""
        store = self._shared_store()
        target = store.precision.target
        plan = self._resume.plan(change.k or target.k, change.v or target.v)
        changed = store.requantize(change, plan, self._entries_of(change.sequence, change.owner))
        self._capacity.budget = self._resume.with_rungs(self.budget)
        return changed

    def requantize_progress(self, owner: str | None = None) -> Progress:
        return self._shared_store().requantize_progress(owner)

    def cancel_requantize(self, owner: str | None = None) -> Progress:
        return self._shared_store().cancel_requantize(owner)

    def _shared_store(self) -> Store:
        if self._resume.store is None:
            raise InvalidRequest("This model brings caches of its own kind: they are neither stored nor quantized.")
        return self._resume.store

    def _entries_of(self, request_id: str | None, owner: str | None) -> set[Entry] | None:
        """What a running request holds; None: no request was named. Another owner's is as good as none."""
        if request_id is None:
            return None
        for sequence in self._running.values():
            is_own = owner is None or owner_of(sequence.request.salt) == owner
            if sequence.request.id == request_id and is_own and sequence.stored.filing is not None:
                return sequence.stored.filing.entries
        raise InvalidRequest(f"No request {request_id[:80]!r} is running. GET /cache/usage lists those that are.")

    def seconds_to_wait(self) -> float:
        """How long a stalled loop may rest before it should look again, unless something comes."""
        rate = self._speeds.alone.tokens_s
        seconds = [self._resume.seconds_to_wait(sequence, rate) for sequence in self._waiting]
        # One that is past its patience waits for something else.
        seconds += [left_s for left_s in map(self._entrance.seconds_left, self._waiting) if left_s > 0]
        return min([MAX_REST_S, *(max(0.001, each) for each in seconds)])

    def expect_prefill(self, tokens_s: float) -> None:
        """Before the first request: whether it is worth waiting for the disk must be known then."""
        self._speeds.alone.add(1, 1 / tokens_s)

    @property
    def store(self) -> Store | None:
        return self._resume.store

    @property
    def has_chores(self) -> bool:
        return self._resume.store is not None and self._resume.store.has_work

    def do_chores(self, slice_s: float) -> None:
        """Work on what is stored, for about so long."""
        if self._resume.store is not None:
            self._speeds.did_chores()
            was_rewriting = self._resume.store.is_rewriting
            with without_cache() if was_rewriting else nullcontext():
                self._resume.store.work(slice_s)
            self._make_room(0.0, has_grown=False)
            if was_rewriting:
                # A sequence that does not run in the next step would keep what was replaced.
                self._let_go()

    def _let_go(self) -> None:
        for sequence in self._running.values():
            if sequence.cache is not None:
                sequence.cache.let_go()

    def seconds_to_expiry(self) -> float:
        """How long an idle loop may rest before something stored has to go, unless something comes."""
        return self._capacity.seconds_to_expiry()

    def expire(self) -> None:
        if self._resume.store is not None:
            self._resume.store.expire()

    def _slice_s(self) -> float:
        """What a client waits for may take as long as a decode step; all else must hardly be noticed."""
        assert self._resume.store is not None
        hurry = self._needs_room or self._resume.store.is_requantizing
        return max(self._limits.slice_s, self._speeds.step_s) if hurry else self._limits.slice_s

    def enqueue(self, sequence: Sequence) -> None:
        sequence.rung = self.budget.rung_for(len(sequence.request.prompt) + sequence.max_tokens - 1) or RAW
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        for sequence in [*self._waiting, *self._running.values()]:
            if sequence.request.id == request_id:
                self._finish(sequence, "cancelled")

    def fail_all(self, message: str) -> None:
        """End everything that runs or waits, and start from nothing."""
        self._in_flight = None
        self._runner.abandon()
        sequences = [*self._waiting, *self._running.values()]
        self._waiting = []
        self._running.clear()
        for sequence in sequences:
            self._resume.forget(sequence)
            self._metrics.requests.labels(outcome="failed").inc()
            sequence.end(Failed(message))

    def step(self) -> None:
        step_plan = self._plan()
        if step_plan.admit and not self._has_to_read_first(step_plan):
            self._make_changes(step_plan)
            # What the store had for them may have come or gone since the plan was made: go by what they have now.
            step_plan = self._plan_for([])
        if self._has_to_read_first(step_plan):
            self._postprocess(self._take_in_flight(None))
            return
        self.is_stalled = not (step_plan.prefill or step_plan.decode or step_plan.set_aside or self._in_flight)
        done = self._run(step_plan)
        self._postprocess(done)
        self._capacity.relieve()
        if self.has_chores:
            self.do_chores(self._slice_s())
            # What came from the disk may be all that a sequence waited for.
            self.is_stalled = False

    def _has_to_read_first(self, step_plan: Plan) -> bool:
        """Only decode steps overlap. For anything else first see where everyone stands, then plan again."""
        return self._in_flight is not None and bool(step_plan.set_aside or step_plan.prefill)

    # Plan.

    def _plan(self) -> Plan:
        waiting = self._as_waiting()
        step_plan = self._plan_for(waiting)
        while not self._running and not step_plan.admit and self._make_room_for_first(waiting):
            waiting = self._as_waiting()
            step_plan = self._plan_for(waiting)
        if step_plan.set_aside and len(self._running) == 1 and self._resume.drop_marks(*self._running.values()):
            step_plan = self._plan_for(waiting)
        num_in = self._let_in(step_plan)
        self._needs_room = num_in < len(step_plan.admit)
        if self._needs_room:
            step_plan = self._plan_for([w for w in waiting if w.id in step_plan.admit[:num_in]])
        return step_plan

    def _make_room_for_first(self, waiting: list[Waiting]) -> bool:
        """No sequence runs, so none will make room: the first that waits for nothing else goes on from less, or ends
        here. False: that changes nothing."""
        first = next((w for w in waiting if not w.follows), None)
        free_bytes = self._capacity.free_bytes
        if first is None or first.admit_bytes <= free_bytes or any(map(self._resume.awaits_disk, self._waiting)):
            return False
        self._entrance.let_go()  # some of what it held may go
        sequence = next(s for s in self._waiting if s.arrival == first.id)
        least_bytes = self.budget.bytes_for(len(sequence.tokens), sequence.rung)
        fits_alone = least_bytes <= free_bytes
        if self._resume.shorten(sequence, first.admit_bytes - free_bytes, keeps_used=not fits_alone):
            return True
        if sequence.num_generated:
            sequence.cut_short()
            self._finish(sequence, "length")
        else:
            message = no_room_beside_pins(least_bytes, free_bytes, self.budget.total_bytes)
            self._fail(sequence, Failed(message, "pinned"))
        return True

    def _plan_for(self, waiting: list[Waiting]) -> Plan:
        return plan(
            waiting,
            [self._as_running(s) for s in self._running.values()],
            free_bytes=self._capacity.free_bytes,
            max_running=self._limits.max_running,
            chunk_tokens=self._limits.prefill_chunk_tokens or self._speeds.chunk_tokens(self._max_chunk),
            beside_tokens=self._limits.prefill_chunk_tokens or self._beside_tokens(),
            mixes=self._runner.mixes,
            turn=self._num_chunks,
        )

    def _let_in(self, step_plan: Plan) -> int:
        """How many of those that are planned there is room for now. Where none decodes, all work is done at once."""
        new = [next(s for s in self._waiting if s.arrival == key) for key in step_plan.admit]
        if not new:
            self._entrance.let_go()
            return 0
        own_bytes = [self._capacity.first_bytes(s, self._resume.found(s).num_tokens) for s in new]
        growing_bytes = sum(self._as_running(self._running[key]).grow_bytes for key in step_plan.grow)
        limit_bytes = self._capacity.left_bytes(growing_bytes)
        return self._entrance.let_in(new, own_bytes, limit_bytes, slice_s=0.0 if self._has_streams() else math.inf)

    def _has_prompts(self) -> bool:
        return any(sequence.prefill_left for sequence in self._running.values())

    def _has_streams(self) -> bool:
        return any(not sequence.prefill_left for sequence in self._running.values())

    def _beside_tokens(self) -> int:
        num_streams = sum(not s.prefill_left and s.tokens_wanted > 0 for s in self._running.values())
        return self._speeds.beside_tokens(num_streams, self._max_chunk)

    def _as_waiting(self) -> list[Waiting]:
        """Only those that could be admitted now: what the store has for the others need not be known yet."""
        ahead = [s for s in self._running.values() if s.prefill_left]
        waiting = []
        rate = self._speeds.alone.tokens_s
        for sequence in self._waiting[: max(0, self._limits.max_running - len(self._running)) + MAX_FOLLOWERS]:
            self._resume.fetch(sequence, rate)
            found = self._resume.found(sequence)
            waiting.append(
                Waiting(
                    sequence.arrival,
                    admit_bytes=self._capacity.admit_bytes(sequence, found),
                    prefill_left=len(sequence.tokens) - 1 - found.num_tokens,
                    chunk_limit=self._resume.next_stop(sequence, found.num_tokens),
                    follows=self._resume.awaits_disk(sequence) or self._resume.follow(sequence, ahead),
                )
            )
            ahead.append(sequence)
        return waiting

    def _as_running(self, sequence: Sequence) -> Running:
        assert sequence.cache is not None
        complete = sequence.tokens_wanted == 0
        full = not sequence.cache.free_tokens and not complete
        return Running(
            sequence.arrival,
            held_bytes=self.budget.held_by(sequence.cache, sequence.rung),
            prefill_left=sequence.prefill_left,
            chunk_limit=self._resume.next_stop(sequence, sequence.num_computed),
            grow_bytes=self._capacity.next_bytes(sequence) if full else 0,
            complete=complete,
        )

    # Run.

    def _make_changes(self, step_plan: Plan) -> None:
        for key in step_plan.set_aside:
            self._set_aside(self._running[key])
        for key in step_plan.grow:
            self._grow(self._running[key])
        for key in step_plan.admit:
            self._admit(next(s for s in self._waiting if s.arrival == key))
        self._make_room(self._speeds.step_s, has_grown=bool(step_plan.grow or step_plan.admit))

    def _run(self, step_plan: Plan) -> list[Launched]:
        """Carry the plan out. Tells which steps are over, so that their tokens can be read."""
        self._make_changes(step_plan)
        chunk = self._chunk_of(step_plan)
        if chunk is not None and not step_plan.rides:
            self._prefill(chunk)
        riding = chunk if step_plan.rides else None
        done = self._take_in_flight(self._launch(step_plan.decode, riding))
        if riding is not None:
            self._after_chunk(riding)
        if chunk is not None or self._has_prompts():
            # Steps beside a prompt do not overlap: how long each takes is what chunks are sized by.
            done += self._take_in_flight(None)
        return done

    def _take_in_flight(self, launched: Launched | None) -> list[Launched]:
        done, self._in_flight = self._in_flight, launched
        return [done] if done is not None else []

    def _set_aside(self, sequence: Sequence) -> None:
        """Give its memory to an older one; it goes on when there is room, from its own text."""
        self._runner.disband()
        del self._running[sequence.arrival]
        self._resume.end(sequence)
        sequence.set_aside()
        self._waiting = sorted([*self._waiting, sequence], key=lambda s: s.arrival)
        self._metrics.set_aside.inc()

    def _grow(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        sequence.cache.grow(self._capacity.next_tokens(sequence))

    def _admit(self, sequence: Sequence) -> None:
        is_first = sequence.cached_tokens is None
        if not self._resume.begin(
            sequence, self._runner, lambda found: self._capacity.first_tokens_that_fit(sequence, found)
        ):
            return
        self._waiting.remove(sequence)
        sequence.stored.awaits_room_s = None
        if is_first:
            self._metrics.prefix_queries.inc(len(sequence.request.prompt))
            self._metrics.prefix_hits.inc(sequence.cached_tokens or 0)
        # Age decides who gives way, and one that was set aside is older than those admitted since.
        running = sorted([*self._running.values(), sequence], key=lambda s: s.arrival)
        self._running.clear()
        self._running.update({s.arrival: s for s in running})
        sequence.report_prefill()

    def _chunk_of(self, step_plan: Plan) -> PromptChunk | None:
        if step_plan.prefill is None:
            return None
        sequence = self._running[step_plan.prefill.id]
        assert sequence.cache is not None
        start = sequence.cache.num_tokens
        tokens = sequence.tokens[start : start + step_plan.prefill.num_tokens]
        return PromptChunk(sequence.arrival, sequence.cache, tokens)

    def _prefill(self, chunk: PromptChunk) -> None:
        has_streams = self._has_streams()
        began_s = time.perf_counter()
        self._runner.prefill(chunk.cache, chunk.tokens)
        self._speeds.count_chunk(len(chunk.tokens), time.perf_counter() - began_s, has_streams=has_streams)
        self._after_chunk(chunk)

    def _after_chunk(self, chunk: PromptChunk) -> None:
        sequence = self._running[chunk.id]
        self._resume.after_chunk(sequence)
        self._num_chunks += 1
        self._metrics.prefill_tokens.inc(len(chunk.tokens))
        sequence.report_prefill()

    def _make_room(self, slice_s: float, *, has_grown: bool) -> None:
        """Streams wait for so long at most."""
        self._capacity.make_room(slice_s if self._has_streams() else math.inf, has_grown=has_grown)

    def _launch(self, keys: tuple[int, ...], riding: PromptChunk | None) -> Launched | None:
        if not keys:
            return None
        launched = self._runner.launch([self._row(self._running[key]) for key in keys], self._in_flight, riding)
        for key in keys:
            self._running[key].num_launched += 1
        return launched

    def _row(self, sequence: Sequence) -> Row:
        assert sequence.cache is not None
        if sequence.prefill_left:
            # Rather none than wrong ones: its last token would take the place of one that is not computed yet.
            raise RuntimeError(f"{sequence.prefill_left} tokens of a prompt are not computed: it cannot decode yet")
        known = sequence.num_launched == sequence.num_generated
        token = sequence.tokens[-1] if known else None
        return Row(sequence.arrival, sequence.cache, sequence.sampler(self._vocab_size), token)

    # Postprocess.

    def _postprocess(self, done: list[Launched]) -> None:
        for step in done:
            tokens = step.sampled.read()
            # Rows of sequences that have ended since were computed for nothing.
            kept = [(row, key) for row, key in enumerate(step.ids) if key in self._running]
            is_last = step is done[-1] and self._in_flight is None
            self._speeds.count_step(step, len(kept), is_last=is_last, has_prompts=self._has_prompts())
            for row, key in kept:
                self._accept(self._running[key], tokens[row], step, row)

    def _accept(self, sequence: Sequence, token: int, step: Launched, row: int) -> None:
        logprobs = step.sampled.logprobs.get(row)
        before_s = sequence.last_token_s
        sequence.accept(token, logprobs.read(token) if logprobs else None, self._detokenizer)
        self._metrics.generation_tokens.inc()
        self._resume.after_step(sequence)
        if sequence.last_token_s is not None and before_s is not None:
            self._metrics.inter_token_s.observe(sequence.last_token_s - before_s)
        elif sequence.last_token_s is not None:
            self._metrics.first_token_s.observe(sequence.last_token_s - sequence.submitted_s)
        if sequence.finish_reason is not None:
            self._finish(sequence, sequence.finish_reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._remove(sequence)
        self._metrics.requests.labels(outcome=reason).inc()
        self._metrics.request_s.observe(time.monotonic() - sequence.submitted_s)
        sequence.end(Finished(reason, sequence.usage))

    def _fail(self, sequence: Sequence, failed: Failed) -> None:
        self._remove(sequence)
        self._metrics.requests.labels(outcome="failed").inc()
        sequence.end(failed)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.arrival in self._running:
            # The batch keeps the caches of its rows alive, and recurrent state.
            self._runner.disband()
            del self._running[sequence.arrival]
            self._resume.end(sequence)
        else:
            self._resume.forget(sequence)
            self._entrance.let_go()
            self._waiting.remove(sequence)
