"""Writes to the shared tier."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient, holder_of, ids_to, make_block
from kvstrata.spans.blocks import Packed
from kvstrata.spans.plan import Plan
from kvstrata.spans.shared import FewerBits, pack_shared_mark, packing_shared
from kvstrata.spans.span import SpanRange
from kvstrata.tier.base import Refusal, Refused, SharedTier, Wanted
from kvstrata.tier.block import BASE, BLOCK_TOKENS, MARK, Block
from kvstrata.tier.chains import Link, TokenIds
from kvstrata.tier.lookups import Lookup

# Conversations that wait to be looked up. Older ones are left out: they are offered again when they go on.
MAX_WAITING = 256

# Until it is looked again whether the tier has answered, at the end.
FLUSH_STEP_S = 0.01


@dataclass(frozen=True)
class SharedTierClient:
    """A tier that others share, and the precision that blocks have there."""

    client: TierClient
    tier: SharedTier
    plan: Plan


@dataclass(frozen=True)
class _PendingShare:
    leaf: Node[Entry]
    end: int
    ids: TokenIds
    lookup: Lookup[Wanted]

    @property
    def is_current(self) -> bool:
        """Whether the leaf is still what it was: not evicted meanwhile, nor cut short."""
        return self.leaf in self.leaf.payload.nodes and self.leaf.end >= self.end


class Sharer:
    def __init__(self, shared: SharedTierClient, shelf: EntryTable, failures: FailureLog) -> None:
        self._cold = shared.client
        self._tier = shared.tier
        self._plan = shared.plan
        self._shelf = shelf
        self._failures = failures
        self._waiting: dict[Entry, None] = {}
        self._behind: dict[Entry, list[Entry]] = {}  # those that hang on one that is still being computed
        self._asked: _PendingShare | None = None
        self._job: Generator[None, None, None] | None = None
        self._held_back: Block | None = None  # packed, and there was no room for it

    @property
    def has_work(self) -> bool:
        if self._job is not None:
            return self._held_back is None or self._has_room(self._held_back)
        return self._asked.lookup.is_done if self._asked is not None else bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Nothing is to be done, and nothing is waited for."""
        return self._job is None and self._asked is None and not self._waiting

    def add_entry(self, entry: Entry) -> None:
        """It has come to what it should be stored as."""
        for each in (entry, *self._behind.pop(entry, ())):
            if each.nodes and each.span.end - each.span.end % BLOCK_TOKENS > each.shared_end:
                self._waiting[each] = None
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def run(self, slice_s: float) -> None:
        """At least one step, then as many as the time allows."""
        until_s = time.monotonic() + slice_s
        while self.has_work:
            self._step()
            if time.monotonic() >= until_s:
                return

    def flush(self, timeout_s: float) -> None:
        """The end: what was not written yet, as far as the time goes."""
        until_s = time.monotonic() + timeout_s
        while not self.is_idle and time.monotonic() < until_s:
            if self.has_work:
                self.run(FLUSH_STEP_S)
            elif self._asked is not None and self._job is None:
                self._asked.lookup.wait(FLUSH_STEP_S)
            else:
                time.sleep(FLUSH_STEP_S)  # the queue is full
        self._tier.flush(max(0.0, until_s - time.monotonic()))

    def _step(self) -> None:
        try:
            if self._job is None:
                self._begin()
            else:
                next(self._job)
        except StopIteration:
            self._job = self._asked = None
        except Exception as error:  # noqa: BLE001
            self._failures.record_failure("shares", error)
            self._job = self._asked = self._held_back = None

    def _begin(self) -> None:
        """Ask what is missing of the next that waits, or go on with the answer."""
        if self._asked is not None:
            self._job = self._share(self._asked, self._asked.lookup.answer)
            return
        entry = next(iter(self._waiting))
        del self._waiting[entry]
        if entry not in self._shelf.entries or not entry.nodes or self._tier.is_paused:
            return
        leaf = entry.last_node
        owner = next((node.payload for node in leaf.path() if node.payload.span.is_live), None)
        if owner is not None:
            self._behind.setdefault(owner, []).append(entry)
            self._behind = {each: those for each, those in self._behind.items() if each in self._shelf.entries}
            return
        ids = ids_to(leaf)
        marks = [at for node in leaf.path() for at in node.payload.span.marks if node.start < at <= node.end]
        aligned = tuple(sorted({at for at in marks if at % BLOCK_TOKENS == 0}))
        lookup = self._cold.start_lookup(self._tier.blocks.wanted(leaf.root_key, ids, aligned), Wanted())
        self._asked = _PendingShare(leaf, leaf.end, ids, lookup)

    def _share(self, asked: _PendingShare, wanted: Wanted) -> Generator[None, None, None]:
        if not wanted.is_known:
            return
        for link in wanted.links:
            if not asked.is_current or not (yield from self._give(asked, wanted.root, link)):
                return
        for link in wanted.marks:
            if not asked.is_current or not (yield from self._give_mark(asked, wanted.root, link)):
                return
        entry = asked.leaf.payload
        entry.shared_end = max(entry.shared_end, asked.end - asked.end % BLOCK_TOKENS)

    def _give(self, asked: _PendingShare, root: bytes, link: Link) -> Generator[None, None, bool]:
        """False: not this one, and nothing that hangs on it."""
        try:
            packed = yield from packing_shared(_runs(asked.leaf, link.start, link.end), self._plan)
        except FewerBits:
            self._tier.skipped(link.end - link.start)
            return False
        return (yield from self._put(asked, root, link, packed, BASE))

    def _give_mark(self, asked: _PendingShare, root: bytes, link: Link) -> Generator[None, None, bool]:
        entry, _ = holder_of(asked.leaf, link.end - 1)
        mark = entry.span.marks.get(link.end)
        if mark is None:
            return True
        dtypes = [spec.dtype for spec in entry.span.layout.flat()]
        try:
            packed = pack_shared_mark(mark, self._plan, dtypes)
        except FewerBits:
            return True
        yield
        return (yield from self._put(asked, root, link, packed, MARK))

    def _put(
        self, asked: _PendingShare, root: bytes, link: Link, packed: Packed, part: str
    ) -> Generator[None, None, bool]:
        entry, _ = holder_of(asked.leaf, link.end - 1)
        asked_twice = link.end <= entry.reused_end
        block = make_block(link, asked.ids, root, packed, part)
        while True:
            answer = self._tier.put(block, asked_twice=asked_twice)
            reason = answer.reason if isinstance(answer, Refused) else None
            self._held_back = block if reason is Refusal.QUEUE_FULL else None
            if self._held_back is None:
                return reason in (None, Refusal.PRESENT)
            yield

    def _has_room(self, block: Block) -> bool:
        return self._tier.writing().would_take(Refused(Refusal.QUEUE_FULL, block.nbytes))


def _runs(leaf: Node[Entry], start: int, end: int) -> list[SpanRange]:
    """Whose the tokens are, on the way to a leaf."""
    nodes = [node for node in leaf.path() if node.start < end and node.end > start]
    return [SpanRange(node.payload.span, max(start, node.start), min(end, node.end)) for node in nodes]
