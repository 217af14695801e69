"""Pacing of background work between steps.

A failing job concerns one entry and is contained there. A failure beyond that leaves the cache in doubt: the engine
continues with an empty one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from kvstrata.engine.admission import MemoryAccount
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.scheduler import CHUNK_S
from kvstrata.engine.sequence import SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.kv.buffers import without_cache
from kvstrata.prefix_cache.ladder import HIGH
from kvstrata.prefix_cache.prefix_cache import PrefixCache

# After work that no client waits for, streams run without any for this multiple of its time. Without the rest, where
# steps are short, the work would take more time than the steps, because it also waits for the pending step.
REST_FACTOR = 4.0

REST_FACTOR_UNDER_PRESSURE = 1.0  # while memory fills up

# Where a slice makes the next step be planned again: the first slice, as a share of the longest one, and the largest
# growth from one slice to the next.
FIRST_SLICE = 1 / 8

MAX_GROWTH = 2.0

# Slice while the engine is idle. After each slice the engine thread checks its inbox.
IDLE_SLICE_S = 0.002


@dataclass(frozen=True)
class BackgroundSlice:
    """Time for background work between two steps. `is_awaited`: no rest follows."""

    seconds: float
    is_awaited: bool


class BackgroundPacer:
    """Pacing of background work: how long a slice takes between two steps, and when the work rests.

    `slice_s`: length of a slice between two decode steps that no client waits for.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache,
        sequences: SequenceTable,
        memory: MemoryAccount,
        speeds: StepSpeeds,
        runner: ModelRunner,
        *,
        slice_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix_cache = prefix_cache
        self._reclaimer = prefix_cache.reclaimer
        self._evictor = prefix_cache.evictor
        self._candidates = prefix_cache.candidates
        self._pins = prefix_cache.pins
        self._conversations = prefix_cache.conversations
        self._requantizer = prefix_cache.requantizer
        self._failures = prefix_cache.failures
        self._sequences = sequences
        self._memory = memory
        self._speeds = speeds
        self._runner = runner
        self._slice_s = slice_s
        self._clock = clock
        self._awaited_slice_s = 0.0  # length of the last slice, if a client waited for it
        self._rests_until_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._failures.attempt_or_break("slices", self._has_work, otherwise=False)

    def _has_work(self) -> bool:
        cache = self._prefix_cache
        return cache.has_work_beside_streams if self._sequences.has_streams else cache.has_work

    def run_between_steps(self, *, is_awaited: bool) -> None:
        """Run a slice between two steps. `is_awaited`: a client waits for the work, so that the slice may take as long
        as a decode step, or as a prompt chunk where no stream runs; any other slice must hardly be noticed."""
        self._failures.attempt_or_break("slices", lambda: self._run_between_steps(is_awaited=is_awaited), None)

    def _run_between_steps(self, *, is_awaited: bool) -> None:
        began_s = self._clock()
        next_slice = self._next_slice(began_s, is_awaited=is_awaited)
        if next_slice is None:
            return
        self.run_slice(next_slice.seconds)
        if not next_slice.is_awaited:
            ended_s = self._clock()
            rest_factor = REST_FACTOR_UNDER_PRESSURE if self._is_memory_short else REST_FACTOR
            self._rests_until_s = ended_s + rest_factor * (ended_s - began_s)

    def _next_slice(self, now_s: float, *, is_awaited: bool) -> BackgroundSlice | None:
        """Return the next slice between two steps. None: the work rests."""
        if is_awaited and not self._sequences.has_streams:
            return BackgroundSlice(CHUNK_S, is_awaited=True)
        if is_awaited or self._requantizer.is_running:
            self._awaited_slice_s = self._next_awaited_slice_s(max(self._slice_s, self._speeds.step_s))
            return BackgroundSlice(self._awaited_slice_s, is_awaited=True)
        self._awaited_slice_s = 0.0
        may_rest = self._sequences.has_streams and not self._prefix_cache.has_awaited_work
        if may_rest and now_s < self._rests_until_s:
            return None
        return BackgroundSlice(self._slice_s, is_awaited=False)

    def _next_awaited_slice_s(self, max_s: float) -> float:
        """Return the length of the next slice that a client waits for. A step that reads changed spans is planned
        again: the slice and that plan together take at most `max_s`."""
        if not self._runner.plans_steps:
            return max_s
        if not self._awaited_slice_s:
            return FIRST_SLICE * max_s
        growth = max_s / (self._awaited_slice_s + self._runner.planning_s)
        return max(FIRST_SLICE * max_s, self._awaited_slice_s * min(MAX_GROWTH, growth))

    @property
    def _is_memory_short(self) -> bool:
        """Whether memory fills up, or more is cached than the limit. KV that is transcoded or written in time need not
        be evicted."""
        total_bytes = self._memory.budget.total_bytes
        return self._used_bytes > HIGH * total_bytes or not self._reclaimer.fits(total_bytes)

    @property
    def _used_bytes(self) -> int:
        return self._memory.running_bytes + self._memory.cached_bytes

    def run_idle(self) -> None:
        """Run a slice while no sequence waits or runs."""
        self.run_slice(IDLE_SLICE_S)

    def run_slice(self, slice_s: float) -> None:
        """Run background work for about `slice_s`."""
        self._failures.attempt_or_break("slices", lambda: self._run_slice(slice_s), None)

    def _run_slice(self, slice_s: float) -> None:
        self._speeds.note_background_work()
        is_transcoding = self._prefix_cache.is_transcoding
        with without_cache() if is_transcoding else nullcontext():
            self._prefix_cache.run_background(slice_s)
        self.reclaim_memory(0.0, has_grown=False)
        self._requantizer.update_progress()  # reclaiming may have run the last job of a change
        if is_transcoding:
            self._sequences.drop_replaced_spans()

    def step_down_early(self) -> None:
        """Have spans step down before memory is full."""
        self._failures.attempt_or_break("reclaims", self._step_down_early, None)

    def _step_down_early(self) -> None:
        self._pins.expire()
        self._reclaimer.step_down_early(self._used_bytes, self._memory.budget.total_bytes)

    def reclaim_memory(self, slice_s: float, *, has_grown: bool) -> None:
        """Reclaim what running sequences need. Streams wait at most `slice_s`; without streams there is no limit.

        `has_grown`: a sequence took memory, so that entries which have not stepped down by then are evicted. Otherwise
        entries that are being encoded may exceed the limit for a moment: that is no reason to evict others.
        """
        self._failures.attempt_or_break("reclaims", lambda: self._reclaim_memory(slice_s, has_grown=has_grown), None)

    def _reclaim_memory(self, slice_s: float, *, has_grown: bool) -> None:
        limit_bytes = self._memory.budget.total_bytes - self._memory.running_bytes
        if not self._sequences.has_streams:
            slice_s = math.inf
        hard_limit_bytes = limit_bytes if has_grown or not self._prefix_cache.is_transcoding else None
        self._reclaimer.shrink_to(limit_bytes, slice_s, hard_limit_bytes=hard_limit_bytes)
        if self._memory.keeps_growth_free:
            # A growing stream waits for no disk: memory for the next growth should be free by then.
            self._reclaimer.shrink_to(limit_bytes - self._memory.largest_growth_bytes(), 0.0)

    def expire(self) -> None:
        """Drop pins, entries and conversations whose time is over."""
        self._failures.attempt_or_break("reclaims", self._expire, None)

    def _expire(self) -> None:
        self._pins.expire()
        self._evictor.expire()
        self._conversations.expire()

    def seconds_to_expiry(self) -> float:
        """Return the time until the next pin, entry or session expires, unless something comes."""
        expiring = (self._candidates, self._pins, self._conversations)
        return self._failures.attempt_or_break(
            "reclaims", lambda: min(each.seconds_to_expiry() for each in expiring), math.inf
        )
