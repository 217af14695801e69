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
        for entry in self._shelf.entries:
            if entry.is_free and not entry.is_clean and not entry.span.is_live:
                self._mover.add(entry)

    def before_eviction(self, leaf: Node[Entry]) -> None:
        """The last chance."""
        entry = leaf.payload
        if self._cold is not None and not entry.is_clean:
            self._settle(entry)
            self._write(entry)

    def flush(self, timeout_s: float) -> None:
        """Write all that the disk has not, for at most so long."""
        if self._cold is None:
            return
        until_s = time.monotonic() + timeout_s
        for entry in list(self._shelf.entries):
            if not entry.is_running:
                self._settle(entry)
                self._write_until(entry, until_s)
        self._cold.tier.flush(max(0.0, until_s - time.monotonic()))

    def _write_until(self, entry: Entry, until_s: float) -> None:
        """Again and again as the disk's queue empties, unless that is not what keeps it out."""
        assert self._cold is not None
        while not entry.is_clean and time.monotonic() < until_s:
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
        leaf = max(entry.nodes, key=lambda node: node.end)
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
