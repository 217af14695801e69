"""Admission control: decides which waiting requests start now and which wait for memory.

Streams continue while requests wait: spans step down slice by slice, and evicted KV is written to the disk. A lease
protects the cached prefixes of the waiting requests meanwhile. No request waits longer for the disk than its patience,
and none waits for a disk that does not work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from kvstrata.engine.budget import Budget, pinned_memory_message
from kvstrata.engine.prefix_lookup import Fetching, Resume
from kvstrata.engine.request import Failed
from kvstrata.engine.scheduler import Running, StepLimits, StepPlan, Waiting, buffer_tokens, schedule
from kvstrata.engine.sequence import Sequence, SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.prefix_cache.entries import CachedPrefix, Entry, Lease
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.insertion import Leases
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.reclaim import Reclaimer


class MemoryAccount:
    """`keeps_growth_free`: those that come leave room for the next growth of one that runs."""

    def __init__(
        self,
        budget: Budget,
        running: Mapping[int, Sequence],
        shelf: EntryTable,
        *,
        tail_step_tokens: int,
        keeps_growth_free: bool,
    ) -> None:
        self.budget = budget  # replaced when the precision of what is to come changes
        self._running = running
        self._shelf = shelf
        self._tail_step_tokens = tail_step_tokens
        self.keeps_growth_free = keeps_growth_free

    @property
    def running_bytes(self) -> int:
        own_bytes = sum(
            self.budget.bytes_held_by(s.cache, s.kv_format) for s in self._running.values() if s.cache is not None
        )
        orphans = {span for s in self._running.values() for span in s.stored.orphans}
        return own_bytes + sum(span.nbytes for span in orphans)

    @property
    def cached_bytes(self) -> int:
        return self._shelf.nbytes

    @property
    def free_bytes(self) -> int:
        """What is stored and may go is free."""
        leased_bytes = self._shelf.nbytes - self._shelf.evictable_bytes
        return self.budget.total_bytes - self.running_bytes - leased_bytes

    # Room of one sequence.

    def tokens_at_start(self, sequence: Sequence, found_tokens: int, kept_bytes: int = 0) -> int:
        """That it gets room for when it begins. `kept_bytes`: of what it goes on from, as far as that is not leased
        yet."""
        known = len(sequence.tokens) - 1 - found_tokens
        tail = buffer_tokens(known, sequence.tokens_wanted, self._tail_step_tokens)
        room = None if self._running else self.free_bytes - kept_bytes - self.budget.fixed_bytes
        return max(known + 1, self.budget.buffer_tokens(known + tail, 0, sequence.kv_format, room))

    def fitting_tokens_at_start(self, sequence: Sequence, found_tokens: int) -> int:
        """0: others need the memory. One that is alone was seen to fit when it came."""
        tokens = self.tokens_at_start(sequence, found_tokens)
        fits = not self._running or self.budget.bytes_for(tokens, sequence.kv_format) <= self.free_bytes
        return tokens if fits else 0

    def bytes_at_start(self, sequence: Sequence, found_tokens: int) -> int:
        return self.budget.bytes_for(self.tokens_at_start(sequence, found_tokens), sequence.kv_format)

    def admission_bytes(self, sequence: Sequence, found: CachedPrefix) -> int:
        """All that it takes to let it in: its own room, and what it goes on from and would no longer be free."""
        kept_bytes = sum(entry.nbytes for entry in found.entries if entry.is_evictable)
        tokens = self.tokens_at_start(sequence, found.num_tokens, kept_bytes)
        return self.budget.bytes_for(tokens, sequence.kv_format) + kept_bytes

    def tokens_at_growth(self, sequence: Sequence) -> int:
        """That it gets room for when it grows."""
        assert sequence.cache is not None
        capacity = sequence.cache.capacity
        tail = buffer_tokens(capacity, sequence.tokens_wanted, self._tail_step_tokens)
        room = self.free_bytes if len(self._running) == 1 else None
        return max(1, self.budget.buffer_tokens(tail, capacity, sequence.kv_format, room))

    def growth_bytes(self, sequence: Sequence) -> int:
        assert sequence.cache is not None
        return self.budget.growth_bytes(self.tokens_at_growth(sequence), sequence.cache.capacity, sequence.kv_format)

    def largest_growth_bytes(self) -> int:
        """Of the longest tail that one of those that run may add next."""
        growing = [s for s in self._running.values() if s.cache and s.tokens_wanted > s.cache.free_tokens]
        return max(map(self.growth_bytes, growing), default=0)

    def bytes_beside_running(self, growing_bytes: int) -> int:
        """For those that come, if those that run take so much more."""
        if not growing_bytes and self.keeps_growth_free:
            growing_bytes = self.largest_growth_bytes()
        return self.budget.total_bytes - self.running_bytes - growing_bytes


# Waiting requests that are looked at past those that could be admitted: some may wait for the prefill of another.
MAX_FOLLOWERS = 16


class View:
    def __init__(self, sequences: SequenceTable, capacity: MemoryAccount, resume: Resume, fetching: Fetching) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._resume = resume
        self._fetching = fetching
        self.awaits_encoding = False  # a request waits until what it would go on from is encoded

    def look(self, max_running: int, prefill_tokens_s: float) -> list[Waiting]:
        """Those that could be admitted now, and a few more: what the store has for the others need not be known yet.
        Goes on with what the disk has for them."""
        running = self._sequences.running
        ahead = [s for s in running.values() if s.prefill_left]
        waiting = []
        self.awaits_encoding = False
        for sequence in self._sequences.waiting[: max(0, max_running - len(running)) + MAX_FOLLOWERS]:
            self._fetching.fetch(sequence, prefill_tokens_s)
            waiting.append(self._waiting(sequence, ahead))
            ahead.append(sequence)
        return waiting

    def _waiting(self, sequence: Sequence, ahead: list[Sequence]) -> Waiting:
        found = self._resume.found(sequence)
        awaits_encoding = self._resume.awaits_encoding(sequence)
        self.awaits_encoding = self.awaits_encoding or awaits_encoding
        return Waiting(
            sequence.arrival,
            nbytes=self._capacity.admission_bytes(sequence, found),
            prefill_left=len(sequence.tokens) - 1 - found.num_tokens,
            chunk_limit=self._resume.next_stop(sequence, found.num_tokens),
            context=found.num_tokens,
            is_blocked=awaits_encoding or self._fetching.awaits_disk(sequence) or self._resume.follow(sequence, ahead),
        )

    def running(self) -> list[Running]:
        return [self.running_one(sequence) for sequence in self._sequences.running.values()]

    def running_one(self, sequence: Sequence) -> Running:
        assert sequence.cache is not None
        complete = sequence.tokens_wanted == 0
        full = not sequence.cache.free_tokens and not complete
        return Running(
            sequence.arrival,
            nbytes=self._capacity.budget.bytes_held_by(sequence.cache, sequence.kv_format),
            prefill_left=sequence.prefill_left,
            chunk_limit=self._resume.next_stop(sequence, sequence.num_computed),
            grow_bytes=self._capacity.growth_bytes(sequence) if full else 0,
            is_complete=complete,
            context=sequence.num_computed,
        )

    def first_bytes(self, sequence: Sequence) -> int:
        """What one that waits takes when it begins."""
        return self._capacity.bytes_at_start(sequence, self._resume.found(sequence).num_tokens)

    def drop_marks(self, sequence: Sequence) -> bool:
        """Of one that has no room to grow. False: it has none."""
        return self._resume.drop_marks(sequence)


class Entrance:
    """`patience_s`: how long a request may wait for the disk."""

    def __init__(
        self,
        room: Reclaimer,
        leases: Leases,
        failures: FailureLog,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._leases = leases
        self._failures = failures
        self._patience_s = patience_s
        self._clock = clock
        self._held: Lease | None = None

    def let_in(self, requests: list[Sequence], own_bytes: Iterable[int], limit_bytes: int, *, slice_s: float) -> int:
        """How many of these, in their order, may begin now. `own_bytes`: what each of them takes; `limit_bytes`: what
        those that run leave. `slice_s`: of work that may be done here and now. None where that fails: they begin when
        the engine has an empty cache."""
        sizes = tuple(own_bytes)
        return self._failures.require("reclaims", lambda: self._let_in(requests, sizes, limit_bytes, slice_s), 0)

    def _let_in(self, requests: list[Sequence], sizes: tuple[int, ...], limit_bytes: int, slice_s: float) -> int:
        if not self._room.fits(limit_bytes - sum(sizes)):
            # Something has to go: not what these would go on from.
            found = [request.stored.found for request in requests]
            self._hold([entry for each in found if each is not None for entry in each.entries])
        for number, (request, nbytes) in enumerate(zip(requests, sizes, strict=True)):
            limit_bytes -= nbytes
            if self._has_to_wait(request, limit_bytes, slice_s):
                return number
        self.let_go()
        return len(requests)

    def _has_to_wait(self, request: Sequence, limit_bytes: int, slice_s: float) -> bool:
        shrunk = "done" if self._room.nearly_fits(limit_bytes) else self._room.shrink_to(limit_bytes, slice_s)
        is_let_in = shrunk == "done" or self._room.nearly_fits(limit_bytes)
        if is_let_in or shrunk == "steps_down":
            request.stored.awaits_room_s = None
            return not is_let_in
        if request.stored.awaits_room_s is None:
            request.stored.awaits_room_s = self._clock()
        return self.seconds_left(request) > 0

    def seconds_left(self, request: Sequence) -> float:
        """For which it still waits for the disk to take what has to go; infinite where it does not."""
        if request.stored.awaits_room_s is None:
            return math.inf
        return request.stored.awaits_room_s + self._patience_s - self._clock()

    def let_go(self) -> None:
        """No request waits here now."""
        held, self._held = self._held, None
        if held is not None:
            self._failures.require("releases", lambda: self._leases.release(held), None)

    def _hold(self, entries: Iterable[Entry]) -> None:
        before, self._held = self._held, self._leases.hold(entries)
        if before is not None:
            self._leases.release(before)


@dataclass(frozen=True)
class Unservable:
    """Waiting request that memory has no room for, and how it ends."""

    sequence: Sequence
    failure: Failed | None  # None: its reply ends with the tokens that it has


# unchanged  nothing was to be done, or something else has to happen first
# shortened  some of what it would resume from has gone: plan again
Outcome = Literal["unchanged", "shortened"] | Unservable


class FirstInLine:
    def __init__(
        self,
        sequences: SequenceTable,
        capacity: MemoryAccount,
        fetching: Fetching,
        entrance: Entrance,
        shortening: Reclaimer,
        failures: FailureLog,
    ) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._fetching = fetching
        self._entrance = entrance
        self._shortening = shortening
        self._failures = failures

    def make_room(self, waiting: list[Waiting]) -> Outcome:
        """Make room for the first request that waits for nothing else: no other will. The caller ends it where it is
        unservable."""
        first = next((w for w in waiting if not w.is_blocked), None)
        free_bytes = self._capacity.free_bytes
        if first is None or first.nbytes <= free_bytes:
            return "unchanged"
        if any(map(self._fetching.awaits_disk, self._sequences.waiting)):
            return "unchanged"
        self._entrance.let_go()  # some of what it held may go
        sequence, budget = self._sequences.waiting_at(first.id), self._capacity.budget
        least_bytes = budget.bytes_for(len(sequence.tokens), sequence.kv_format)
        prompt, need_bytes = sequence.ids()[:-1], first.nbytes - free_bytes
        salt, keeps_used = sequence.request.salt, least_bytes > free_bytes
        has_shortened = self._failures.require(
            "reclaims",
            lambda: self._shortening.evict_own_prefix(prompt, salt, need_bytes, keeps_used=keeps_used),
            otherwise=False,
        )
        if has_shortened:
            return "shortened"
        if self._failures.is_broken:
            return "unchanged"  # in an empty cache there will be room
        if sequence.num_generated:
            return Unservable(sequence, None)
        message = pinned_memory_message(least_bytes, free_bytes, budget.total_bytes)
        return Unservable(sequence, Failed(message, "pinned"))


@dataclass(frozen=True)
class Pacing:
    """How many run at once, and how much of a prompt is computed at a time."""

    speeds: StepSpeeds
    max_running: int
    joined_context: int  # that several chunks of one pass may read in all
    mixes: bool  # chunks ride along with the streams' step, and several with each other

    def terms(self, free_bytes: int, num_streams: int) -> StepLimits:
        speeds = self.speeds
        chunk_tokens, beside_tokens = speeds.chunk_tokens(), speeds.beside_tokens(num_streams)
        return StepLimits(
            *(free_bytes, self.max_running, chunk_tokens, beside_tokens),
            mixes=self.mixes,
            num_passes=speeds.num_passes,
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
        sequences: SequenceTable,
        view: View,
        first: FirstInLine,
        entrance: Entrance,
        capacity: MemoryAccount,
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
        if step_plan.preempt and len(running) == 1 and self._drop_marks():
            step_plan = self.plan_for(waiting)
        num_in = self._let_in(step_plan)
        needs_room = num_in < len(step_plan.admit)
        self.awaits_chores = needs_room or self._view.awaits_encoding
        if needs_room:
            step_plan = self.plan_for([w for w in waiting if w.id in step_plan.admit[:num_in]])
        return Schedule(step_plan)

    def plan_for(self, waiting: list[Waiting]) -> StepPlan:
        terms = self._pacing.terms(self._capacity.free_bytes, self._sequences.num_streams)
        return schedule(waiting, self._view.running(), terms)

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
        limit_bytes = self._capacity.bytes_beside_running(growing_bytes)
        return self._entrance.let_in(new, own_bytes, limit_bytes, slice_s=0.0 if sequences.has_streams else math.inf)
