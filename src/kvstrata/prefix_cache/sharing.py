"""Writes to the shared tier.

Entries that have reached their target format are queued; the tier is asked which blocks of the path to an entry it
wants, and those are packed in the shared precision and written, in small steps on the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

from kvstrata.kv.packing import FewerBits, pack_shared, pack_shared_checkpoint
from kvstrata.kv.precision_plan import PrecisionPlan
from kvstrata.kv.span import SpanRange
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient, entry_at, first_live_entry, ids_to, make_block
from kvstrata.tiers.block import BASE, BLOCK_TOKENS, CHECKPOINT, Block, BlockContent
from kvstrata.tiers.interface import ChainLink, MissingChain, Refusal, Refused, SharedTier, TokenIds
from kvstrata.tiers.lookups import Lookup

# Entries that wait to be shared. Older ones are dropped: they are queued again when their conversation continues.
MAX_WAITING = 256

# How long a flush waits for the tier at a time.
FLUSH_STEP_S = 0.01


@dataclass(frozen=True)
class SharedTierClient:
    """A tier that other servers share, and the precision of its blocks."""

    client: TierClient
    tier: SharedTier
    plan: PrecisionPlan


@dataclass(frozen=True)
class _PendingShare:
    """An entry that is being shared, and the question which of its blocks the tier wants."""

    leaf: Node[Entry]
    end: int
    ids: TokenIds
    lookup: Lookup[MissingChain]

    @property
    def is_current(self) -> bool:
        """Whether the leaf has neither been evicted nor cut since the tier was asked."""
        return self.leaf in self.leaf.payload.nodes and self.leaf.end >= self.end


class Sharer:
    """Writes entries to the shared tier, one at a time."""

    def __init__(self, shared: SharedTierClient, table: EntryTable, failures: FailureLog) -> None:
        self._client = shared.client
        self._tier = shared.tier
        self._plan = shared.plan
        self._table = table
        self._failures = failures
        self._waiting: dict[Entry, None] = {}
        self._waiting_for_parent: dict[Entry, list[Entry]] = {}  # by the running entry that they continue
        self._pending: _PendingShare | None = None
        self._job: Generator[None, None, None] | None = None
        self._refused_block: Block | None = None  # packed, and refused because the queue was full

    @property
    def has_work(self) -> bool:
        if self._job is not None:
            return self._refused_block is None or self._would_take(self._refused_block)
        return self._pending.lookup.is_done if self._pending is not None else bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, asked or being written."""
        return self._job is None and self._pending is None and not self._waiting

    def add_entry(self, entry: Entry) -> None:
        """Queue an entry that has reached its target format, and the entries that waited for it."""
        for each in (entry, *self._waiting_for_parent.pop(entry, ())):
            if each.nodes and each.span.end - each.span.end % BLOCK_TOKENS > each.shared_end:
                self._waiting[each] = None
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def run(self, slice_s: float) -> None:
        """Run at least one step, and more while the time slice lasts."""
        until_s = time.monotonic() + slice_s
        while self.has_work:
            self._step()
            if time.monotonic() >= until_s:
                return

    def flush(self, timeout_s: float) -> None:
        """Write all queued entries before a shutdown, until the timeout."""
        until_s = time.monotonic() + timeout_s
        while not self.is_idle and time.monotonic() < until_s:
            if self.has_work:
                self.run(FLUSH_STEP_S)
            elif self._pending is not None and self._job is None:
                self._pending.lookup.wait(FLUSH_STEP_S)
            else:
                time.sleep(FLUSH_STEP_S)  # the tier's queue is full
        self._tier.flush(max(0.0, until_s - time.monotonic()))

    def _step(self) -> None:
        try:
            if self._job is None:
                self._begin_next()
            else:
                next(self._job)
        except StopIteration:
            self._job = self._pending = None
        except Exception as error:  # noqa: BLE001
            self._failures.record_failure("shares", error)
            self._job = self._pending = self._refused_block = None

    def _begin_next(self) -> None:
        """Ask the tier which blocks of the next entry it wants, or begin to write after its answer."""
        if self._pending is not None:
            self._job = self._write_job(self._pending, self._pending.lookup.answer)
            return
        entry = next(iter(self._waiting))
        del self._waiting[entry]
        if entry not in self._table.entries or not entry.nodes or self._tier.is_paused:
            return
        leaf = entry.last_node
        owner = first_live_entry(leaf)
        if owner is not None:
            self._waiting_for_parent.setdefault(owner, []).append(entry)
            self._waiting_for_parent = {
                parent: children
                for parent, children in self._waiting_for_parent.items()
                if parent in self._table.entries
            }
            return
        ids = ids_to(leaf)
        checkpoints = [
            at for node in leaf.path() for at in node.payload.span.checkpoints if node.start < at <= node.end
        ]
        aligned = tuple(sorted({at for at in checkpoints if at % BLOCK_TOKENS == 0}))
        lookup = self._client.start_lookup(self._tier.blocks.missing_chain(leaf.root_key, ids, aligned), MissingChain())
        self._pending = _PendingShare(leaf, leaf.end, ids, lookup)

    def _write_job(self, pending: _PendingShare, wanted: MissingChain) -> Generator[None, None, None]:
        if not wanted.is_known:
            return
        for link in wanted.links:
            if not pending.is_current or not (yield from self._write_block(pending, wanted.root, link)):
                return
        for link in wanted.marks:
            if not pending.is_current or not (yield from self._write_checkpoint(pending, wanted.root, link)):
                return
        entry = pending.leaf.payload
        self._table.set_shared_end(entry, pending.end - pending.end % BLOCK_TOKENS)

    def _write_block(self, pending: _PendingShare, root: bytes, link: ChainLink) -> Generator[None, None, bool]:
        """Write a block. False: it was not written, and no later block could be reached."""
        try:
            content = yield from pack_shared(_ranges_in(pending.leaf, link.start, link.end), self._plan)
        except FewerBits:
            self._tier.skipped(link.end - link.start)
            return False
        return (yield from self._put_block(pending, root, link, content, BASE))

    def _write_checkpoint(self, pending: _PendingShare, root: bytes, link: ChainLink) -> Generator[None, None, bool]:
        """Write the checkpoint at a block's end, if there is one. False: the tier refused it."""
        entry, _ = entry_at(pending.leaf, link.end - 1)
        checkpoint = entry.span.checkpoints.get(link.end)
        if checkpoint is None:
            return True
        dtypes = [spec.dtype for spec in entry.span.layout.flat()]
        try:
            content = pack_shared_checkpoint(checkpoint, self._plan, dtypes)
        except FewerBits:
            return True
        yield
        return (yield from self._put_block(pending, root, link, content, CHECKPOINT))

    def _put_block(
        self, pending: _PendingShare, root: bytes, link: ChainLink, content: BlockContent, part: str
    ) -> Generator[None, None, bool]:
        """Put a block, and retry while the tier's queue is full. Return whether the tier has it."""
        block = make_block(link, pending.ids, root, content, part)
        while True:
            answer = self._tier.put(block)
            reason = answer.reason if isinstance(answer, Refused) else None
            self._refused_block = block if reason is Refusal.QUEUE_FULL else None
            if self._refused_block is None:
                return reason in (None, Refusal.PRESENT)
            yield

    def _would_take(self, block: Block) -> bool:
        return self._tier.write_state().would_take(Refused(Refusal.QUEUE_FULL, block.nbytes))


def _ranges_in(leaf: Node[Entry], start: int, end: int) -> list[SpanRange]:
    """Return the spans that have tokens [start, end) of the path to a leaf."""
    nodes = [node for node in leaf.path() if node.start < end and node.end > start]
    return [SpanRange(node.payload.span, max(start, node.start), min(end, node.end)) for node in nodes]
