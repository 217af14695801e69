"""Changes of precision on request: assess, begin, progress, cancel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvstrata.codecs.base import Codec
from kvstrata.kv.precision_estimate import Estimate, estimate, score_error
from kvstrata.kv.precision_plan import PrecisionPlan
from kvstrata.prefix_cache.entries import Entry, PrecisionTarget
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import run_to_end
from kvstrata.prefix_cache.keys import owner_of
from kvstrata.prefix_cache.prefetch import Restorer
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.prefix_cache.usage import TierUsage, recurrent_bytes

# Most spans that the expected error is measured on.
MAX_SAMPLED = 3

# Share of a plan's bytes below which a span counts as stored in fewer bits, so that the rest may be restored.
RESTORE_SHARE = 0.9

# Reasons for leaving bytes as they are; kv/precision_estimate.py has more.
RECURRENT = "recurrent state is never quantized"
ON_DISK = "blocks on the disk keep the precision they were written in"
NO_MEMORY = "no room in memory for more bits"

Scope = Literal["all", "live", "stored", "disk"]


@dataclass(frozen=True)
class PrecisionChange:
    """Request for another precision. None leaves K or V as it is."""

    k: Codec | None = None
    v: Codec | None = None
    scope: Scope = "all"
    salt: str | None = None  # only entries under this salt
    owner: str | None = None  # only entries under the salts of this owner
    sequence: str | None = None  # only entries that this running request holds
    dry_run: bool = False
    force: bool = False  # decode entries in fewer bits, though that brings no precision back

    @property
    def is_general(self) -> bool:
        """Whether the change applies to new spans, too."""
        is_limited = any(limit is not None for limit in (self.salt, self.owner, self.sequence))
        return self.scope in ("all", "stored") and not is_limited


@dataclass(frozen=True)
class LeftAlone:
    """Spans and bytes that a change leaves as they are, with the reason."""

    reason: str
    spans: int
    nbytes: int
    tier: str = "hot"


@dataclass(frozen=True)
class TierChange:
    """Expected effect of a change on one tier."""

    spans: int  # in memory, spans that change; on the disk, spans that are archived there
    bytes_before: int
    bytes_after: int

    @property
    def bytes_freed(self) -> int:
        """Bytes that become free; negative where archived or restored planes take more."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class ChangeResult:
    """Answer to a `PrecisionChange`."""

    k: str  # target from now on
    v: str
    dry_run: bool
    tiers: Mapping[str, TierChange]  # expected
    left_alone: tuple[LeftAlone, ...]
    expected_error: float  # relative error of scores, measured on a sample; 0 where nothing changes
    seconds: float

    @property
    def spans(self) -> int:
        return self.tiers["hot"].spans

    @property
    def bytes_before(self) -> int:
        return self.tiers["hot"].bytes_before

    @property
    def bytes_after(self) -> int:
        return self.tiers["hot"].bytes_after


@dataclass(frozen=True)
class Assessment:
    """Expected effect of a change, and the entries that it concerns."""

    result: ChangeResult
    entries: tuple[Entry, ...]
    without_memory: frozenset[Entry]  # subset of the entries that would need more bytes than are free


@dataclass(frozen=True)
class ChangeProgress:
    """Progress of the changes that were requested since none was running. Each entry counts once, for the last change
    that concerns it."""

    spans_total: int = 0
    spans_done: int = 0
    bytes_freed: int = 0
    is_running: bool = False
    seconds: float = 0.0  # from the request to the end, or to now


def _sum_progress(progress: Sequence[ChangeProgress]) -> ChangeProgress:
    return ChangeProgress(
        sum(each.spans_total for each in progress),
        sum(each.spans_done for each in progress),
        sum(each.bytes_freed for each in progress),
        any(each.is_running for each in progress),
        max((each.seconds for each in progress), default=0.0),
    )


