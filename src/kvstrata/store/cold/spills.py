"""What goes to the disk, and when: before it is evicted, ahead of that when memory fills up, and at the end."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, takewhile
from weakref import WeakKeyDictionary

from kvstrata.disk.lookups import Lookup
from kvstrata.disk.reasons import Refusal
from kvstrata.disk.tier import Refused
from kvstrata.index.tree import Node
from kvstrata.store.cold.chains import Step, finish
from kvstrata.store.cold.cold import Cold, Spilled, ids_to
from kvstrata.store.cold.unwritten import Unwritten
from kvstrata.store.entry import Entry
from kvstrata.store.failures import Failures
from kvstrata.store.leaves import Leaves
from kvstrata.store.losses import Reason, disk_reason
from kvstrata.store.precision.mover import Job, Mover
from kvstrata.store.shelf import Shelf

# Of the memory for stored spans: from here on what is not on the disk is written there, ahead of need.
SPILL_SHARE = 0.7
# Of a flush, until the disk's queue is looked at again.
FLUSH_SLICE_S = 0.5
# Of the disk's limit, that a flush fills at most: the catalogue and whole pages take some.
FLUSH_SHARE = 0.9
# Entries that have changed, in one step of the engine: a look at one takes about a fifth of a millisecond.
MAX_OFFERED = 16
# The second, where the disk failed during the first: maybe for a moment only.
FLUSH_ATTEMPTS = 2


@dataclass(frozen=True)
class Untaken:
    """What the disk did not take, and will not as long as neither it nor the disk changes."""

    end: int
    kv_bytes: int
    used_s: float
    refused: Refused | None
    disk_end: int = field(default=0, compare=False)  # the disk has the tokens up to here


@dataclass(frozen=True)
class Handover:
    """What the disk has of a leaf that is to go."""

    end: int  # of the tokens that it has, or that are on their way
    reason: Reason | None = None  # why not all; None: it has all, or there is no disk that could
    waits: bool = False  # the disk works, and takes more when its queue has room, or the bytes are packed


class Spills:
    """`rewriter` brings an entry to what it should be stored as: that is what is written."""

    def __init__(
        self,
        cold: Cold | None,
        shelf: Shelf,
        leaves: Leaves,
        counters: Counter[str],
        failures: Failures,
        rewriter: Mover,
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._leaves = leaves
        self._counters = counters
        self._rewriter = rewriter
        self._failures = failures
        self._mover = Mover(self._job, lambda _: None, self._failed)
        self._num_faults = 0  # of the disk, when its blocks were last looked at
        self._untaken: WeakKeyDictionary[Entry, Untaken] = WeakKeyDictionary()
        self._changed = shelf.journal.reader()  # those that may have to be written
        self._behind: dict[Entry, list[Entry]] = {}  # those that hang on one that is still being computed
        # Those that the disk may take later, in order.
        self._blocked: dict[Refusal, WeakKeyDictionary[Entry, Refused]] = {
            reason: WeakKeyDictionary() for reason in (Refusal.QUEUE_FULL, Refusal.PAUSED, Refusal.WRITE_BUDGET)
        }

    @property
    def idle(self) -> bool:
        """Nothing is to be done now. More may be as soon as the disk takes blocks again."""
        return self._mover.idle and self._next_blocked() is None

    def work(self, slice_s: float) -> None:
        entry = self._next_blocked() if self._mover.idle else None
        if entry is not None:
            self._unblock(entry)
            self._mover.add(entry)
        self._mover.work(slice_s)

    def _next_blocked(self) -> Entry | None:
        """The first that the disk would take now. The first of each reason stands for the others."""
        for blocked in self._blocked.values():
            entry, refused = next(iter(blocked.items()), (None, None))
            if refused is not None and self._cold is not None and self._cold.tier.would_take(refused):
                return entry
        return None

    def _unblock(self, entry: Entry) -> None:
        for blocked in self._blocked.values():
            blocked.pop(entry, None)

    def add(self, entry: Entry) -> None:
        if self._cold is not None:
            self._mover.add(entry)

    def add_some(self, limit_bytes: int, hot_bytes: int) -> None:
        """Memory fills up: write what would have to go, so that it need not wait for the disk then. `limit_bytes`: what
        running sequences leave of `hot_bytes`."""
        if self._shelf.held_bytes > limit_bytes - (1 - SPILL_SHARE) * hot_bytes:
            self.add_free(MAX_OFFERED)

    def add_free(self, max_entries: int | None = None) -> None:
        """What no request uses and the disk has not. Only entries that have changed are looked at, so many at most: the
        others wait to be written, are on the disk, or were refused."""
        if self._cold is None:
            return
        self._look_again()
        for entry in islice(self._changed.take(), max_entries):
            for each in (entry, *self._behind.pop(entry, ())):
                self._offer(each, self._cold)

    def _offer(self, entry: Entry, cold: Cold) -> None:
        if entry not in self._shelf.entries or not entry.is_free or entry.is_clean or not entry.nodes:
            return
        owner = _still_computed(entry)
        if owner is not None:
            self._behind.setdefault(owner, []).append(entry)
        elif not self._would_be_refused(entry, cold):
            self._mover.add(entry)

    def _would_be_refused(self, entry: Entry, cold: Cold) -> bool:
        """Again, since neither it nor the disk has changed."""
        before = self._untaken.get(entry)
        if before is None or before != self._as_untaken(entry, before.refused):
            return False
        return before.refused is None or not cold.tier.would_take(before.refused)

    def _as_untaken(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> Untaken:
        return Untaken(entry.span.end, entry.span.kv_bytes, self._leaves.used_s(entry), refused, disk_end)

    def give_up(self, under: bytes = b"") -> None:
        """What is being written, under all roots that begin so: the disk is cleared."""
        self._untaken.clear()
        for blocked in self._blocked.values():
            blocked.clear()
        for entry in self._shelf.entries:
            self._changed.add(entry)
            if entry.root_key.startswith(under):
                self._mover.discard(entry)

    def hand_over(self, leaf: Node[Entry], until_s: float = math.inf) -> Handover:
        """A leaf is to go: give it to the disk, as far as that can be done until then."""
        if self._cold is None:
            return Handover(leaf.start)
        self._look_again()
        if not leaf.payload.is_clean and not self._would_be_refused(leaf.payload, self._cold):
            self._settle_to(leaf, until_s)
            self._write(leaf.payload, until_s)
        entry = leaf.payload
        if entry.is_clean:
            return Handover(leaf.end)
        if self._rewriter.has(entry) or self._mover.has(entry):
            return Handover(leaf.start, "disk_slow", waits=self._cold.is_working)
        untaken = self._untaken.get(entry)
        if untaken is None:
            return Handover(leaf.start)  # what it hangs on is still being computed
        is_queue_full = untaken.refused is not None and untaken.refused.reason is Refusal.QUEUE_FULL
        waits = is_queue_full and self._cold.is_working
        return Handover(untaken.disk_end, disk_reason(untaken.refused, self._cold.tier.paused_because), waits)

    def _settle_to(self, leaf: Node[Entry], until_s: float = math.inf) -> None:
        """A leaf's span, and what it hangs on as far as that has no memory of its own yet. Spans that are settled are
        joined: the leaf may be another's afterwards."""
        for entry in dict.fromkeys(node.payload for node in leaf.path()):
            if not entry.is_running and (entry.span.is_live or entry is leaf.payload):
                self._rewriter.finish(entry, until_s)

    def flush(self, timeout_s: float) -> Unwritten:
        """Write all that the disk has not, for at most so long, whatever it said before. Tells what is left."""
        if self._cold is None:
            return Unwritten()
        began_s, written_bytes = time.monotonic(), self._cold.tier.usage().written_bytes
        self._flush(self._cold, began_s + timeout_s)
        seconds = time.monotonic() - began_s
        bytes_per_s = (self._cold.tier.usage().written_bytes - written_bytes) / max(seconds, 1e-6)
        return self._unwritten(self._cold, seconds, bytes_per_s, is_late=seconds >= timeout_s)

    def _unwritten(self, cold: Cold, seconds: float, bytes_per_s: float, *, is_late: bool) -> Unwritten:
        queued, reasons = cold.tier.queued_keys(), Counter[Reason]()
        num_bytes, leaves = 0.0, 0
        for entry in [entry for entry in self._shelf.entries if entry.nodes and not entry.is_running]:
            leaf = entry.last_node
            chain = finish(cold.chains.longest(leaf.root_key, 0, ids_to(leaf)))
            steps = takewhile(lambda step: step.key not in queued, chain.steps)
            end = max((step.end for step in steps), default=0)
            num_left = sum(max(0, node.end - max(node.start, end)) for node in entry.nodes)
            reason = "disk_slow" if is_late else self._why_left(entry, cold)
            if num_left and reason != "first_touch":
                reasons[reason] += num_left
                num_bytes += entry.nbytes * num_left / entry.span.num_tokens
                leaves += leaf.is_leaf
        return Unwritten(leaves, reasons.total(), int(num_bytes), reasons, bytes_per_s, seconds)

    def _why_left(self, entry: Entry, cold: Cold) -> Reason:
        """Where there was time."""
        untaken = self._untaken.get(entry)
        return disk_reason(untaken.refused if untaken else None, cold.tier.paused_because)

    def _flush(self, cold: Cold, until_s: float) -> None:
        tier = cold.tier
        for _ in range(FLUSH_ATTEMPTS):
            num_faults = tier.num_faults
            tier.end_pause()
            self._flush_once(cold, until_s)
            tier.flush(max(0.0, until_s - time.monotonic()))
            if tier.num_faults == num_faults:
                return

    def _flush_once(self, cold: Cold, until_s: float) -> None:
        room_bytes = int(FLUSH_SHARE * cold.tier.limit_bytes)
        chosen = self._worth_flushing(room_bytes)
        lookups = [(entry, self._blocks_of(entry, cold)) for entry in reversed(chosen) if entry.is_clean]
        for entry, lookup in lookups:
            lookup.wait(max(0.0, until_s - time.monotonic()))
            # Unless the disk has evicted it since, it was used just now: others go before it, and the newest last.
            cold.touch(lookup.answer)
            self._shelf.set_clean(entry, is_clean=bool(lookup.answer))
        version = self._shelf.version
        for leaf in [entry.last_node for entry in chosen]:
            if time.monotonic() < until_s:
                self._settle_to(leaf)
                self._write_until(leaf.payload, until_s)
        if version != self._shelf.version:
            # Settled spans are joined: some have grown after they were written.
            for entry in self._worth_flushing(room_bytes):
                self._write_until(entry, until_s)

    def _worth_flushing(self, room_bytes: int) -> list[Entry]:
        """What is pinned and what was used last comes first. What there is no room for beside that would only push it
        out again; but the beginning of a conversation that is longer than the disk is better than nothing."""
        chosen, left_bytes = list[Entry](), room_bytes
        ended = [entry for entry in self._shelf.entries if entry.nodes and not entry.is_running]
        for entry in sorted(ended, key=lambda e: (e.is_pinned, self._leaves.end_used_s(e)), reverse=True):
            if left_bytes >= min(entry.span.nbytes, room_bytes):
                left_bytes -= entry.span.nbytes
                chosen.append(entry)
        return chosen

    def _look_again(self) -> None:
        """After a fault: the disk may have given up what it had taken. What it still has is found when it is to be
        written again, each entry in its turn."""
        if self._cold is None or self._cold.tier.num_faults == self._num_faults:
            return
        self._num_faults = self._cold.tier.num_faults
        self._untaken.clear()
        for entry in self._shelf.entries:
            self._shelf.set_clean(entry, is_clean=False)
            self._changed.add(entry)

    def _blocks_of(self, entry: Entry, cold: Cold) -> Lookup[tuple[Step, ...]]:
        leaf = entry.last_node
        return cold.blocks_to(leaf, with_mark=leaf.end in entry.span.marks)

    def _write_until(self, entry: Entry, until_s: float) -> None:
        """Again and again as the disk's queue empties, unless that is not what keeps it out."""
        assert self._cold is not None
        while entry.nodes and not entry.is_clean and time.monotonic() < until_s:
            was_full = self._cold.tier.usage().queue_bytes > 0
            self._write(entry)
            if not entry.is_clean:
                if not was_full:
                    return
                self._cold.tier.flush(min(FLUSH_SLICE_S, max(0.0, until_s - time.monotonic())))

    def _write(self, entry: Entry, until_s: float = math.inf) -> None:
        if until_s == math.inf:
            # What was begun may have been about fewer tokens.
            self._mover.discard(entry)
        self._mover.add(entry)
        self._mover.finish(entry, until_s)

    def write(self, entry: Entry) -> Job:
        """As it is now, as part of another job. Nothing to do where the disk has it in as many bits."""
        if self._cold is not None and entry.can_be_put_away and _can_be_written(entry):
            try:
                yield from self._spill(entry, self._cold, puts_away=True)
            except Exception as error:  # noqa: BLE001
                # The job that this is a part of goes on.
                self._failed(entry, error)

    def _failed(self, entry: Entry, error: Exception) -> None:
        """It is not tried again before it changes."""
        self._failures.note("spills", error)
        self._untaken[entry] = self._as_untaken(entry, None)

    def _job(self, entry: Entry) -> Job | None:
        if self._cold is None or entry.is_clean or not _can_be_written(entry):
            return None
        return self._spill(entry, self._cold)

    def _spill(self, entry: Entry, cold: Cold, *, puts_away: bool = False) -> Job:
        leaf = entry.last_node
        end = leaf.end
        steps = cold.spill(leaf, puts_away=puts_away, unused_s=self._leaves.unused_s)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                self._note(leaf.payload, ended.value, end)
                return
            yield
            if leaf not in leaf.payload.nodes or leaf.end != end:
                return  # it was evicted meanwhile, or cut short

    def _note(self, entry: Entry, spilled: Spilled, end: int) -> None:
        """What became of the tokens of an entry up to here."""
        # Unless more was joined to it meanwhile.
        self._shelf.set_clean(entry, is_clean=spilled.is_whole and entry.span.end == end)
        entry.clean_token_bytes = spilled.token_bytes if entry.is_clean else 0.0
        if not spilled.is_whole:
            self._untaken[entry] = self._as_untaken(entry, spilled.refused, spilled.end)
            if spilled.refused is not None and spilled.refused.reason in self._blocked:
                self._blocked[spilled.refused.reason][entry] = spilled.refused
        elif not entry.is_clean:
            self._changed.add(entry)  # it has grown
        self._counters["spilled_spans" if spilled.is_whole else "refused_spills"] += 1


def _can_be_written(entry: Entry) -> bool:
    """Unless a request still computes it, or what it hangs on."""
    return not entry.is_running and bool(entry.nodes) and _still_computed(entry) is None


def _still_computed(entry: Entry) -> Entry | None:
    """The first on the way to it whose owner still writes."""
    return next((node.payload for node in entry.last_node.path() if node.payload.span.is_live), None)
