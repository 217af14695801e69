"""Transcoder: brings entries to their target format, then joins, offloads and shares them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from kvstrata.prefix_cache.entries import DirtySets, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import FailureLog, Job, JobQueue
from kvstrata.prefix_cache.offload import Offloader
from kvstrata.prefix_cache.precision import PrecisionPolicy, StepDown
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.sharing import Sharer
from kvstrata.spans.plan import Plan


class PendingBytes:
    """`bytes_of` tells what work on an entry would free, `waits` whether it is to be done."""

    def __init__(self, journal: DirtySets, waits: Callable[[Entry], bool], bytes_of: Callable[[Entry], int]) -> None:
        self._changed = journal.new_dirty_set(self._forget)
        self._waits = waits
        self._bytes_of = bytes_of
        self._shares: dict[Entry, int] = {}
        self._total = 0

    def nbytes(self) -> int:
        for entry in self._changed.drain():
            self._forget(entry)
            if self._waits(entry):
                self._shares[entry] = self._bytes_of(entry)
                self._total += self._shares[entry]
        return self._total

    def _forget(self, entry: Entry) -> None:
        self._total -= self._shares.pop(entry, 0)


# On the way from the first token to the end of a conversation: few and long spans are read faster than many short ones.
MAX_SPANS = 8


class Transcoder:
    """`sharing`: to a tier that others share; None: there is none. `writes_after_reply`: to the disk, too."""

    def __init__(
        self,
        shelf: EntryTable,
        precision: PrecisionPolicy,
        spills: Offloader,
        sharing: Sharer | None,
        counters: Counter[str],
        failures: FailureLog,
        *,
        writes_after_reply: bool,
    ) -> None:
        self._shelf = shelf
        self.precision = precision
        self._counters = counters
        self._failures = failures
        self._spills = spills
        self._sharing = sharing
        self._writes_after_reply = writes_after_reply
        self._pending = PendingBytes(shelf.dirty_sets, self._waits, precision.pending_bytes)
        self.jobs = JobQueue(
            self._job, self._finish_entry, self._get_stuck, shelf.dirty_sets.mark_dirty, failures.watching
        )

    def review(self, entry: Entry) -> None:
        """Something about it has changed: maybe it should be stored in another way now."""
        self._shelf.dirty_sets.mark_dirty(entry)
        try:
            if entry in self._shelf.entries and self.precision.pending_plan(entry) is not None:
                self.jobs.add(entry)
        except Exception as error:  # noqa: BLE001
            # Its owner, or whoever leased it, has nothing to do with it.
            self._get_stuck(entry, error)

    def review_ended(self, entry: Entry) -> None:
        """Review an entry that no sequence writes any more, and settle it where nothing has to be rewritten: of some
        models nothing ever has, because their layers hold states alone."""
        self.review(entry)
        if not self.jobs.has(entry):
            self._settle(entry)

    def step_down(self, chosen: Iterable[StepDown]) -> None:
        """Give entries the lower plans that were chosen for them. The work is done bit by bit."""
        for each in chosen:
            self._shelf.set_target(each.entry, each.plan)
            self._counters["stepped_down_spans"] += 1
            self.review(each.entry)

    def finish_path(self, leaf: Node[Entry], until_s: float = math.inf) -> None:
        """Bring a leaf's span to what it should be stored as, and those that it hangs on as far as they have no memory
        of their own yet. Spans that are rewritten are joined: the leaf may be another's afterwards."""
        for entry in dict.fromkeys(node.payload for node in leaf.path()):
            is_own = entry is leaf.payload or self.precision.was_short(entry)
            if not entry.is_running and (entry.span.is_live or is_own):
                self.jobs.run_entry(entry, until_s)

    def is_awaited(self, entry: Entry) -> bool:
        """Whether a request that would go on from an entry has to wait: a span that is to have fewer bits gets them
        before. A change that was asked for goes on under its readers, and so does the encoding of a running sequence:
        for those nobody waits."""
        if not self.jobs.has(entry) or entry.target is not None or entry.is_running:
            return False
        return self.jobs.has_begun(entry) or not self.precision.target_plan(entry).is_raw

    def pending_bytes(self) -> int:
        """What the work that waits is about to free."""
        return self._pending.nbytes()

    def _waits(self, entry: Entry) -> bool:
        return self.jobs.has(entry)

    def _job(self, entry: Entry) -> Job | None:
        plan = self.precision.pending_plan(entry) if entry in self._shelf.entries else None
        return None if plan is None else self._rewrite(entry, plan)

    def _rewrite(self, entry: Entry, plan: Plan) -> Job:
        job, before_bytes = self.precision.job(entry, plan), entry.span.kv_bytes
        self._shelf.clear_sealed_to(entry)  # the job has it
        if self.precision.options.archives_planes and entry.target is not None and not entry.is_upward:
            # What it loses now can be had back.
            yield from self._spills.archive(entry)
            if entry not in self._shelf.entries:
                return
        for _ in job:
            self._shelf.recount(entry)
            yield
            if entry not in self._shelf.entries:
                return
        self._shelf.recount(entry)
        if not plan.is_raw:
            self._counters["encoded_spans"] += 1
            self._counters["encoded_freed_bytes"] += max(0, before_bytes - entry.span.kv_bytes)
            if self.precision.was_short(entry):
                # A tier that has it, has it raw: it is written there again in these bits.
                self._shelf.set_archived(entry, is_archived=False)

    def _finish_entry(self, entry: Entry) -> None:
        """End the job of an entry: join it with its neighbours, and settle what it is part of then."""
        # Unless something else was asked for meanwhile, or it has grown.
        self.review(entry)
        if entry.is_running or not entry.nodes:
            return
        last = entry.last_node
        for grown in self._shelf.join_spans(last, MAX_SPANS):
            self.review(grown)
        # It may have been joined to what comes before it.
        self._settle(last.payload)

    def _settle(self, entry: Entry) -> None:
        """Offload and share an entry that has ended and has come to what it should be stored as."""
        if self._writes_after_reply:
            self._spills.add_entry(entry)
        if self._sharing is not None:
            self._sharing.add_entry(entry)

    def _get_stuck(self, entry: Entry, error: Exception) -> None:
        """Every layer of it is whole, as it was or as it should be."""
        self._shelf.set_stuck(entry)
        self._failures.record_failure("rewrites", error)