class RunningChange:
    """A change at work: the entries that it concerns, and its progress. Running sums follow the entries that change, so
    that reading the progress costs the same with ten entries and with thousands."""

    def __init__(
        self,
        before_bytes: Mapping[Entry, int],
        plan: PrecisionPlan,
        replaced_target: PrecisionPlan | None,
        is_pending: Callable[[Entry], bool],
        requested_s: float,
        owner: str | None = None,
    ) -> None:
        self.owner = owner  # None: an admin requested the change
        self.plan = plan
        self.replaced_target = replaced_target  # plan of new spans before the change; None: the change leaves it
        self._before_bytes = dict(before_bytes)  # bytes of each entry before the change
        self._unfinished = dict.fromkeys(before_bytes)
        self._freed = dict.fromkeys(before_bytes, 0)
        self._total_freed = 0  # by all entries, with those that are no longer cached
        self._num_removed = 0
        self._is_pending = is_pending
        self._requested_s = requested_s
        self._ended_s: float | None = None

    def release_entries(self, entries: Collection[Entry]) -> dict[Entry, int]:
        """Give entries up to a later change. Return the bytes that this change's entries among them had before it."""
        return {entry: self._drop(entry) for entry in entries if entry in self._before_bytes}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The change's entries that are still cached."""
        return tuple(self._before_bytes)

    @property
    def is_running(self) -> bool:
        return self._ended_s is None

    def recount(self, entry: Entry) -> None:
        """Update the sums after an entry's size or pending work has changed. An entry finishes once: work that comes to
        it later is no part of this change."""
        if entry not in self._before_bytes:
            return
        freed = self._before_bytes[entry] - counted_bytes(entry)
        self._total_freed += freed - self._freed[entry]
        self._freed[entry] = freed
        if not self._is_pending(entry):
            self._unfinished.pop(entry, None)

    def remove(self, entry: Entry) -> None:
        """Count an entry that is no longer cached: all its bytes are free, or counted with the entry that it was joined
        to."""
        if entry in self._before_bytes:
            self._total_freed += self._drop(entry)
            self._num_removed += 1

    def _drop(self, entry: Entry) -> int:
        self._unfinished.pop(entry, None)
        self._total_freed -= self._freed.pop(entry)
        return self._before_bytes.pop(entry)

    def check_end(self) -> None:
        """Record the time of the end once no entry is unfinished."""
        if self._ended_s is None and not self._unfinished:
            self._ended_s = time.perf_counter()

    def progress(self) -> ChangeProgress:
        num_total = len(self._before_bytes) + self._num_removed
        seconds = (self._ended_s or time.perf_counter()) - self._requested_s
        num_done = num_total - len(self._unfinished)
        return ChangeProgress(num_total, num_done, self._total_freed, self.is_running, seconds)


