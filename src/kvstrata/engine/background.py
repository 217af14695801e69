"""Pacing of background work between steps.

A failing job concerns one entry and is contained there. A failure beyond that leaves the cache in doubt: the engine
continues with an empty one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

from kvstrata.engine.admission import MemoryAccount
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.scheduler import CHUNK_S
from kvstrata.engine.sequence import SequenceTable
from kvstrata.engine.speeds import StepSpeeds
from kvstrata.layers.buffers import without_cache
from kvstrata.prefix_cache.ladder import HIGH
from kvstrata.prefix_cache.prefix_cache import Stock

# After work for which no client waits, streams go on without any for so many times as long: where steps are short it
# would else take more time than they do, because it also waits for the step that is in flight.
REST = 4.0

REST_UNDER_PRESSURE = 1.0  # while memory fills up

# Where the next step has to be planned anew: the first slice, of the longest, and how much the next may be longer.
FIRST_SLICE = 1 / 8

MAX_GROWTH = 2.0


class BackgroundPacer:
    """`slice_s`: of work on stored KV between two decode steps."""

    def __init__(
        self,
        stock: Stock,
        sequences: SequenceTable,
        capacity: MemoryAccount,
        speeds: StepSpeeds,
        runner: ModelRunner,
        *,
        slice_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chores = stock.background
        self._room = stock.reclaimer
        self._evictor = stock.evictor
        self._leaves = stock.candidates
        self._pins = stock.pins
        self._changes = stock.requantizer
        self._failures = stock.failures
        self._sequences = sequences
        self._capacity = capacity
        self._speeds = speeds
        self._runner = runner
        self._slice_s = slice_s
        self._clock = clock
        self._awaited_slice_s = 0.0  # the last slice, if that was in a hurry
        self._rests_until_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._failures.require("slices", self._has_work, otherwise=False)

    def _has_work(self) -> bool:
        return self._chores.has_work_beside_streams if self._sequences.has_streams else self._chores.has_work

    def run_between_steps(self, *, is_awaited: bool) -> None:
        """What a client waits for may take as long as a decode step, or where no stream runs as a chunk of a prompt;
        all else must hardly be noticed."""
        self._failures.require("slices", lambda: self._work_in_step(is_awaited=is_awaited), None)

    def _work_in_step(self, *, is_awaited: bool) -> None:
        if is_awaited and not self._sequences.has_streams:
            self.run_slice(CHUNK_S)
            return
        if is_awaited or self._changes.is_running:
            self._awaited_slice_s = self._next_awaited_slice_s(max(self._slice_s, self._speeds.step_s))
            self.run_slice(self._awaited_slice_s)
            return
        self._awaited_slice_s = 0.0
        began_s = self._clock()
        may_rest = self._sequences.has_streams and not self._chores.is_asked_for
        if may_rest and began_s < self._rests_until_s:
            return
        self.run_slice(self._slice_s)
        ended_s = self._clock()
        self._rests_until_s = ended_s + (REST_UNDER_PRESSURE if self._is_memory_short else REST) * (ended_s - began_s)

    def _next_awaited_slice_s(self, most_s: float) -> float:
        """What is stored in another way has to be found anew for the next step: both together take no longer."""
        if not self._runner.plans_steps:
            return most_s
        if not self._awaited_slice_s:
            return FIRST_SLICE * most_s
        fits = most_s / (self._awaited_slice_s + self._runner.planning_s)
        return max(FIRST_SLICE * most_s, self._awaited_slice_s * min(MAX_GROWTH, fits))

    @property
    def _is_memory_short(self) -> bool:
        """Memory fills up: what is done in time need not be thrown away. Or more is stored than should be."""
        total_bytes = self._capacity.budget.total_bytes
        return self._used_bytes > HIGH * total_bytes or not self._room.fits(total_bytes)

    @property
    def _used_bytes(self) -> int:
        return self._capacity.running_bytes + self._capacity.cached_bytes

    def run_slice(self, slice_s: float) -> None:
        """For about so long."""
        self._failures.require("slices", lambda: self._work(slice_s), None)

    def _work(self, slice_s: float) -> None:
        self._speeds.note_background_work()
        was_rewriting = self._chores.is_transcoding
        with without_cache() if was_rewriting else nullcontext():
            self._chores.run_background(slice_s)
        self.reclaim_memory(0.0, has_grown=False)
        if was_rewriting:
            self._sequences.drop_replaced_spans()

    def step_down_early(self) -> None:
        """Memory fills up: begin in time."""
        self._failures.require("reclaims", self._relieve, None)

    def _relieve(self) -> None:
        self._pins.expire()
        self._room.step_down_early(self._used_bytes, self._capacity.budget.total_bytes)

    def reclaim_memory(self, slice_s: float, *, has_grown: bool) -> None:
        """Streams wait for so long at most, and no request does while there is memory: the chores do it. What has not
        stepped down by then goes, where a sequence has grown; while one is being encoded it takes more for a moment,
        which is no reason to let others go."""
        self._failures.require("reclaims", lambda: self._make_room(slice_s, has_grown=has_grown), None)

    def _make_room(self, slice_s: float, *, has_grown: bool) -> None:
        limit_bytes = self._capacity.budget.total_bytes - self._capacity.running_bytes
        if not self._sequences.has_streams:
            slice_s = math.inf
        most_bytes = limit_bytes if has_grown or not self._chores.is_transcoding else None
        self._room.shrink_to(limit_bytes, slice_s, most_bytes=most_bytes)
        if self._capacity.keeps_growth_free:
            # A stream waits for no disk when it grows: for the next that does there should be room by then.
            self._room.shrink_to(limit_bytes - self._capacity.largest_growth_bytes(), 0.0)

    def expire(self) -> None:
        self._failures.require("reclaims", self._expire, None)

    def _expire(self) -> None:
        self._pins.expire()
        self._evictor.expire()

    def seconds_to_expiry(self) -> float:
        """Until something stored has to go or may, unless something comes."""
        return self._failures.require(
            "reclaims", lambda: min(self._leaves.seconds_to_expiry(), self._pins.seconds_to_expiry()), math.inf
        )
