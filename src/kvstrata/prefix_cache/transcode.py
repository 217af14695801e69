"""Transcoder: brings entries to their target format, then joins, offloads and shares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvstrata.kv.precision_plan import PrecisionPlan
from kvstrata.prefix_cache.entries import DirtySets, Entry, PrecisionTarget
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import FailureLog, Job, JobQueue
from kvstrata.prefix_cache.offload import Offloader
from kvstrata.prefix_cache.precision import PrecisionPolicy, StepDown
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.sharing import Sharer

# Most spans from the first token to the end of a conversation: a few long spans are read faster than many short ones.
MAX_SPANS = 8


class PendingBytes:
    """Running sum of the bytes that waiting jobs are about to free. `is_waiting` says whether an entry's job waits, and
    `bytes_of` how many bytes it would free. A reading costs as much as the entries that have changed since the last."""

    def __init__(
        self, dirty_sets: DirtySets, is_waiting: Callable[[Entry], bool], bytes_of: Callable[[Entry], int]
    ) -> None:
        self._changed = dirty_sets.new_dirty_set(self._forget_entry)
        self._is_waiting = is_waiting
        self._bytes_of = bytes_of
        self._shares: dict[Entry, int] = {}
        self._total = 0

    def nbytes(self) -> int:
        for entry in self._changed.drain():
            self._forget_entry(entry)
            if self._is_waiting(entry):
                self._shares[entry] = self._bytes_of(entry)
                self._total += self._shares[entry]
        return self._total

    def _forget_entry(self, entry: Entry) -> None:
        self._total -= self._shares.pop(entry, 0)


class Transcoder:
    """Queue of entries that have to change their format.

    `sharer` writes finished entries to the tier that other servers share; None where there is no such tier.
    `writes_after_reply`: finished entries are offloaded at once instead of at their eviction."""

    def __init__(
        self,
        table: EntryTable,
        precision: PrecisionPolicy,
        offloader: Offloader,
        sharer: Sharer | None,
        failures: FailureLog,
        *,
        writes_after_reply: bool,
    ) -> None:
        self._table = table
        self.precision = precision
        self._counters = failures.counters
        self._failures = failures
        self._offloader = offloader
        self._sharer = sharer
        self._writes_after_reply = writes_after_reply
        self._pending = PendingBytes(table.dirty_sets, self._is_waiting, precision.pending_bytes)
        self.jobs = JobQueue(
            self._make_job, self._finish_entry, self._set_stuck, table.dirty_sets.mark_dirty, failures.breaking_on_error
        )

    def retarget(self, entry: Entry, target: PrecisionTarget | None) -> None:
        """Give an entry a target of its own, or with None the target of all entries, and queue the work. A job that has
        begun goes on to its end first; `jobs.discard` stops it."""
        self._table.set_target(entry, target)
        self.review(entry)

    def review(self, entry: Entry) -> None:
        """Queue an entry that has changed where its format differs from its target now."""
        self._table.dirty_sets.mark_dirty(entry)
        try:
            if entry in self._table.entries and self.precision.pending_plan(entry) is not None:
                self.jobs.add(entry)
        except Exception as error:  # noqa: BLE001
            # A failed review must not reach the sequence that writes or leases the entry.
            self._set_stuck(entry, error)

    def review_ended(self, entry: Entry) -> None:
        """Review an entry that no sequence writes any more, and offload and share it at once where it has no job.
        Models whose layers hold states alone never have one."""
        self.review(entry)
        if not self.jobs.has(entry):
            self._hand_over(entry)

    def apply_step_downs(self, chosen: Iterable[StepDown]) -> None:
        """Apply the step-down policy's decisions: the entries get lower targets, and jobs do the work."""
        for each in chosen:
            self._counters["stepped_down_spans"] += 1
            before = each.entry.target
            sealed_to = None if before is None else before.sealed_to
            self.retarget(each.entry, PrecisionTarget(each.plan, sealed_to=sealed_to))

    def finish_path(self, leaf: Node[Entry], until_s: float = math.inf) -> None:
        """Transcode a leaf's span until `until_s`, with the spans before it that still use their owners' buffers or
        stayed raw for being short. Transcoded spans are joined: `leaf.payload` may be another entry afterwards."""
        for entry in dict.fromkeys(node.payload for node in leaf.path()):
            is_own = entry is leaf.payload or self.precision.was_short(entry)
            if not entry.is_running and (entry.span.is_live or is_own):
                self.jobs.run_entry(entry, until_s)

    def is_awaited(self, entry: Entry) -> bool:
        """Whether a request that would resume from an entry has to wait for the entry's job: a span that is to have
        fewer bits gets them first. No request waits for a change that a client requested, or for the encoding of a
        running sequence: both proceed under their readers."""
        if not self.jobs.has(entry) or entry.target is not None or entry.is_running:
            return False
        return self.jobs.has_begun(entry) or not self.precision.target_plan(entry).is_raw

    def pending_bytes(self) -> int:
        """Return how many bytes the waiting jobs are about to free."""
        return self._pending.nbytes()

    def _is_waiting(self, entry: Entry) -> bool:
        return self.jobs.has(entry)

    def _make_job(self, entry: Entry) -> Job | None:
        plan = self.precision.pending_plan(entry) if entry in self._table.entries else None
        return None if plan is None else self._transcode(entry, plan)

    def _transcode(self, entry: Entry, plan: PrecisionPlan) -> Job:
        job, before_bytes = self.precision.job(entry, plan), entry.span.kv_bytes
        if entry.target is not None and entry.target.sealed_to is not None:
            self._table.set_target(entry, replace(entry.target, sealed_to=None))  # the job has it
        if self.precision.config.archives_planes and entry.target is not None and not entry.is_upward:
            # The dropped planes can be restored from the disk later.
            yield from self._offloader.archive(entry)
            if entry not in self._table.entries:
                return
        for _ in job:
            self._table.recount(entry)
            yield
            if entry not in self._table.entries:
                return
        self._table.recount(entry)
        if not plan.is_raw:
            self._counters["encoded_spans"] += 1
            self._counters["encoded_freed_bytes"] += max(0, before_bytes - entry.span.kv_bytes)
            if self.precision.was_short(entry):
                # A tier that has the entry has it raw: it is written again in these bits.
                self._table.set_archived(entry, None)

    def _finish_entry(self, entry: Entry) -> None:
        """End the job of an entry: join its span with the neighbours, then offload and share the result."""
        # The target may have changed during the job, or the entry may have grown.
        self.review(entry)
        if entry.is_running or not entry.nodes:
            return
        last = entry.last_node
        for grown in self._table.join_spans(last, MAX_SPANS):
            self.review(grown)
        # The entry may have been joined to the one before it.
        self._hand_over(last.payload)

    def _hand_over(self, entry: Entry) -> None:
        """Offload and share an entry that has ended and has reached its target."""
        if self._writes_after_reply:
            self._offloader.add_entry(entry)
        if self._sharer is not None:
            self._sharer.add_entry(entry)

    def _set_stuck(self, entry: Entry, error: Exception) -> None:
        """Leave an entry as it is for good after a failure. Each of its layers is whole, in its old format or the
        new one."""
        self._table.set_stuck(entry)
        self._failures.record_failure("rewrites", error)