class Requantizer:
    """Changes of precision on request: assessment, start, progress and cancellation.

    Entries that go up in precision use free memory alone: nothing is evicted for them. `disk_usage` returns the usage
    of the disk by an owner or by all, and None where there is no disk."""

    def __init__(
        self,
        table: EntryTable,
        transcoder: Transcoder,
        restorer: Restorer,
        reclaimer: Reclaimer,
        disk_usage: Callable[[str | None], TierUsage | None],
    ) -> None:
        self._table = table
        self._candidates = table.candidates
        self._transcoder = transcoder
        self._precision = transcoder.precision
        self._restorer = restorer
        self._reclaimer = reclaimer
        self._disk_usage = disk_usage
        self._changed = table.dirty_sets.new_dirty_set(self._remove_entry)
        self._changes: list[RunningChange] = []  # in order, since the last time that none was running

    @property
    def target(self) -> PrecisionPlan:
        """Plan of new spans."""
        return self._precision.target

    def take_over(self, failed: Requantizer) -> None:
        """Adopt the plan of new spans from a failed cache."""
        self._precision.target = failed.target

    def requantize(
        self, change: PrecisionChange, plan: PrecisionPlan, sequence_entries: Collection[Entry] | None = None
    ) -> ChangeResult:
        """Begin a change of cached entries and of new spans. Background work does it in slices."""
        return run_to_end(self.requantize_in_steps(change, plan, sequence_entries))

    def requantize_in_steps(
        self, change: PrecisionChange, plan: PrecisionPlan, sequence_entries: Collection[Entry] | None = None
    ) -> Generator[None, None, ChangeResult]:
        """Assess a change in small steps and begin it with the last of them, unless it is a dry run.
        `sequence_entries` limits the change to the entries of one running request."""
        requested_s = time.perf_counter()
        assessment = yield from self._assess(change, plan, sequence_entries)
        if not change.dry_run:
            self._begin(change, plan, assessment, requested_s)
            self._mark_all_dirty()
        return assessment.result

    def _begin(self, change: PrecisionChange, plan: PrecisionPlan, assessment: Assessment, requested_s: float) -> None:
        """Begin a change beside the running ones; it takes the entries over that it shares with them."""
        entries = [entry for entry in assessment.entries if entry in self._table.entries]
        if not self.is_running:
            self._changes.clear()
        replaced_target = self._original_target() if change.is_general else None
        before_bytes = {entry: counted_bytes(entry) for entry in entries}
        for earlier in self._changes:
            before_bytes |= earlier.release_entries(entries)
        self._changes.append(
            RunningChange(before_bytes, plan, replaced_target, self._is_pending, requested_s, change.owner)
        )
        if change.is_general:
            self._precision.target = plan
        for entry in entries:
            self._set_target(entry, plan, change, has_memory=entry not in assessment.without_memory)
        self.update_progress()

    def _original_target(self) -> PrecisionPlan:
        """Return the plan of new spans before the running changes."""
        running = [change for change in self._changes if change.is_running]
        replaced = (change.replaced_target for change in running if change.replaced_target is not None)
        return next(replaced, self._precision.target)

    def _set_target(self, entry: Entry, plan: PrecisionPlan, change: PrecisionChange, *, has_memory: bool) -> None:
        # Work that has begun for another target goes no further.
        self._transcoder.jobs.discard(entry)
        self._restorer.discard_entry(entry)
        sealed_to = entry.span.written_end if entry.is_running else None
        self._transcoder.retarget(entry, PrecisionTarget(plan, change.force and has_memory, sealed_to))
        if not change.force and has_memory and _has_fewer_bits(entry, plan):
            self._restorer.add_entry(entry)

    def _is_pending(self, entry: Entry) -> bool:
        return self._transcoder.jobs.has(entry) or self._restorer.has_entry(entry)

    def _mark_all_dirty(self) -> None:
        """Announce a new plan of new spans: it is the target of every entry without one of its own."""
        self._table.dirty_sets.mark_all_dirty(self._table.entries)

    def _assess(
        self, change: PrecisionChange, plan: PrecisionPlan, sequence_entries: Collection[Entry] | None
    ) -> Generator[None, None, Assessment]:
        """Assess the effect of a change, one entry in each step, on the entries that are cached at the first step.
        Changes nothing."""
        disk, free_bytes = self._disk_usage(change.owner), self._reclaimer.free_bytes
        concerned = [entry for entry in self._table.entries if _is_in_scope(entry, change, sequence_entries)]
        # The free memory goes to the entries that were used last.
        entries = sorted(concerned, key=self._candidates.last_use_s, reverse=True)
        began_s, estimates = time.perf_counter(), dict[Entry, Estimate]()
        for entry in entries:
            estimates[entry] = self._estimate(entry, plan, upward=change.force)
            yield
        without_memory = _without_memory(estimates, free_bytes)
        for entry in without_memory:
            nbytes = estimates[entry].bytes_before
            estimates[entry] = Estimate(nbytes, nbytes, Counter({NO_MEMORY: nbytes}))
        changing = [entry for entry, estimated in estimates.items() if estimated.changes]
        tiers = {
            "hot": TierChange(
                len(changing),
                sum(estimated.bytes_before for estimated in estimates.values()),
                sum(estimated.bytes_after for estimated in estimates.values()),
            )
        }
        if disk is not None:
            tiers["disk"] = self._disk_change(disk, estimates)
        expected_error = yield from _expected_error(changing, plan, upward=change.force)
        result = ChangeResult(
            k=plan.k.name,
            v=plan.v.name,
            dry_run=change.dry_run,
            tiers=tiers,
            left_alone=(*_left_alone(estimates), *_left_on_disk(disk, change)),
            expected_error=expected_error,
            seconds=time.perf_counter() - began_s,
        )
        return Assessment(result, tuple(entries), without_memory)

    def _estimate(self, entry: Entry, plan: PrecisionPlan, *, upward: bool) -> Estimate:
        window = self._precision.raw_window if entry.is_running else None
        estimated = estimate(entry.span, plan, upward=upward, window=window)
        restored_bytes = 0 if upward else self._restorer.restored_bytes(entry, plan)
        if not restored_bytes:
            return estimated
        return replace(estimated, bytes_after=max(estimated.bytes_after, restored_bytes), left_alone=Counter())

    def _disk_change(self, disk: TierUsage, estimates: Mapping[Entry, Estimate]) -> TierChange:
        """Return the effect on the disk: planes are archived there before they are dropped."""
        archived = [
            estimated.bytes_before
            for entry, estimated in estimates.items()
            if self._precision.config.archives_planes
            and estimated.bytes_after < estimated.bytes_before
            and entry.needs_archive
        ]
        return TierChange(len(archived), disk.nbytes, disk.nbytes + sum(archived))

    def progress(self, owner: str | None = None) -> ChangeProgress:
        """Return the progress of all changes since the last time that none was running, or of one owner's changes."""
        self.update_progress()
        return _sum_progress([change.progress() for change in self._changes_of(owner)])

    def _changes_of(self, owner: str | None) -> list[RunningChange]:
        return [change for change in self._changes if owner is None or change.owner == owner]

    def update_progress(self) -> None:
        """Update the running changes by the entries that have changed, and notice the changes that have ended."""
        for entry in self._changed.drain():
            for change in self._changes:
                change.recount(entry)
        for change in self._changes:
            change.check_end()

    def _remove_entry(self, entry: Entry) -> None:
        for change in self._changes:
            change.remove(entry)

    @property
    def is_running(self) -> bool:
        self.update_progress()
        return any(change.is_running for change in self._changes)

    def cancel(self, owner: str | None = None) -> ChangeProgress:
        """Cancel all changes, or one owner's. Entries that are not done stay as they are, each span whole. Cancelling
        all brings back the plan of new spans from before the changes."""
        progress, cancelled = self.progress(owner), self._changes_of(owner)
        if owner is None:
            self._precision.target = self._original_target()
        for change in [change for change in cancelled if change.is_running]:
            # A running entry may have nothing to encode now, and would later.
            for entry in [entry for entry in change.entries if entry.is_running or self._is_pending(entry)]:
                self._cancel_target(entry, change.plan)
        if owner is None:
            self._restorer.clear()
        self._changes = [change for change in self._changes if change not in cancelled]
        self._mark_all_dirty()
        return progress

    def _cancel_target(self, entry: Entry, plan: PrecisionPlan) -> None:
        self._restorer.discard_entry(entry)
        if entry.target is not None and entry.target.plan is plan:
            self._transcoder.jobs.discard(entry)
            # An entry that waits to be trimmed is queued again.
            self._transcoder.retarget(entry, None)


