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
from kvstrata.engine.prefix_lookup import PrefixLookup
from kvstrata.engine.request import Failed
from kvstrata.engine.scheduler import SequenceInput, StepLimits, StepPlan, buffer_tokens, schedule
from kvstrata.engine.sequence import Sequence, SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.prefix_cache.entries import CachedPrefix, Entry, Lease
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.prefix_cache import PrefixCache

# Longest rest of a stalled engine before it schedules again.
MAX_REST_S = 1.0

# Waiting requests that are refreshed beyond those that could be admitted: some may wait for the prefill of another.
MAX_FOLLOWERS = 16


class MemoryAccount:
    """Account of the memory for KV: bytes of running sequences, of cached KV, and what sequences may take.

    `keeps_growth_free`: requests that start leave space for the next growth of a running sequence.
    """

    def __init__(
        self,
        budget: Budget,
        running: Mapping[int, Sequence],
        table: EntryTable,
        prefixes: PrefixLookup,
        *,
        buffer_step_tokens: int,
        keeps_growth_free: bool,
    ) -> None:
        self.budget = budget  # replaced when the precision of new spans changes
        self._running = running
        self._table = table
        self._prefixes = prefixes
        self._buffer_step_tokens = buffer_step_tokens
        self.keeps_growth_free = keeps_growth_free

    @property
    def running_bytes(self) -> int:
        """Bytes of running sequences, with spans of a failed entry table that they read."""
        own_bytes = sum(
            self.budget.bytes_held_by(s.cache, s.kv_format) for s in self._running.values() if s.cache is not None
        )
        return own_bytes + self._prefixes.orphaned_bytes

    @property
    def cached_bytes(self) -> int:
        return self._table.nbytes

    @property
    def free_or_evictable_bytes(self) -> int:
        """Bytes that running sequences and leased entries leave. Evictable cache entries count as free memory."""
        leased_bytes = self._table.nbytes - self._table.evictable_bytes
        return self.budget.total_bytes - self.running_bytes - leased_bytes

    def tokens_at_start(self, sequence: Sequence, cached_tokens: int, leased_bytes: int = 0) -> int:
        """Return the capacity of the KV cache that a sequence starts with. `leased_bytes`: bytes of its cached prefix
        that its lease will keep from eviction, if it does not hold the lease yet."""
        known = len(sequence.tokens) - 1 - cached_tokens
        buffer = buffer_tokens(known, sequence.tokens_wanted, self._buffer_step_tokens)
        left_bytes = None if self._running else self.free_or_evictable_bytes - leased_bytes - self.budget.fixed_bytes
        return max(known + 1, self.budget.buffer_tokens(known + buffer, 0, sequence.kv_format, left_bytes))

    def fitting_tokens_at_start(self, sequence: Sequence, cached_tokens: int) -> int:
        """Return the same, or 0 where other sequences need the memory. A sequence that runs alone fits: that was
        checked when it arrived."""
        tokens = self.tokens_at_start(sequence, cached_tokens)
        fits = not self._running or self.budget.bytes_for(tokens, sequence.kv_format) <= self.free_or_evictable_bytes
        return tokens if fits else 0

    def bytes_at_start(self, sequence: Sequence, cached_tokens: int) -> int:
        return self.budget.bytes_for(self.tokens_at_start(sequence, cached_tokens), sequence.kv_format)

    def admission_bytes(self, sequence: Sequence, cached: CachedPrefix) -> int:
        """Return all bytes that admission takes: the KV cache of the sequence, and evictable entries that it leases."""
        leased_bytes = sum(entry.nbytes for entry in cached.entries if entry.is_evictable)
        tokens = self.tokens_at_start(sequence, cached.num_tokens, leased_bytes)
        return self.budget.bytes_for(tokens, sequence.kv_format) + leased_bytes

    def tokens_at_growth(self, sequence: Sequence) -> int:
        """Return the number of tokens by which the KV buffer of a sequence grows next."""
        assert sequence.cache is not None
        capacity = sequence.cache.capacity
        buffer = buffer_tokens(capacity, sequence.tokens_wanted, self._buffer_step_tokens)
        left_bytes = self.free_or_evictable_bytes if len(self._running) == 1 else None
        return max(1, self.budget.buffer_tokens(buffer, capacity, sequence.kv_format, left_bytes))

    def growth_bytes(self, sequence: Sequence) -> int:
        assert sequence.cache is not None
        return self.budget.growth_bytes(self.tokens_at_growth(sequence), sequence.cache.capacity, sequence.kv_format)

    def largest_growth_bytes(self) -> int:
        """Return the bytes of the largest KV buffer that a running sequence may add next."""
        growing = [s for s in self._running.values() if s.cache and s.tokens_wanted > s.cache.free_tokens]
        return max(map(self.growth_bytes, growing), default=0)

    def bytes_beside_running(self, growing_bytes: int) -> int:
        """Return the bytes for requests that start, if running sequences grow by `growing_bytes`."""
        if not growing_bytes and self.keeps_growth_free:
            growing_bytes = self.largest_growth_bytes()
        return self.budget.total_bytes - self.running_bytes - growing_bytes


