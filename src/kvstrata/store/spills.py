"""What goes to the disk, and when: before it is evicted, ahead of that when memory fills up, and at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from kvstrata.index.tree import Node
from kvstrata.store.chains import Step
from kvstrata.store.cold import Cold, Spilled
from kvstrata.store.entry import Entry
from kvstrata.store.failures import Failures
from kvstrata.store.mover import Job, Mover
from kvstrata.store.shelf import Shelf
from kvstrata.tiers.disk import Refused
from kvstrata.tiers.lookups import Lookup

# Of the memory for stored spans: from here on what is not on the disk is written there, ahead of need.
SPILL_SHARE = 0.7
# Of a flush, until the disk's queue is looked at again.
FLUSH_SLICE_S = 0.5
# Of the disk's limit, that a flush fills at most: the catalogue and whole pages take some.
FLUSH_SHARE = 0.9
# The second, where the disk failed during the first: maybe for a moment only.
FLUSH_ATTEMPTS = 2


@dataclass(frozen=True)
class Untaken:
    """What the disk did not take, and will not as long as neither it nor the disk changes."""

    end: int
    kv_bytes: int
    used_s: float
    refused: Refused | None


class Spills:
    """`settle` brings an entry to what it should be stored as, at once: that is what is written."""

    def __init__(
        self,
        cold: Cold | None,
        shelf: Shelf,
        counters: Counter[str],
        failures: Failures,
        settle: Callable[[Entry], None],
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._counters = counters
        self._settle = settle
        self._failures = failures
        self._mover = Mover(self._job, lambda _: None, self._failed)
        self._num_faults = 0  # of the disk, when its blocks were last looked at
        self._untaken: WeakKeyDictionary[Entry, Untaken] = WeakKeyDictionary()

    @property
    def idle(self) -> bool:
        return self._mover.idle

    def work(self, slice_s: float) -> None:
        self._mover.work(slice_s)

    def add(self, entry: Entry) -> None:
        if self._cold is not None:
            self._mover.add(entry)

    def add_some(self, limit_bytes: int) -> None:
        """Memory fills up: write what would have to go, so that it need not wait for the disk then."""
        if self._shelf.held_bytes > SPILL_SHARE * limit_bytes:
            self.add_free()

    def add_free(self) -> None:
        """All that nobody uses and the disk has not."""
        if self._cold is None:
            return
        self._look_again()
        for entry in self._shelf.entries:
            if entry.is_free and not entry.is_clean and self._may_be_taken(entry, self._cold):
                self._mover.add(entry)

    def _may_be_taken(self, entry: Entry, cold: Cold) -> bool:
        before = self._untaken.get(entry)
        if before is None or before != self._as_untaken(entry, before.refused):
            return _can_be_written(entry)
        return before.refused is not None and cold.tier.would_take(before.refused)

    def _as_untaken(self, entry: Entry, refused: Refused | None) -> Untaken:
        return Untaken(entry.span.end, entry.span.kv_bytes, self._shelf.used_s(entry), refused)

    def give_up(self, under: bytes = b"") -> None:
        """What is being written, under all roots that begin so: the disk is cleared."""
        self._untaken.clear()
        for entry in self._mover.waiting:
            if entry.root_key.startswith(under):
                self._mover.discard(entry)

    def before_eviction(self, leaf: Node[Entry]) -> None:
        """The last chance."""
        self._look_again()
        if self._cold is not None and not leaf.payload.is_clean:
            self._settle_to(leaf)
            self._write(leaf.payload)

    def _settle_to(self, leaf: Node[Entry]) -> None:
        """A leaf's span, and what it hangs on as far as that has no memory of its own yet. Spans that are settled are
        joined: the leaf may be another's afterwards."""
        for entry in dict.fromkeys(node.payload for node in leaf.path()):
            if not entry.is_running and (entry.span.is_live or entry is leaf.payload):
                self._settle(entry)

    def flush(self, timeout_s: float) -> None:
        """Write all that the disk has not, for at most so long, whatever it said before."""
        if self._cold is None:
            return
        until_s = time.monotonic() + timeout_s
        tier = self._cold.tier
        for _ in range(FLUSH_ATTEMPTS):
            num_faults = tier.num_faults
            tier.end_pause()
            self._flush_once(self._cold, until_s)
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
            entry.is_clean = bool(lookup.answer)
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
        for entry in sorted(ended, key=lambda e: (e.is_pinned, self._shelf.end_used_s(e)), reverse=True):
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
            entry.is_clean = False

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

    def _write(self, entry: Entry) -> None:
        # What was begun may have been about fewer tokens.
        self._mover.discard(entry)
        self._mover.add(entry)
        self._mover.finish(entry)

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
        steps = cold.spill(leaf, puts_away=puts_away, unused_s=self._shelf.unused_s)
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
        entry.is_clean = spilled.is_whole and entry.span.end == end
        entry.clean_token_bytes = spilled.token_bytes if entry.is_clean else 0.0
        if not spilled.is_whole:
            self._untaken[entry] = self._as_untaken(entry, spilled.refused)
        self._counters["spilled_spans" if spilled.is_whole else "refused_spills"] += 1


def _can_be_written(entry: Entry) -> bool:
    """Unless somebody still writes it, or what it hangs on."""
    if entry.is_running or not entry.nodes:
        return False
    return not any(node.payload.span.is_live for node in entry.last_node.path())
