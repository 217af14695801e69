"""What goes to the disk, and when: before it is evicted, ahead of that when memory fills up, and at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvstrata.index.tree import Node
from kvstrata.store.cold import Cold
from kvstrata.store.entry import Entry
from kvstrata.store.mover import Job, Mover
from kvstrata.store.shelf import Shelf

# Of the memory for stored spans: from here on what is not on the disk is written there, ahead of need.
SPILL_SHARE = 0.7
# Of a flush, until the disk's queue is looked at again.
FLUSH_SLICE_S = 0.5
# Of the disk's limit, that a flush fills at most: the catalogue and whole pages take some.
FLUSH_SHARE = 0.9
# The second, where the disk failed during the first: maybe for a moment only.
FLUSH_ATTEMPTS = 2


class Spills:
    """`settle` brings an entry to what it should be stored as, at once: that is what is written."""

    def __init__(
        self, cold: Cold | None, shelf: Shelf, counters: Counter[str], settle: Callable[[Entry], None]
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._counters = counters
        self._settle = settle
        self._mover = Mover(self._job, lambda _: None)
        self._num_faults = 0  # of the disk, when its blocks were last looked at

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
            if entry.is_free and not entry.is_clean and not entry.span.is_live:
                self._mover.add(entry)

    def before_eviction(self, leaf: Node[Entry]) -> None:
        """The last chance."""
        entry = leaf.payload
        self._look_again()
        if self._cold is not None and not entry.is_clean:
            self._settle(entry)
            self._write(entry)

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
        chosen = self._worth_flushing(int(FLUSH_SHARE * cold.tier.limit_bytes))
        for entry in reversed(chosen):
            if entry.is_clean:
                # Unless the disk has evicted it since, it was used just now: others go before it, and the newest last.
                steps = cold.blocks_to(entry.last_node)
                cold.touch(steps)
                entry.is_clean = bool(steps)
        for entry in chosen:
            if time.monotonic() < until_s:
                self._settle(entry)
                self._write_until(entry, until_s)

    def _worth_flushing(self, room_bytes: int) -> list[Entry]:
        """What is pinned and what was used last comes first. What there is no room for beside that would only push it
        out again; but the beginning of a conversation that is longer than the disk is better than nothing."""
        chosen, left_bytes = list[Entry](), room_bytes
        for entry in sorted(self._shelf.entries, key=lambda e: (e.is_pinned, self._shelf.used_s(e)), reverse=True):
            if entry.nodes and not entry.is_running and left_bytes >= min(entry.span.nbytes, room_bytes):
                left_bytes -= entry.span.nbytes
                chosen.append(entry)
        return chosen

    def _look_again(self) -> None:
        """After a fault: the disk may have given up what it had taken."""
        if self._cold is None or self._cold.tier.num_faults == self._num_faults:
            return
        self._num_faults = self._cold.tier.num_faults
        for entry in self._shelf.entries:
            entry.is_clean = entry.is_clean and bool(entry.nodes) and bool(self._cold.blocks_to(entry.last_node))

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
        self._mover.add(entry)
        self._mover.finish(entry)

    def write(self, entry: Entry) -> Job:
        """As it is now, as part of another job. Nothing to do where it is on the disk already."""
        if self._cold is not None and entry.can_be_put_away:
            yield from self._spill(entry, self._cold)

    def _job(self, entry: Entry) -> Job | None:
        if self._cold is None or entry.is_clean or entry.is_running or not entry.nodes:
            return None
        return self._spill(entry, self._cold)

    def _spill(self, entry: Entry, cold: Cold) -> Job:
        token_bytes = entry.span.kv_bytes / max(1, entry.span.num_tokens)
        leaf = entry.last_node
        end = leaf.end
        steps = cold.spill(leaf)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                # Unless more was joined to it meanwhile.
                entry.is_clean = ended.value and entry.span.end == end
                break
            yield
            if entry not in self._shelf.entries:
                return
        entry.clean_token_bytes = token_bytes if entry.is_clean else 0.0
        self._counters["spilled_spans" if entry.is_clean else "refused_spills"] += 1
