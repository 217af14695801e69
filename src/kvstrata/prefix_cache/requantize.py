"""Changes of precision on request: assess, begin, progress, cancel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvstrata.codecs.base import Codec
from kvstrata.layers.raw_window import RawWindow
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.jobs import run_to_end
from kvstrata.prefix_cache.keys import owner_of
from kvstrata.prefix_cache.prefetch import Restorer
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.prefix_cache.usage import TierUsage, recurrent_bytes
from kvstrata.spans.estimate import Estimate, estimate, score_error
from kvstrata.spans.live import written_end
from kvstrata.spans.plan import Plan

# Spans that the expected error is measured on.
MAX_SAMPLED = 3

# Why something is left alone; more in spans/estimate.py.
RECURRENT = "recurrent state is never quantized"

ON_DISK = "blocks on the disk keep the precision they were written in"

NO_ROOM = "no room in memory for more bits"

Scope = Literal["all", "live", "stored", "disk"]


@dataclass(frozen=True)
class PrecisionChange:
    """What to do. None leaves K or V as it is."""

    k: Codec | None = None
    v: Codec | None = None
    scope: Scope = "all"
    salt: str | None = None  # only what is under this salt
    owner: str | None = None  # only what is under the salts of this owner
    sequence: str | None = None  # only what this running request holds
    dry_run: bool = False
    force: bool = False  # decode what is lower, though that brings no precision back

    @property
    def is_general(self) -> bool:
        """It is about all that will come, too."""
        is_limited = any(limit is not None for limit in (self.salt, self.owner, self.sequence))
        return self.scope in ("all", "stored") and not is_limited


@dataclass(frozen=True)
class LeftAlone:
    reason: str
    spans: int
    nbytes: int
    tier: str = "hot"


@dataclass(frozen=True)
class TierChange:
    spans: int  # that change; on the disk: that are written there
    bytes_before: int
    bytes_after: int

    @property
    def bytes_freed(self) -> int:
        """Less than nothing where it takes more: what is put away, and what comes back."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class ChangeResult:
    k: str  # the target from now on
    v: str
    dry_run: bool
    tiers: Mapping[str, TierChange]  # expected, while the work is not done
    left_alone: tuple[LeftAlone, ...]
    expected_error: float  # of scores, relative, measured on a sample; 0 where nothing changes
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
    """What a change comes to, and for which entries."""

    changed: ChangeResult
    entries: tuple[Entry, ...]
    without_room: frozenset[Entry]  # of those: they would take more bytes than there are


@dataclass(frozen=True)
class Progress:
    """Of the changes that were asked for since none was under way. Each entry counts once, for the last of them."""

    spans_total: int = 0
    spans_done: int = 0
    bytes_freed: int = 0
    is_running: bool = False
    seconds: float = 0.0  # since it was asked for, until it was done


def total_of(progress: Sequence[Progress]) -> Progress:
    return Progress(
        sum(each.spans_total for each in progress),
        sum(each.spans_done for each in progress),
        sum(each.bytes_freed for each in progress),
        any(each.is_running for each in progress),
        max((each.seconds for each in progress), default=0.0),
    )