@dataclass(frozen=True)
class Unservable:
    """Waiting request that memory has no space for, and how it ends."""

    sequence: Sequence
    failure: Failed | None  # None: its reply ends with the tokens that it has


# unchanged  nothing was to be done, or something else has to happen first
# shortened  some of the cached prefix was evicted: schedule again
Shortened = Literal["unchanged", "shortened"] | Unservable


@dataclass(frozen=True)
class Schedule:
    """Plan of a step, and the request that has to end before a step can be planned for waiting requests."""

    plan: StepPlan
    unservable: Unservable | None = None


class Admission:
    """Builds the input of the scheduler, and reclaims memory for the requests that it admits.

    `max_batched_context`: most tokens that several chunks of one pass may read. `mixes`: chunks ride along with a
    decode step, and several with each other.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache,
        sequences: SequenceTable,
        memory: MemoryAccount,
        prefixes: PrefixLookup,
        speeds: StepSpeeds,
        *,
        max_running: int,
        max_batched_context: int,
        mixes: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reclaimer = prefix_cache.reclaimer
        self._leases = prefix_cache.leases
        self._failures = prefix_cache.failures
        self._patience_s = prefix_cache.disk.patience_s  # longest wait of a request for the disk
        self._sequences = sequences
        self.memory = memory
        self._prefixes = prefixes
        self._speeds = speeds
        self._max_running = max_running
        self._max_batched_context = max_batched_context
        self._mixes = mixes
        self._clock = clock
        self._lease: Lease | None = None  # on the cached prefixes of waiting requests, while memory is reclaimed
        self._disk_waits: dict[int, float] = {}  # by id: since when a request waits for the disk to take KV
        self.waits_for_memory = False  # a request waits for memory, or until its prefix is encoded

    def schedule(self) -> Schedule:
        """Plan the next step. The caller ends an unservable request, and schedules again."""
        running = self._sequences.running
        waiting, awaits_encoding = self._refresh_waiting()
        plan = self._plan(waiting)
        while not running and not plan.admit:
            shortened = self._shorten_oldest(waiting)
            if isinstance(shortened, Unservable):
                return Schedule(plan, shortened)
            if shortened == "unchanged":
                break
            waiting, awaits_encoding = self._refresh_waiting()
            plan = self._plan(waiting)
        if plan.preempt and len(running) == 1 and self._drop_checkpoints_of_only_sequence():
            plan = self._plan(waiting)
        num_fitting = self._reclaim_for_admitted(plan)
        lacks_memory = num_fitting < len(plan.admit)
        self.waits_for_memory = lacks_memory or awaits_encoding
        if lacks_memory:
            plan = self._plan([each for each in waiting if each.id in plan.admit[:num_fitting]])
        return Schedule(plan)

    def plan_running(self) -> StepPlan:
        """Plan the next step of the running sequences alone."""
        return self._plan([])

    def _plan(self, waiting: list[SequenceInput]) -> StepPlan:
        running = [self._running_input(sequence) for sequence in self._sequences.running.values()]
        return schedule(waiting, running, self._limits())

    def _limits(self) -> StepLimits:
        speeds, num_streams = self._speeds, self._sequences.num_streams
        return StepLimits(
            free_bytes=self.memory.free_or_evictable_bytes,
            max_running=self._max_running,
            chunk_tokens=speeds.chunk_tokens(),
            chunk_tokens_beside_streams=speeds.chunk_tokens_beside_streams(num_streams),
            mixes=self._mixes,
            num_passes=speeds.num_passes,
            max_batched_tokens=speeds.pass_cost.pass_tokens,
            max_batched_context=self._max_batched_context,
        )

    # Input of the scheduler.

    def _refresh_waiting(self) -> tuple[list[SequenceInput], bool]:
        """Refresh the cached prefixes of the requests that could be admitted now, and of a few more: the others need
        no lookup yet. Return their inputs, and whether one of them waits until its prefix is encoded."""
        running, prefill_tokens_s = self._sequences.running, self._speeds.alone.tokens_s
        ahead = [s for s in running.values() if s.prefill_left]
        waiting: list[SequenceInput] = []
        any_awaits_encoding = False
        for sequence in self._sequences.waiting[: max(0, self._max_running - len(running)) + MAX_FOLLOWERS]:
            cached = self._prefixes.refresh(sequence, prefill_tokens_s)
            awaits_encoding = self._prefixes.awaits_encoding(sequence)
            any_awaits_encoding = any_awaits_encoding or awaits_encoding
            is_blocked = awaits_encoding or self._prefixes.is_blocked(sequence, ahead)
            waiting.append(self._waiting_input(sequence, cached, is_blocked=is_blocked))
            ahead.append(sequence)
        return waiting, any_awaits_encoding

    def _waiting_input(self, sequence: Sequence, cached: CachedPrefix, *, is_blocked: bool) -> SequenceInput:
        return SequenceInput(
            sequence.id,
            nbytes=self.memory.admission_bytes(sequence, cached),
            prefill_left=len(sequence.tokens) - 1 - cached.num_tokens,
            chunk_limit=self._prefixes.chunk_limit(sequence, cached.num_tokens),
            context=cached.num_tokens,
            is_blocked=is_blocked,
        )

    def _running_input(self, sequence: Sequence) -> SequenceInput:
        assert sequence.cache is not None
        return SequenceInput(
            sequence.id,
            nbytes=self.memory.budget.bytes_held_by(sequence.cache, sequence.kv_format),
            prefill_left=sequence.prefill_left,
            chunk_limit=self._prefixes.chunk_limit(sequence, sequence.num_computed),
            context=sequence.num_computed,
            grow_bytes=self._grow_bytes(sequence),
            is_complete=sequence.tokens_wanted == 0,
        )

    def _grow_bytes(self, sequence: Sequence) -> int:
        """Return the bytes that a sequence needs before its next token; 0: its KV buffer has space."""
        assert sequence.cache is not None
        is_full = not sequence.cache.free_tokens and sequence.tokens_wanted > 0
        return self.memory.growth_bytes(sequence) if is_full else 0

    # Memory for requests that may start.

    def _shorten_oldest(self, waiting: list[SequenceInput]) -> Shortened:
        """Evict some of the cached prefix of the oldest request that is not blocked, where it does not fit though no
        sequence runs: no other request will start before it."""
        oldest = next((each for each in waiting if not each.is_blocked), None)
        free_bytes = self.memory.free_or_evictable_bytes
        if oldest is None or oldest.nbytes <= free_bytes:
            return "unchanged"
        if any(map(self._prefixes.awaits_tier, self._sequences.waiting)):
            return "unchanged"
        self._release_lease()  # entries of the lease may be evicted
        sequence, budget = self._sequences.waiting_with_id(oldest.id), self.memory.budget
        least_bytes = budget.bytes_for(len(sequence.tokens), sequence.kv_format)
        prompt, need_bytes = sequence.lookup_ids, oldest.nbytes - free_bytes
        salt, keeps_used = sequence.request.salt, least_bytes > free_bytes
        has_shortened = self._failures.attempt_or_break(
            "reclaims",
            lambda: self._reclaimer.evict_own_prefix(prompt, salt, need_bytes, keeps_used=keeps_used),
            otherwise=False,
        )
        if has_shortened:
            return "shortened"
        if self._failures.is_broken:
            return "unchanged"  # an empty cache will leave enough memory
        if sequence.num_generated:
            return Unservable(sequence, None)
        message = pinned_memory_message(least_bytes, free_bytes, budget.total_bytes)
        return Unservable(sequence, Failed(message, "pinned"))

    def _drop_checkpoints_of_only_sequence(self) -> bool:
        """Drop the checkpoints of the only running sequence, which has no memory to grow."""
        (sequence,) = self._sequences.running.values()
        return self._prefixes.drop_checkpoints(sequence)

    def _reclaim_for_admitted(self, plan: StepPlan) -> int:
        """Reclaim memory for the admitted requests, in their order; return how many of them may start now. Where no
        stream decodes, all work for that is done at once."""
        sequences = self._sequences
        admitted = [sequences.waiting_with_id(each) for each in plan.admit]
        if not admitted:
            self._release_lease()
            return 0
        need_bytes = [
            self.memory.bytes_at_start(sequence, self._prefixes.cached_prefix(sequence).num_tokens)
            for sequence in admitted
        ]
        growing_bytes = sum(self._grow_bytes(sequences.running[each]) for each in plan.grow)
        limit_bytes = self.memory.bytes_beside_running(growing_bytes)
        return self.reclaim_for(admitted, need_bytes, limit_bytes, slice_s=0.0 if sequences.has_streams else math.inf)

    def reclaim_for(
        self, requests: list[Sequence], need_bytes: Iterable[int], limit_bytes: int, *, slice_s: float
    ) -> int:
        """Reclaim memory for requests in their order; return how many of them may start now.

        `need_bytes`: bytes that each of them takes; `limit_bytes`: bytes that running sequences leave; `slice_s`: time
        for work here and now. Return 0 where that fails: the requests start when the engine has an empty cache.
        """
        sizes = tuple(need_bytes)
        return self._failures.attempt_or_break(
            "reclaims", lambda: self._reclaim_for(requests, sizes, limit_bytes, slice_s), 0
        )

    def _reclaim_for(self, requests: list[Sequence], sizes: tuple[int, ...], limit_bytes: int, slice_s: float) -> int:
        if not self._reclaimer.fits(limit_bytes - sum(sizes)):
            # Some entries have to go, but none that these requests would resume from.
            self._lease_entries([entry for each in requests for entry in self._prefixes.cached_prefix(each).entries])
        for number, (request, nbytes) in enumerate(zip(requests, sizes, strict=True)):
            limit_bytes -= nbytes
            if self._must_wait(request, limit_bytes, slice_s):
                return number
        self._release_lease()
        return len(requests)

    def _must_wait(self, request: Sequence, limit_bytes: int, slice_s: float) -> bool:
        reclaimer = self._reclaimer
        shrunk = "done" if reclaimer.fits_for_now(limit_bytes) else reclaimer.shrink_to(limit_bytes, slice_s)
        fits = shrunk == "done" or reclaimer.fits_for_now(limit_bytes)
        if fits or shrunk == "steps_down":
            self._disk_waits.pop(request.id, None)
            return not fits
        self._disk_waits.setdefault(request.id, self._clock())
        return self.patience_left_s(request) > 0

    def patience_left_s(self, request: Sequence) -> float:
        """Return how long a request still waits for the disk to take evicted KV; infinity where it does not wait."""
        began_s = self._disk_waits.get(request.id)
        return math.inf if began_s is None else began_s + self._patience_s - self._clock()

    def record_start(self, sequence: Sequence) -> None:
        """Note that a sequence runs, and waits for the disk no more."""
        self._disk_waits.pop(sequence.id, None)

    def forget_sequence(self, sequence: Sequence) -> None:
        """Release what is held for waiting requests, because this one ends before it started."""
        self._disk_waits.pop(sequence.id, None)
        self._release_lease()

    def seconds_to_wait(self) -> float:
        """Return how long a stalled engine may rest before it schedules again, unless something comes."""
        waiting, prefill_tokens_s = self._sequences.waiting, self._speeds.alone.tokens_s
        seconds = [self._prefixes.seconds_to_wait(sequence, prefill_tokens_s) for sequence in waiting]
        # A request that is past its patience waits for something else.
        seconds += [left_s for left_s in map(self.patience_left_s, waiting) if left_s > 0]
        return min([MAX_REST_S, *(max(0.001, each) for each in seconds)])

    def _release_lease(self) -> None:
        held, self._lease = self._lease, None
        if held is not None:
            self._failures.attempt_or_break("releases", lambda: self._leases.release(held), None)

    def _lease_entries(self, entries: Iterable[Entry]) -> None:
        # The new lease comes first, so that no entry is evictable in between.
        before, self._lease = self._lease, self._leases.hold(entries)
        if before is not None:
            self._leases.release(before)
