"""Offload: chooses entries for the disk, writes them, remembers refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal
from weakref import WeakKeyDictionary, WeakSet

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.jobs import FailureLog, Job, JobQueue
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient, WrittenChain
from kvstrata.spans.convert import RAW
from kvstrata.spans.rewrite import rewrite_layer
from kvstrata.tier.base import Refusal, Refused, Tier, Writing
from kvstrata.tier.block import BASE
from kvstrata.tier.removals import BlockRemoval, RemovalCause

# Of the memory for stored spans: from here on what is not on the disk is written there, ahead of need.
SPILL_SHARE = 0.7

# Blocks that have left the disk, in one step of the engine: looking one up takes some microseconds.
MAX_REMOVALS_AT_ONCE = 512

# Entries that have changed, in one step of the engine: a look at one takes about a fifth of a millisecond.
MAX_OFFERED = 16

# See `store/losses.py`.
DiskReason = Literal["disk_slow", "disk_failed", "disk_full", "first_touch", "write_budget"]

UnwrittenReason = Literal["expired", "superseded"] | DiskReason

# Blocks that the disk had accepted and did not write.
GIVEN_UP: Mapping[RemovalCause, DiskReason] = {
    RemovalCause.NO_ROOM: "disk_full",
    RemovalCause.VOLUME_FULL: "disk_full",
    RemovalCause.WRITE_BUDGET: "write_budget",
    RemovalCause.UNWRITABLE: "disk_failed",
    RemovalCause.FAILED: "disk_failed",
}


@dataclass(frozen=True)
class Handover:
    """What the disk has of a leaf that is to go."""

    end: int  # of the tokens that it has, or that are on their way
    reason: UnwrittenReason | None = None  # why not all; None: it has all, or there is no disk that could
    waits: bool = False  # the disk works, and takes more when its queue has room, or the bytes are packed


class Offloader:
    """Writes entries as they are. `was_short` tells whether an entry stays raw until a longer sequence goes on from it:
    blocks that were written by then are written again."""

    def __init__(
        self,
        cold: TierClient,
        shelf: EntryTable,
        leaves: EvictionCandidates,
        counters: Counter[str],
        failures: FailureLog,
        *,
        was_short: Callable[[Entry], bool],
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._leaves = leaves
        self._counters = counters
        self._was_short = was_short
        self._failures = failures
        self._is_memory_short = False
        self._removals = cold.tier.removals
        self._residency = shelf.residency
        self.refused_writes = RefusedWrites(cold.tier, leaves.last_use_s)
        self._mover = JobQueue(self._job, lambda _: None, self._failed, watching=failures.watching)
        self._num_faults = 0  # of the disk, when its blocks were last looked at
        self._changed = shelf.dirty_sets.new_dirty_set(self._offer_behind)  # those that may have to be written
        self._waiting_for_parent: dict[Entry, list[Entry]] = {}  # those that hang on one that is still being computed

    @property
    def idle(self) -> bool:
        """Nothing is to be done now. More may be as soon as the disk takes blocks again."""
        is_told = self._removals.is_empty and not self._residency.has_doubted
        return is_told and self._mover.idle and self.refused_writes.next_takeable() is None

    @property
    def can_wait(self) -> bool:
        """Whether memory needs none of what is to be written yet, and the disk still has enough to write."""
        return not self._is_memory_short and not self._cold.tier.writing().is_calm

    def run(self, slice_s: float) -> None:
        self._take_removals(MAX_REMOVALS_AT_ONCE)
        entry = self.refused_writes.next_takeable() if self._mover.idle else None
        if entry is not None:
            self.refused_writes.unblock_entry(entry)
            self._mover.add(entry)
        self._mover.run(slice_s)

    def add_entry(self, entry: Entry) -> None:
        """Write an entry that has ended, and those that waited until it had."""
        # What was begun may have been about fewer tokens.
        self._mover.discard(entry)
        self._offer_all(entry)

    def offer_under_pressure(self, limit_bytes: int, hot_bytes: int) -> None:
        """Memory fills up: write what would have to go, so that it need not wait for the disk then. `limit_bytes`: what
        running sequences leave of `hot_bytes`."""
        self._take_removals(MAX_REMOVALS_AT_ONCE)
        self._is_memory_short = self._shelf.nbytes > limit_bytes - (1 - SPILL_SHARE) * hot_bytes
        if self._is_memory_short:
            self.offer_changed(MAX_OFFERED)

    def offer_changed(self, max_entries: int | None = None) -> None:
        """What no request uses and the disk has not. Only entries that have changed are looked at, so many at most: the
        others wait to be written, are on the disk, or were refused."""
        self._retry_after_fault()
        for entry in islice(self._changed.drain(), max_entries):
            if entry.is_evictable or entry in self._waiting_for_parent:
                self._offer_all(entry)

    def _offer_all(self, entry: Entry) -> None:
        """An entry, and those that hung on it while it was computed."""
        for each in (entry, *self._waiting_for_parent.pop(entry, ())):
            self._offer(each)

    def _offer_behind(self, entry: Entry) -> None:
        """Look again at the entries that hung on one that was removed."""
        for each in self._waiting_for_parent.pop(entry, ()):
            self._changed.add(each)

    def _offer(self, entry: Entry) -> None:
        if entry not in self._shelf.entries or entry.is_running or entry.is_archived or not entry.nodes:
            return
        if self.is_superseded(entry.last_node):
            return  # when that has gone, the rest is offered again
        owner = _still_computed(entry)
        if owner is not None:
            self._waiting_for_parent.setdefault(owner, []).append(entry)
        elif not self.refused_writes.would_recur(entry) and not self.refused_writes.was_evicted(entry):
            self._mover.add(entry)

    def cancel_writes(self, under: bytes = b"") -> None:
        """What is being written, under all roots that begin so: the disk is cleared."""
        self.refused_writes.clear()
        self._residency.forget_loads()
        for entry in self._shelf.entries:
            self._changed.add(entry)
            if entry.root_key.startswith(under):
                self._mover.discard(entry)

    def is_superseded(self, leaf: Node[Entry]) -> bool:
        """What a conversation has left behind is not written, however often it was asked for: that was by the same
        conversation, which has gone on elsewhere. A disk would fill up with thinking that no prompt has again."""
        return self._leaves.is_superseded(leaf) and not leaf.payload.is_pinned

    def wants(self, leaf: Node[Entry]) -> bool:
        """Whether a leaf that is to go should be encoded and written first."""
        if self.is_on_disk(leaf.payload) or self.is_superseded(leaf):
            return False
        self._retry_after_fault()
        return not self.refused_writes.would_recur(leaf.payload)

    def write_leaf(
        self, leaf: Node[Entry], until_s: float = math.inf, *, is_transcoding: bool, goes_now: bool = False
    ) -> Handover:
        """Give a leaf that is to go to the disk, as far as that can be done until then. `is_transcoding`: it waits to
        be encoded. `goes_now`: all of it is written, as it is."""
        if self.wants(leaf):
            if goes_now:
                self._trim_to(leaf)
            self.write_entry(leaf.payload, math.inf if goes_now else until_s)
        entry = leaf.payload
        if entry.is_archived:
            return Handover(leaf.end)
        if self.is_superseded(leaf):
            return Handover(leaf.start, "superseded")
        if is_transcoding or self._mover.has(entry):
            return Handover(leaf.start, "disk_slow", waits=self._cold.is_working)
        untaken = self.refused_writes.refusal_of(entry)
        if untaken is None:
            return Handover(leaf.start)  # what it hangs on is still being computed
        is_queue_full = untaken.refused is not None and untaken.refused.reason is Refusal.QUEUE_FULL
        waits = is_queue_full and self._cold.is_working
        return Handover(untaken.disk_end, disk_reason(untaken.refused, self._cold.tier.writing()), waits)

    def _trim_to(self, leaf: Node[Entry]) -> None:
        """Copy what a leaf's span and those before it still have in buffers of their owners: such spans cannot be
        written. What was encoded stays so."""
        for entry in dict.fromkeys(node.payload for node in leaf.path()):
            if not entry.is_running and entry.span.is_live:
                for layer in entry.span.layers:
                    rewrite_layer(entry.span, layer, RAW)
                self._shelf.recount(entry)

    def _retry_after_fault(self) -> None:
        """After a fault: the disk may take what it refused before."""
        num_faults = self._cold.tier.writing().num_faults
        if num_faults == self._num_faults:
            return
        self._num_faults = num_faults
        for entry in self.refused_writes.forget_faults():
            self._changed.add(entry)

    def is_on_disk(self, entry: Entry) -> bool:
        """Whether the disk has all of an entry, or all of it is on its way, as of now."""
        self._take_removals()
        if entry.is_archived and not self._residency.is_complete(entry):
            self._withdraw(entry)
        return entry.is_archived

    def _take_removals(self, max_removals: int | None = None) -> None:
        """Withdraw what has left the disk: entries are clean no longer, and tokens that memory has not either are
        counted. None: all that is in the log."""
        if self._removals.take_incomplete():
            self._residency.doubt_all()
        for removal in self._removals.take(max_removals):
            entries = self._residency.remove_block(removal.block.key)
            for entry in entries:
                self.refused_writes.record_removal(entry, removal)
                self._withdraw(entry)
                if removal.cause is not RemovalCause.CLEARED:
                    self._offer(entry)
            in_memory_end = max((entry.span.end for entry in entries), default=removal.start)
            lost_tokens = removal.end - max(removal.start, in_memory_end)
            if lost_tokens > 0 and removal.cause in GIVEN_UP and removal.block.part == BASE:
                self._counters[f"dropped_tokens_{GIVEN_UP[removal.cause]}"] += lost_tokens
        for entry in self._residency.take_doubted(MAX_OFFERED):
            self._withdraw(entry)
            self._offer(entry)

    def _withdraw(self, entry: Entry) -> None:
        self._shelf.set_archived(entry, is_clean=False)
        entry.archived_token_bytes = 0.0
        self._changed.add(entry)

    def write_entry(self, entry: Entry, until_s: float = math.inf) -> None:
        if until_s == math.inf:
            # What was begun may have been about fewer tokens.
            self._mover.discard(entry)
        self._mover.add(entry)
        self._mover.run_entry(entry, until_s)

    def archive(self, entry: Entry) -> Job:
        """As it is now, as part of another job. Nothing to do where the disk has it in as many bits."""
        if entry.needs_archive and self._can_be_written(entry):
            try:
                yield from self._spill(entry, puts_away=True)
            except Exception as error:  # noqa: BLE001
                # The job that this is a part of goes on.
                self._failed(entry, error)

    def _failed(self, entry: Entry, error: Exception) -> None:
        """It is not tried again before it changes."""
        self._failures.record_failure("spills", error)
        self.refused_writes.record_refusal(entry, None)

    def _job(self, entry: Entry) -> Job | None:
        return None if entry.is_archived or not self._can_be_written(entry) else self._spill(entry)

    def _can_be_written(self, entry: Entry) -> bool:
        """Unless a request still computes it, or what it hangs on, or its conversation has left it behind."""
        if entry.is_running or not entry.nodes or self.is_superseded(entry.last_node):
            return False
        return _still_computed(entry) is None

    def _spill(self, entry: Entry, *, puts_away: bool = False) -> Job:
        leaf = entry.last_node
        end = leaf.end
        self.is_on_disk(entry)
        self._residency.begin_recording(entry)
        steps = self._cold.write_chain(
            leaf,
            puts_away=puts_away,
            unused_s=self._leaves.unused_s,
            record=self._residency.record_block,
            was_short=self._was_short,
        )
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                self._note(leaf.payload, ended.value, end)
                return
            yield
            if leaf not in leaf.payload.nodes or leaf.end != end:
                return  # it was evicted meanwhile, or cut short

    def _note(self, entry: Entry, spilled: WrittenChain, end: int) -> None:
        """What became of the tokens of an entry up to here."""
        # Unless more was joined to it meanwhile, or a block that it has has left the disk again.
        is_complete = entry.span.end == end and self._residency.is_complete(entry)
        self._shelf.set_archived(entry, is_clean=spilled.is_whole and is_complete)
        entry.archived_token_bytes = spilled.token_bytes if entry.is_archived else 0.0
        if entry.is_archived:
            self.refused_writes.remove_entry(entry)
        if not spilled.is_whole:
            self.refused_writes.record_refusal(entry, spilled.refused, spilled.end)
        elif not entry.is_archived:
            self._changed.add(entry)
        self._counters["spilled_spans" if spilled.is_whole else "refused_spills"] += 1


class NoOffloader(Offloader):
    """Without a tier nothing goes there."""

    def add(self, entry: Entry) -> None:
        del entry

    def add_free(self, max_entries: int | None = None) -> None:
        del max_entries

    def wants(self, leaf: Node[Entry]) -> bool:
        del leaf
        return False

    def write_leaf(
        self, leaf: Node[Entry], until_s: float = math.inf, *, is_transcoding: bool, goes_now: bool = False
    ) -> Handover:
        del until_s, is_transcoding, goes_now
        return Handover(leaf.start)

    def write(self, entry: Entry) -> Job:
        del entry
        yield from ()


def _still_computed(entry: Entry) -> Entry | None:
    """The first on the way to it whose owner still writes."""
    return next((node.payload for node in entry.last_node.path() if node.payload.span.is_live), None)


def disk_reason(refused: Refused | None, writing: Writing) -> DiskReason:
    """Why the disk did not take a block. None: one that it hangs on was given up, for want of room or a fault."""
    match refused:
        case None:
            return "disk_failed" if writing.paused_because and not writing.is_full else "disk_full"
        case Refused(Refusal.QUEUE_FULL):
            return "disk_slow"
        case Refused(Refusal.FIRST_TOUCH):
            return "first_touch"
        case Refused(Refusal.WRITE_BUDGET):
            return "write_budget"
        case Refused(Refusal.TOO_LARGE):
            return "disk_full"
        case _:
            return "disk_full" if writing.is_full else "disk_failed"


# What was removed for these would be again, as long as the entry has not grown.
FOR_ROOM = frozenset({RemovalCause.EVICTED, RemovalCause.NO_ROOM, RemovalCause.UNWRITABLE})


@dataclass(frozen=True)
class RefusedWrite:
    """An entry that the disk did not take, and will not as long as neither of them changes."""

    end: int
    kv_bytes: int
    used_s: float
    refused: Refused | None  # None: work on it failed, or a block before it was given up
    disk_end: int = field(default=0, compare=False)  # the disk has the tokens up to here
    cause: RemovalCause | None = field(default=None, compare=False)  # for which it left the disk; None: it was refused


class RefusedWrites:
    """`used_s` tells when a request last went on from an entry."""

    def __init__(self, tier: Tier, used_s: Callable[[Entry], float]) -> None:
        self._tier = tier
        self._used_s = used_s
        self._untaken: WeakKeyDictionary[Entry, RefusedWrite] = WeakKeyDictionary()
        # Those that the disk may take later, in order.
        self._blocked: dict[Refusal, WeakKeyDictionary[Entry, Refused]] = {
            reason: WeakKeyDictionary() for reason in (Refusal.QUEUE_FULL, Refusal.PAUSED, Refusal.WRITE_BUDGET)
        }

    def refusal_of(self, entry: Entry) -> RefusedWrite | None:
        """None: it was not refused."""
        return self._untaken.get(entry)

    def record_refusal(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> None:
        self._untaken[entry] = self._as_it_is(entry, refused, disk_end)
        if refused is not None and refused.reason in self._blocked:
            self._blocked[refused.reason][entry] = refused

    def record_removal(self, entry: Entry, removal: BlockRemoval) -> None:
        """The disk has no longer what it had taken of an entry from the start of a block on."""
        before = self._untaken.get(entry)
        disk_end = removal.start if before is None else min(before.disk_end, removal.start)
        if removal.cause in FOR_ROOM:
            self._untaken[entry] = replace(self._as_it_is(entry, None, disk_end), cause=removal.cause)
        elif before is not None:
            self._untaken[entry] = replace(before, disk_end=disk_end)

    def remove_entry(self, entry: Entry) -> None:
        """The disk has taken all of it."""
        self._untaken.pop(entry, None)

    def was_evicted(self, entry: Entry) -> bool:
        """Whether the disk evicted some of an entry for others. It is written again when memory evicts it, and not
        ahead of that: then others would give way, in turns and without end."""
        before = self._untaken.get(entry)
        return before is not None and before.cause is RemovalCause.EVICTED and entry.span.end <= before.end

    def would_recur(self, entry: Entry) -> bool:
        """Whether the disk would refuse it again: neither it nor the disk has changed."""
        before = self._untaken.get(entry)
        if before is not None and before.cause is not None:
            return before.cause is not RemovalCause.EVICTED and entry.span.end <= before.end
        if before is None or before != self._as_it_is(entry, before.refused):
            return False
        return before.refused is None or not self._tier.writing().would_take(before.refused)

    def next_takeable(self) -> Entry | None:
        """The first that the disk would take now. The first of each reason stands for the others."""
        firsts = [first for blocked in self._blocked.values() for first in [next(iter(blocked.items()), None)] if first]
        if not firsts:
            return None
        writing = self._tier.writing()
        return next((entry for entry, refused in firsts if writing.would_take(refused)), None)

    def unblock_entry(self, entry: Entry) -> None:
        """It is offered again."""
        for blocked in self._blocked.values():
            blocked.pop(entry, None)

    def forget_faults(self) -> list[Entry]:
        """After a fault: the disk may say something else now. Returns the entries concerned; those that wait for it go
        on waiting."""
        entries = [entry for entry, untaken in self._untaken.items() if untaken.cause is None]
        for entry in entries:
            del self._untaken[entry]
        return entries

    def clear(self) -> None:
        self._untaken.clear()
        for blocked in self._blocked.values():
            blocked.clear()

    def _as_it_is(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> RefusedWrite:
        return RefusedWrite(entry.span.end, entry.span.kv_bytes, self._used_s(entry), refused, disk_end)


DropReason = Literal["too_large", "no_room", "least_worth"] | UnwrittenReason


class DropCounters:
    def __init__(self, shelf: EntryTable, counters: Counter[str]) -> None:
        self._shelf = shelf
        self._counters = counters
        self._new: WeakSet[Entry] = WeakSet()

    def record_insertion(self, entry: Entry) -> None:
        self._new.add(entry)

    def record_eviction(self, entry: Entry, lost_tokens: int, reason: DropReason | None, *, num_tokens: int) -> None:
        """So many of its tokens are about to go, and `lost_tokens` of these are not on the disk. `reason`: why not;
        None: there is no disk that could have them."""
        self._counters["evicted_tokens"] += num_tokens
        is_new = entry in self._new
        self._new.discard(entry)
        if not lost_tokens:
            return
        reason = reason or self._reason(entry)
        self._counters[f"dropped_tokens_{reason}"] += lost_tokens
        if is_new:
            self._counters[f"refused_{reason}"] += 1

    def forget_new_entries(self) -> None:
        """There is room for all that is left."""
        self._new.clear()

    def _reason(self, entry: Entry) -> DropReason:
        if entry.nbytes > self._shelf.max_bytes:
            return "too_large"
        return "least_worth" if self._shelf.evictable_bytes > entry.nbytes else "no_room"