class RunningChange:
    """A change at work: which entries it is about, and how far it has got. Sums are kept up to date by looking at the
    entries that have changed: asking how far it is costs the same with ten entries and with thousands."""

    def __init__(
        self,
        before_bytes: Mapping[Entry, int],
        plan: Plan,
        before: Plan | None,
        is_pending: Callable[[Entry], bool],
        asked_at_s: float,
        owner: str | None = None,
    ) -> None:
        self.owner = owner  # who asked for it; None: an admin
        self._before_bytes = dict(before_bytes)  # what each took before it was changed
        self._unfinished = dict.fromkeys(before_bytes)
        self._freed = dict.fromkeys(before_bytes, 0)
        self._total_freed = 0  # of all, and of those that are gone
        self._num_gone = 0
        self.plan = plan
        self.before = before  # the target that it replaced; None: it has none
        self._is_pending = is_pending
        self._asked_at_s = asked_at_s
        self._ended_s: float | None = None

    def leave(self, entries: Collection[Entry]) -> dict[Entry, int]:
        """A later change is about these. Tells what they took before this one, as far as it is about them."""
        return {entry: self._drop(entry) for entry in entries if entry in self._before_bytes}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Those that are held."""
        return tuple(self._before_bytes)

    @property
    def is_running(self) -> bool:
        return self._ended_s is None

    def recount(self, entry: Entry) -> None:
        """An entry has changed: its size, or whether there is something to be done to it. What comes to the same entry
        when it was finished once is no part of the change."""
        if entry not in self._before_bytes:
            return
        freed = self._before_bytes[entry] - held_bytes(entry)
        self._total_freed += freed - self._freed[entry]
        self._freed[entry] = freed
        if not self._is_pending(entry):
            self._unfinished.pop(entry, None)

    def remove(self, entry: Entry) -> None:
        """An entry is no longer held: all that it took is free, or counted where it was joined to another."""
        if entry in self._before_bytes:
            freed = self._drop(entry)
            self._total_freed += freed
            self._num_gone += 1

    def _drop(self, entry: Entry) -> int:
        self._unfinished.pop(entry, None)
        self._total_freed -= self._freed.pop(entry)
        return self._before_bytes.pop(entry)

    def check_end(self) -> None:
        """Notice that it has ended."""
        if self._ended_s is None and not self._unfinished:
            self._ended_s = time.perf_counter()

    def progress(self) -> Progress:
        num_total = len(self._before_bytes) + self._num_gone
        seconds = (self._ended_s or time.perf_counter()) - self._asked_at_s
        num_done = num_total - len(self._unfinished)
        return Progress(num_total, num_done, self._total_freed, self.is_running, seconds)


def held_bytes(entry: Entry) -> int:
    """What an entry takes. What is counted of one whose owner still runs leaves its buffers out."""
    return entry.span.nbytes if entry.is_running else entry.nbytes


def in_scope(entry: Entry, change: PrecisionChange, sequence_entries: Collection[Entry] | None) -> bool:
    is_used = entry.is_running or entry.num_leases > 0
    by_scope = {"all": True, "live": is_used, "stored": not is_used, "disk": False}[change.scope]
    by_salt = change.salt is None or entry.salt == change.salt
    by_owner = change.owner is None or owner_of(entry.salt) == change.owner
    return by_scope and by_salt and by_owner and (sequence_entries is None or entry in sequence_entries)


class Assessor:
    """What a change comes to. Changes nothing.

    `restored_bytes` tells what an entry takes when the disk has given back what was put away, under a plan; 0 where it
    has nothing. `disk` is None where there is no disk; `puts_away` what steps down is written there first. What goes up
    may take `room_bytes` more together; the first ones get them.
    """

    def __init__(
        self,
        window: RawWindow,
        restored_bytes: Callable[[Entry, Plan], int],
        *,
        disk: TierUsage | None,
        puts_away: bool,
        room_bytes: int,
    ) -> None:
        self._room_bytes = room_bytes
        self._window = window
        self._restored_bytes = restored_bytes
        self._disk = disk
        self._puts_away = puts_away

    def assess(
        self, entries: Collection[Entry], plan: Plan, change: PrecisionChange
    ) -> Generator[None, None, Assessment]:
        """Looks at one entry in each step; all entries are those that the caller knew at the first."""
        began_s, estimates = time.perf_counter(), dict[Entry, Estimate]()
        for entry in entries:
            estimates[entry] = self._estimate(entry, plan, upward=change.force)
            yield
        without_room = self._without_room(estimates)
        for entry in without_room:
            found = estimates[entry]
            estimates[entry] = Estimate(found.bytes_before, found.bytes_before, Counter({NO_ROOM: found.bytes_before}))
        concerned = [entry for entry, found in estimates.items() if found.changes]
        hot = TierChange(
            len(concerned),
            sum(found.bytes_before for found in estimates.values()),
            sum(found.bytes_after for found in estimates.values()),
        )
        disk = self._on_disk(estimates)
        expected_error = yield from _expected_error(concerned, plan, change.force)
        changed = ChangeResult(
            k=plan.k.name,
            v=plan.v.name,
            dry_run=change.dry_run,
            tiers={"hot": hot, **({"disk": disk} if disk is not None else {})},
            left_alone=(*_left_alone(estimates), *self._left_on_disk(change)),
            expected_error=expected_error,
            seconds=time.perf_counter() - began_s,
        )
        return Assessment(changed, tuple(entries), without_room)

    def _without_room(self, estimates: Mapping[Entry, Estimate]) -> frozenset[Entry]:
        left_bytes, without = self._room_bytes, set[Entry]()
        for entry, found in estimates.items():
            grows = found.bytes_after - found.bytes_before
            if grows > max(0, left_bytes):
                without.add(entry)
            else:
                left_bytes -= max(0, grows)
        return frozenset(without)

    def _estimate(self, entry: Entry, plan: Plan, *, upward: bool) -> Estimate:
        window = self._window if entry.is_running else None
        found = estimate(entry.span, plan, upward=upward, window=window)
        restored_bytes = 0 if upward else self._restored_bytes(entry, plan)
        if not restored_bytes:
            return found
        return replace(found, bytes_after=max(found.bytes_after, restored_bytes), left_alone=Counter())

    def _on_disk(self, estimates: Mapping[Entry, Estimate]) -> TierChange | None:
        if self._disk is None:
            return None
        put_away = [
            found.bytes_before
            for entry, found in estimates.items()
            if self._puts_away and found.bytes_after < found.bytes_before and entry.needs_archive
        ]
        return TierChange(len(put_away), self._disk.nbytes, self._disk.nbytes + sum(put_away))

    def _left_on_disk(self, change: PrecisionChange) -> tuple[LeftAlone, ...]:
        """Blocks say for themselves how they are encoded: they stay as they are, and usable."""
        if self._disk is None or not self._disk.spans or change.scope not in ("all", "disk"):
            return ()
        return (LeftAlone(ON_DISK, self._disk.spans, self._disk.nbytes, "disk"),)


def _left_alone(estimates: Mapping[Entry, Estimate]) -> tuple[LeftAlone, ...]:
    spans: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for entry, found in estimates.items():
        reasons = Counter(found.left_alone)
        reasons[RECURRENT] += recurrent_bytes(entry.span)
        for reason, count in (+reasons).items():
            spans[reason] += 1
            nbytes[reason] += count
    return tuple(LeftAlone(reason, spans[reason], nbytes[reason]) for reason in spans)


def _expected_error(entries: Collection[Entry], plan: Plan, upward: bool) -> Generator[None, None, float]:
    """Of the largest ones."""
    errors = list[float | None]()
    for entry in sorted(entries, key=lambda entry: entry.nbytes)[-MAX_SAMPLED:]:
        # It may have been evicted since it was looked at.
        if entry.span.num_tokens and entry.span.layers:
            errors.append(score_error(entry.span, plan, upward=upward))
            yield
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else 0.0


# Of the bytes that a plan asks for: a span that has fewer is in a lower precision.
RESTORE_SHARE = 0.9


class Requantizer:
    """What goes up takes the room that there is: nothing has to go for it. `disk_usage` tells what an owner, or all,
    have on the disk; None where there is none."""

    def __init__(
        self,
        shelf: EntryTable,
        leaves: EvictionCandidates,
        rewriting: Transcoder,
        restorer: Restorer,
        room: Reclaimer,
        disk_usage: Callable[[str | None], TierUsage | None],
    ) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._rewriting = rewriting
        self._precision = rewriting.precision
        self._mover = rewriting.jobs
        self._restorer = restorer
        self._room = room
        self._disk_usage = disk_usage
        self._changed = shelf.dirty_sets.new_dirty_set(self._remove)
        self._asked: list[RunningChange] = []  # in order, since the last time that none was under way

    @property
    def target(self) -> Plan:
        """What new spans are stored as."""
        return self._precision.target

    def requantize(
        self, change: PrecisionChange, plan: Plan, sequence_entries: Collection[Entry] | None = None
    ) -> ChangeResult:
        """Change what is cached, and what new spans are stored as. The work is done bit by bit, by the chores."""
        return run_to_end(self.requantizing(change, plan, sequence_entries))

    def requantizing(
        self, change: PrecisionChange, plan: Plan, sequence_entries: Collection[Entry] | None = None
    ) -> Generator[None, None, ChangeResult]:
        """Likewise; what it comes to is looked at in small steps, and the change begins with the last of them."""
        asked_at_s = time.perf_counter()
        assessed = yield from self._assess(change, plan, sequence_entries)
        if not change.dry_run:
            self._begin(change, plan, assessed, asked_at_s)
            self._has_new_target()
        return assessed.changed

    def _assess(
        self, change: PrecisionChange, plan: Plan, sequence_entries: Collection[Entry] | None
    ) -> Generator[None, None, Assessment]:
        """What it would free, and what it would leave alone."""
        assessor = Assessor(
            self._precision.window,
            self._restorer.restored_bytes,
            disk=self._disk_usage(change.owner),
            puts_away=self._precision.options.archives_planes,
            room_bytes=self._room.left_bytes,
        )
        # What was used last goes up first.
        entries = sorted(self._concerned(change, sequence_entries), key=self._leaves.last_use_s, reverse=True)
        return (yield from assessor.assess(entries, plan, change))

    def _begin(self, change: PrecisionChange, plan: Plan, assessed: Assessment, asked_at_s: float) -> None:
        """Beside those that are under way, and in their place for the entries that they share."""
        entries = [entry for entry in assessed.entries if entry in self._shelf.entries]
        if not self.is_running:
            self._asked.clear()
        before = self._target_before() if change.is_general else None
        before_bytes = {entry: held_bytes(entry) for entry in entries}
        for earlier in self._asked:
            before_bytes |= earlier.leave(entries)
        self._asked.append(RunningChange(before_bytes, plan, before, self._is_pending, asked_at_s, change.owner))
        if change.is_general:
            self._precision.target = plan
        for entry in entries:
            self._give_target(entry, plan, change, has_room=entry not in assessed.without_room)
        self.update_progress()

    def _target_before(self) -> Plan:
        """What new spans were stored as before the changes that are under way."""
        running = [change for change in self._asked if change.is_running]
        return next((change.before for change in running if change.before is not None), self._precision.target)

    def _give_target(self, entry: Entry, plan: Plan, change: PrecisionChange, *, has_room: bool) -> None:
        sealed_to = written_end(entry.span) if entry.is_running else None
        self._shelf.set_target(entry, plan, upward=change.force and has_room, sealed_to=sealed_to)
        # What was begun for another target goes no further.
        self._mover.discard(entry)
        self._restorer.discard_entry(entry)
        if not change.force and has_room and _is_lower(entry, plan):
            self._restorer.add_entry(entry)
        self._shelf.dirty_sets.mark_dirty(entry)
        self._rewriting.review(entry)

    def _concerned(self, change: PrecisionChange, sequence_entries: Collection[Entry] | None) -> list[Entry]:
        return [entry for entry in self._shelf.entries if in_scope(entry, change, sequence_entries)]

    def _is_pending(self, entry: Entry) -> bool:
        return self._mover.has(entry) or self._restorer.has_entry(entry)

    def progress(self, owner: str | None = None) -> Progress:
        """Of all changes since the last time that none was under way, or of those that an owner asked for."""
        self.update_progress()
        return total_of([change.progress() for change in self._asked_by(owner)])

    def _asked_by(self, owner: str | None) -> list[RunningChange]:
        return [change for change in self._asked if owner is None or change.owner == owner]

    def update_progress(self) -> None:
        """Notice how far changes have got, by the entries that have changed, and which have ended."""
        for entry in self._changed.drain():
            for change in self._asked:
                change.recount(entry)
        for change in self._asked:
            change.check_end()

    def _remove(self, entry: Entry) -> None:
        for change in self._asked:
            change.remove(entry)

    @property
    def is_running(self) -> bool:
        self.update_progress()
        return any(change.is_running for change in self._asked)

    def cancel(self, owner: str | None = None) -> Progress:
        """All of them, or those that an owner asked for. What is not done yet stays as it is; every span is whole. New
        spans are stored as before the changes."""
        progress, cancelled = self.progress(owner), self._asked_by(owner)
        if owner is None:
            self._precision.target = self._target_before()
        for change in [change for change in cancelled if change.is_running]:
            # What runs may have nothing to be encoded now, and would later.
            for entry in [entry for entry in change.entries if entry.is_running or self._is_pending(entry)]:
                self._give_up(entry, change.plan)
        if owner is None:
            self._restorer.clear()
        self._asked = [change for change in self._asked if change not in cancelled]
        self._has_new_target()
        return progress

    def take_over(self, failed: Requantizer) -> None:
        """New spans are stored as those of a store that has failed were."""
        self._precision.target = failed._precision.target

    def _has_new_target(self) -> None:
        """What entries without a target of their own are to be stored as may be another plan now."""
        self._shelf.dirty_sets.mark_all_dirty(self._shelf.entries)

    def _give_up(self, entry: Entry, plan: Plan) -> None:
        self._restorer.discard_entry(entry)
        if entry.target is plan:
            self._mover.discard(entry)
            self._shelf.set_target(entry, None)
            # One that waits to be trimmed still is.
            self._rewriting.review(entry)


def _is_lower(entry: Entry, plan: Plan) -> bool:
    """Whether it is stored in fewer bits than the plan has."""
    target = plan.token_bytes(entry.span.layout) * entry.span.num_tokens
    return not entry.is_running and entry.span.kv_bytes < RESTORE_SHARE * target