def counted_bytes(entry: Entry) -> int:
    """Return the bytes of an entry, with the buffers of its running owner, which `Entry.nbytes` leaves out."""
    return entry.span.nbytes if entry.is_running else entry.nbytes


def _is_in_scope(entry: Entry, change: PrecisionChange, sequence_entries: Collection[Entry] | None) -> bool:
    is_used = entry.is_running or entry.num_leases > 0
    by_scope = {"all": True, "live": is_used, "stored": not is_used, "disk": False}[change.scope]
    by_salt = change.salt is None or entry.salt == change.salt
    by_owner = change.owner is None or owner_of(entry.salt) == change.owner
    return by_scope and by_salt and by_owner and (sequence_entries is None or entry in sequence_entries)


def _has_fewer_bits(entry: Entry, plan: PrecisionPlan) -> bool:
    """Whether an ended entry is cached in fewer bits than the plan has."""
    plan_bytes = plan.token_bytes(entry.span.layout) * entry.span.num_tokens
    return not entry.is_running and entry.span.kv_bytes < RESTORE_SHARE * plan_bytes


def _without_memory(estimates: Mapping[Entry, Estimate], free_bytes: int) -> frozenset[Entry]:
    """Return the entries that would grow beyond the free bytes; the first entries get them."""
    without = set[Entry]()
    for entry, estimated in estimates.items():
        growth_bytes = estimated.bytes_after - estimated.bytes_before
        if growth_bytes > max(0, free_bytes):
            without.add(entry)
        else:
            free_bytes -= max(0, growth_bytes)
    return frozenset(without)


def _left_alone(estimates: Mapping[Entry, Estimate]) -> tuple[LeftAlone, ...]:
    spans: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for entry, estimated in estimates.items():
        reasons = Counter(estimated.left_alone)
        reasons[RECURRENT] += recurrent_bytes(entry.span)
        for reason, count in (+reasons).items():
            spans[reason] += 1
            nbytes[reason] += count
    return tuple(LeftAlone(reason, spans[reason], nbytes[reason]) for reason in spans)


def _left_on_disk(disk: TierUsage | None, change: PrecisionChange) -> tuple[LeftAlone, ...]:
    """Return the blocks on the disk: each names its own codecs, so they stay as they are, and usable."""
    if disk is None or not disk.spans or change.scope not in ("all", "disk"):
        return ()
    return (LeftAlone(ON_DISK, disk.spans, disk.nbytes, "disk"),)


def _expected_error(entries: Collection[Entry], plan: PrecisionPlan, *, upward: bool) -> Generator[None, None, float]:
    """Measure the mean error of the largest entries, one in each step."""
    errors = list[float | None]()
    for entry in sorted(entries, key=lambda entry: entry.nbytes)[-MAX_SAMPLED:]:
        # An entry may have been evicted since it was estimated.
        if entry.span.num_tokens and entry.span.layers:
            errors.append(score_error(entry.span, plan, upward=upward))
            yield
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else 0.0
