"""Offload: chooses entries for the disk, writes them, remembers refusals.

`Offloader` decides which entries are written and when, `ChainWriter` turns the path to an entry into blocks, and
`RefusedWrites` keeps refused entries from being offered in vain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal
from weakref import WeakKeyDictionary

from kvstrata.kv.packing import block_ends, bytes_by_precision, pack, pack_checkpoint
from kvstrata.kv.precision_plan import RAW
from kvstrata.kv.transcode import transcode_layer
from kvstrata.prefix_cache.entries import STEPPED_DOWN, ArchivedCopy, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import FailureLog, Job, JobQueue
from kvstrata.prefix_cache.keys import TokenIds, chain
from kvstrata.prefix_cache.precision import PrecisionPolicy
from kvstrata.prefix_cache.radix_tree import Node
from kvstrata.prefix_cache.tier_client import TierClient, entry_at, first_live_entry, ids_to, make_block
from kvstrata.tiers.block import BASE, CHECKPOINT, Block, BlockId
from kvstrata.tiers.interface import BlockRemoval, ChainLink, Refusal, Refused, RemovalCause, Tier, WriteState

# Share of the memory for cached spans from which on entries are written ahead of eviction.
OFFLOAD_SHARE = 0.7

# Blocks that have left the disk and are processed in one step of the engine: each takes some microseconds.
MAX_REMOVALS_PER_STEP = 512

# Changed entries that are examined in one step of the engine: each takes about a fifth of a millisecond.
MAX_OFFERED = 16

# Blocks of a chain that are looked up in one step: about a millisecond.
LOOKUPS_PER_STEP = 8

DiskReason = Literal["disk_slow", "disk_failed", "disk_full", "write_budget"]

UnwrittenReason = Literal["expired", "superseded"] | DiskReason

# Reasons by which tokens of blocks that the disk had accepted and did not write are counted.
GIVEN_UP: Mapping[RemovalCause, DiskReason] = {
    RemovalCause.NO_ROOM: "disk_full",
    RemovalCause.VOLUME_FULL: "disk_full",
    RemovalCause.WRITE_BUDGET: "write_budget",
    RemovalCause.UNWRITABLE: "disk_failed",
    RemovalCause.FAILED: "disk_failed",
}


@dataclass(frozen=True)
class WrittenChain:
    """Result of writing a chain."""

    is_whole: bool  # the disk has, or has accepted, all blocks
    refused: Refused | None = None  # refusal that ended an incomplete chain; None: an earlier block was lost
    token_bytes: float = 0.0  # of the last span, as the disk has it
    end: int = 0  # of the tokens that the disk has or has accepted


class NotWritten(Exception):
    """The rest of a chain cannot be written. Raised and caught by `ChainWriter`."""

    def __init__(self, refused: Refused | None = None) -> None:
        super().__init__(refused)
        self.refused = refused


class ChainWriter:
    """Writes the blocks of a path of entries to a tier, in small steps.

    A new block continues the blocks that the tier has, wherever those end: spans are joined, cut and loaded,
    checkpoints come and go, and a chain that is cut anew from the current spans would rarely match the written one.

    Every block of an entry is recorded before the tier is asked whether it still has the block, so that no removal is
    missed.
    """

    def __init__(self, client: TierClient, table: EntryTable, precision: PrecisionPolicy) -> None:
        self._client = client
        self._tier = client.tier
        self._candidates = table.candidates
        self._residency = table.residency
        self._precision = precision

    def write_chain(self, leaf: Node[Entry], *, is_archive: bool = False) -> Generator[None, None, WrittenChain]:
        """Write the blocks up to a leaf's end that the tier does not have; stop at the first refused block, because no
        later one could be reached. `is_archive`: replace blocks of the last span that have fewer bits than memory.

        Spans may be joined between two steps; before each step the caller checks that the leaf is still cached and as
        long as it was.
        """
        ids = ids_to(leaf)
        key, start = leaf.root_key, 0
        span_start = leaf.payload.span.position
        span_bytes, span_tokens = 0, 0
        try:
            while start < len(ids):
                present = yield from self._longest_chain(key, start, ids)
                for link in present or (_next_link(leaf, key, start, ids),):
                    is_better = is_archive and link.start >= span_start and self._has_fewer_bits(link, leaf)
                    if is_better or not present or self._has_outdated_raw(link, leaf):
                        yield from self._put_block(link, leaf, ids, replace=bool(present))
                    for entry in _entries_in(link, leaf):
                        self._residency.record_block(entry, link.key)
                    self._finish_block(link, leaf, ids)
                    if link.start >= span_start:
                        span_bytes += self._tier_bytes(link)
                        span_tokens += link.end - link.start
                    key, start = link.key, link.end
                    yield
        except NotWritten as stop:
            return WrittenChain(is_whole=False, refused=stop.refused, end=start)
        return WrittenChain(is_whole=True, token_bytes=span_bytes / max(1, span_tokens), end=start)

    def _longest_chain(self, key: bytes, start: int, ids: TokenIds) -> Generator[None, None, tuple[ChainLink, ...]]:
        """Return the longest chain that the tier has from `start` on, in small steps."""
        walk, num_lookups = self._tier.blocks.longest_chain(key, start, ids), 0
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value.links
            num_lookups += 1
            if num_lookups % LOOKUPS_PER_STEP == 0:
                yield

    def _put_block(
        self, link: ChainLink, leaf: Node[Entry], ids: TokenIds, *, replace: bool
    ) -> Generator[None, None, None]:
        entry, _ = entry_at(leaf, link.start)
        content = yield from pack(entry.span, link.start, link.end)
        if link.start and not self._tier.blocks.find(link.parent):
            raise NotWritten  # the tier has given up the parent since it accepted it
        block = make_block(link, ids, leaf.root_key, content, BASE)
        self._offer_block(block, entry, replace=replace)

    def _finish_block(self, link: ChainLink, leaf: Node[Entry], ids: TokenIds) -> None:
        """Pin a block that the tier has, and write its checkpoint where the tier has none."""
        if not self._tier.blocks.find(link.key):
            raise NotWritten
        entry, _ = entry_at(leaf, link.end - 1)
        if entry.is_pinned:
            self._client.pin_written_block(entry.pins, link.key)
        checkpoint = entry.span.checkpoints.get(link.end)
        if checkpoint is not None and not self._tier.blocks.find(link.key, CHECKPOINT):
            # The tier accepted the block, so its checkpoint is worth writing, too.
            block = make_block(link, ids, leaf.root_key, pack_checkpoint(checkpoint), CHECKPOINT)
            self._offer_block(block, entry, replace=False)

    def _offer_block(self, block: Block, entry: Entry, *, replace: bool) -> None:
        unused_s = self._candidates.unused_s(entry)  # the tier counts the block's age from the last use
        answer = self._tier.put(block, replace=replace, unused_s=unused_s)
        if isinstance(answer, Refused) and answer.reason is not Refusal.PRESENT:
            raise NotWritten(answer)

    def _has_fewer_bits(self, link: ChainLink, leaf: Node[Entry]) -> bool:
        """Whether the tier's block has fewer bits than memory, and can be packed again."""
        entry, end = entry_at(leaf, link.start)
        if link.end > end or self._tier_bytes(link) >= STEPPED_DOWN * _memory_bytes(entry, link):
            return False
        return _is_one_segment(entry, link)

    def _has_outdated_raw(self, link: ChainLink, leaf: Node[Entry]) -> bool:
        """Whether the tier's block is raw because its sequence was short, while memory has it encoded."""
        entry, end = entry_at(leaf, link.start)
        if link.end > end or not self._precision.was_short(entry) or entry.span.is_live:
            return False
        is_encoded = _memory_bytes(entry, link) < STEPPED_DOWN * self._tier_bytes(link)
        return is_encoded and _is_one_segment(entry, link)

    def _tier_bytes(self, link: ChainLink) -> int:
        """Return the bytes of a block's arrays, as the tier has them."""
        return sum(bytes_by_precision(self._tier.blocks.contents(BlockId(link.key))).values())


def _entries_in(link: ChainLink, leaf: Node[Entry]) -> list[Entry]:
    """Return the entries on the path to a leaf that have tokens of a block."""
    nodes = (node for node in leaf.path() if node.start < link.end and node.end > link.start)
    return list(dict.fromkeys(node.payload for node in nodes))


def _memory_bytes(entry: Entry, link: ChainLink) -> float:
    """Return about how many bytes of memory the tokens of a block take."""
    span = entry.span
    return span.kv_bytes * (link.end - link.start) / max(1, span.num_tokens)


def _is_one_segment(entry: Entry, link: ChainLink) -> bool:
    """Whether the tokens of a block are in one segment of each layer: only then can they be packed again."""
    span = entry.span
    return all(len(span.segments(layer, link.start, link.end)) == 1 for layer in span.layers)


def _next_link(leaf: Node[Entry], parent: bytes, start: int, ids: TokenIds) -> ChainLink:
    """Return the next block that the tier does not have."""
    entry, last = entry_at(leaf, start)
    end = block_ends(entry.span, start, last)[0]
    return ChainLink(chain(parent, ids[start:end]), parent, start, end)


@dataclass(frozen=True)
class Handover:
    """State of a leaf on the disk, before it is evicted."""

    end: int  # of the tokens that the disk has or has accepted
    reason: UnwrittenReason | None = None  # why tokens are missing; None: the disk has all, or there is no disk
    waits: bool = False  # waiting pays: the disk is working, and its queue or the transcoder is behind


class Offloader:
    """Chooses entries for the disk and writes them in their current precision.

    Without a disk, nothing is offered and no leaf waits.
    """

    def __init__(self, client: TierClient, table: EntryTable, precision: PrecisionPolicy, failures: FailureLog) -> None:
        self._client = client
        self._table = table
        self._candidates = table.candidates
        self._residency = table.residency
        self._counters = failures.counters
        self._failures = failures
        self._is_memory_short = False
        self._removals = client.tier.removals
        self._writer = ChainWriter(client, table, precision)
        self._refused_writes = RefusedWrites(client.tier, table.candidates.last_use_s)
        self._jobs = JobQueue(self._make_job, lambda _: None, self._record_failure, watching=failures.breaking_on_error)
        self._num_faults = 0  # of the disk, as of the last check
        self._changed = table.dirty_sets.new_dirty_set(self._reoffer_children)  # entries that may have to be written
        self._waiting_for_parent: dict[Entry, list[Entry]] = {}  # by the running entry that they continue

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until an entry changes or the disk accepts blocks again."""
        has_no_removals = self._removals.is_empty and not self._residency.has_doubted
        return has_no_removals and self._jobs.is_idle and self._refused_writes.next_takeable() is None

    @property
    def may_postpone_writes(self) -> bool:
        """Whether memory is not short yet and the disk still has enough to write."""
        return not self._is_memory_short and not self._client.tier.write_state().is_calm

    def run(self, slice_s: float) -> None:
        """Process removals, then write for one slice of time."""
        self._process_removals(MAX_REMOVALS_PER_STEP)
        entry = self._refused_writes.next_takeable() if self._jobs.is_idle else None
        if entry is not None:
            self._refused_writes.unblock_entry(entry)
            self._jobs.add(entry)
        self._jobs.run(slice_s)

    def add_entry(self, entry: Entry) -> None:
        """Write an entry that is finished, and the entries that waited for it."""
        if not self._client.has_tier:
            return
        # A job that has begun may not know all tokens of the entry.
        self._jobs.discard(entry)
        self._offer_with_children(entry)

    def offer_under_pressure(self, limit_bytes: int, hot_bytes: int) -> None:
        """Write entries ahead of eviction when memory fills up, so that eviction need not wait for the disk.
        `limit_bytes`: the share of `hot_bytes` that running sequences leave to cached spans."""
        self._process_removals(MAX_REMOVALS_PER_STEP)
        self._is_memory_short = self._table.nbytes > limit_bytes - (1 - OFFLOAD_SHARE) * hot_bytes
        if self._is_memory_short:
            self.offer_changed(MAX_OFFERED)

    def offer_changed(self, max_entries: int | None = None) -> None:
        """Offer unused entries that the disk does not have. Only changed entries are examined, and no more than
        `max_entries`: all others wait to be written, are on the disk, or were refused."""
        if not self._client.has_tier:
            return
        self._forget_refusals_after_fault()
        for entry in islice(self._changed.drain(), max_entries):
            if entry.is_evictable or entry in self._waiting_for_parent:
                self._offer_with_children(entry)

    def _offer_with_children(self, entry: Entry) -> None:
        """Offer an entry, and the entries that continue it and waited until it was computed."""
        for each in (entry, *self._waiting_for_parent.pop(entry, ())):
            self._offer_entry(each)

    def _reoffer_children(self, entry: Entry) -> None:
        """Examine the entries that waited for a removed entry again."""
        for each in self._waiting_for_parent.pop(entry, ()):
            self._changed.add(each)

    def _offer_entry(self, entry: Entry) -> None:
        if entry not in self._table.entries or entry.is_running or entry.is_archived or not entry.nodes:
            return
        if self.is_superseded(entry.last_node):
            return  # eviction of the superseded end marks the entry as changed
        owner = first_live_entry(entry.last_node)
        if owner is not None:
            self._waiting_for_parent.setdefault(owner, []).append(entry)
        elif not self._refused_writes.would_recur(entry) and not self._refused_writes.was_evicted(entry):
            self._jobs.add(entry)

    def cancel_writes(self, under: bytes = b"") -> None:
        """Cancel writes under all roots with this prefix, because the disk is cleared; its refusals are void."""
        self._refused_writes.clear()
        self._residency.forget_loads()
        for entry in self._table.entries:
            self._changed.add(entry)
            if entry.root_key.startswith(under):
                self._jobs.discard(entry)

    def is_superseded(self, leaf: Node[Entry]) -> bool:
        """Whether a conversation has left a leaf behind: then it is not written, however often it was used. All uses
        were by the same conversation, which resumed elsewhere. Otherwise the disk would fill up with reasoning that no
        prompt repeats."""
        return self._candidates.is_superseded(leaf) and not leaf.payload.is_pinned

    def wants(self, leaf: Node[Entry]) -> bool:
        """Whether a leaf should be encoded and written before its eviction."""
        if not self._client.has_tier or self.check_archived(leaf.payload) or self.is_superseded(leaf):
            return False
        self._forget_refusals_after_fault()
        return not self._refused_writes.would_recur(leaf.payload)

    def write_leaf(
        self, leaf: Node[Entry], until_s: float = math.inf, *, is_transcoding: bool, must_evict: bool = False
    ) -> Handover:
        """Write a leaf before its eviction, until a time. `is_transcoding`: it waits to be encoded. `must_evict`: it
        is evicted whatever the result is, so all of it is written in its current precision."""
        if not self._client.has_tier:
            return Handover(leaf.start)
        if self.wants(leaf):
            if must_evict:
                self._copy_live_spans(leaf)
            self.write_entry(leaf.payload, math.inf if must_evict else until_s)
        entry = leaf.payload
        if entry.is_archived:
            return Handover(leaf.end)
        if self.is_superseded(leaf):
            return Handover(leaf.start, "superseded")
        if is_transcoding or self._jobs.has(entry):
            return Handover(leaf.start, "disk_slow", waits=self._client.is_working)
        refusal = self._refused_writes.refusal_of(entry)
        if refusal is None:
            return Handover(leaf.start)  # a request still computes the entry that the leaf continues
        is_queue_full = refusal.refused is not None and refusal.refused.reason is Refusal.QUEUE_FULL
        waits = is_queue_full and self._client.is_working
        return Handover(refusal.disk_end, disk_reason(refusal.refused, self._client.tier.write_state()), waits)

    def refusal_reason(self, entry: Entry) -> DiskReason:
        """Return why the disk has not taken all of an entry that it was offered."""
        refusal = self._refused_writes.refusal_of(entry)
        return disk_reason(refusal.refused if refusal else None, self._client.tier.write_state())

    def _copy_live_spans(self, leaf: Node[Entry]) -> None:
        """Copy the raw KV of a path out of the KV buffers of its owners: spans in such buffers cannot be written.
        Encoded segments stay as they are."""
        for entry in dict.fromkeys(node.payload for node in leaf.path()):
            if not entry.is_running and entry.span.is_live:
                for layer in entry.span.layers:
                    transcode_layer(entry.span, layer, RAW)
                self._table.recount(entry)

    def _forget_refusals_after_fault(self) -> None:
        """Forget refusals after a fault of the disk: it may accept now what it refused before."""
        num_faults = self._client.tier.write_state().num_faults
        if num_faults == self._num_faults:
            return
        self._num_faults = num_faults
        for entry in self._refused_writes.forget_faults():
            self._changed.add(entry)

    def check_archived(self, entry: Entry) -> bool:
        """Whether the disk now has, or has accepted, all of an entry."""
        self._process_removals()
        if entry.is_archived and not self._residency.is_complete(entry):
            self._withdraw_archived(entry)
        return entry.is_archived

    def _process_removals(self, max_removals: int | None = None) -> None:
        """Process blocks that have left the disk: their entries are no longer archived, and tokens that memory does not
        have either are counted as dropped. None: process all removals."""
        if self._removals.take_incomplete():
            self._residency.doubt_all()
        for removal in self._removals.take(max_removals):
            entries = self._residency.remove_block(removal.block.key)
            for entry in entries:
                self._refused_writes.record_removal(entry, removal)
                self._withdraw_archived(entry)
                if removal.cause is not RemovalCause.CLEARED:
                    self._offer_entry(entry)
            in_memory_end = max((entry.span.end for entry in entries), default=removal.start)
            lost_tokens = removal.end - max(removal.start, in_memory_end)
            if lost_tokens > 0 and removal.cause in GIVEN_UP and removal.block.part == BASE:
                self._counters[f"dropped_tokens_{GIVEN_UP[removal.cause]}"] += lost_tokens
        for entry in self._residency.take_doubted(MAX_OFFERED):
            self._withdraw_archived(entry)
            self._offer_entry(entry)

    def _withdraw_archived(self, entry: Entry) -> None:
        self._table.set_archived(entry, None)
        self._changed.add(entry)

    def write_entry(self, entry: Entry, until_s: float = math.inf) -> None:
        """Write an entry before all others, until a time."""
        if until_s == math.inf:
            # A job that has begun may not know all tokens of the entry.
            self._jobs.discard(entry)
        self._jobs.add(entry)
        self._jobs.run_entry(entry, until_s)

    def archive(self, entry: Entry) -> Job:
        """Write an entry in its current precision, as part of another job. There is nothing to write where the disk has
        it in as many bits."""
        if entry.needs_archive and self._is_writable(entry):
            try:
                yield from self._write_job(entry, is_archive=True)
            except Exception as error:  # noqa: BLE001
                # A failed write must not end the job that it is a part of.
                self._record_failure(entry, error)

    def _record_failure(self, entry: Entry, error: Exception) -> None:
        """Count a failed write, and retry it only after the entry has changed."""
        self._failures.record_failure("spills", error)
        self._refused_writes.record_refusal(entry, None)

    def _make_job(self, entry: Entry) -> Job | None:
        return None if entry.is_archived or not self._is_writable(entry) else self._write_job(entry)

    def _is_writable(self, entry: Entry) -> bool:
        """Whether there is a disk, no request computes the entry or its prefix, and it is not superseded."""
        if not self._client.has_tier or entry.is_running or not entry.nodes or self.is_superseded(entry.last_node):
            return False
        return first_live_entry(entry.last_node) is None

    def _write_job(self, entry: Entry, *, is_archive: bool = False) -> Job:
        leaf = entry.last_node
        end = leaf.end
        self.check_archived(entry)
        self._residency.begin_recording(entry)
        steps = self._writer.write_chain(leaf, is_archive=is_archive)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                self._record_result(leaf.payload, ended.value, end)
                return
            yield
            if leaf not in leaf.payload.nodes or leaf.end != end:
                return  # the leaf was evicted or cut in the meantime

    def _record_result(self, entry: Entry, written: WrittenChain, end: int) -> None:
        """Record the result of writing the tokens of an entry up to `end`."""
        # The entry may have grown by a join, or a block of it may have left the disk, since the job began.
        is_complete = entry.span.end == end and self._residency.is_complete(entry)
        is_archived = written.is_whole and is_complete
        self._table.set_archived(entry, ArchivedCopy(written.token_bytes) if is_archived else None)
        if entry.is_archived:
            self._refused_writes.remove_entry(entry)
        if not written.is_whole:
            self._refused_writes.record_refusal(entry, written.refused, written.end)
        elif not entry.is_archived:
            self._changed.add(entry)
        self._counters["spilled_spans" if written.is_whole else "refused_spills"] += 1


def disk_reason(refused: Refused | None, writing: WriteState) -> DiskReason:
    """Return why the disk does not have a block. `refused` is None where an earlier block was lost to a full disk or a
    fault."""
    match refused:
        case None:
            return "disk_failed" if writing.paused_because and not writing.is_full else "disk_full"
        case Refused(Refusal.QUEUE_FULL):
            return "disk_slow"
        case Refused(Refusal.WRITE_BUDGET):
            return "write_budget"
        case Refused(Refusal.TOO_LARGE):
            return "disk_full"
        case _:
            return "disk_full" if writing.is_full else "disk_failed"


# Causes of removal that would recur if an entry that has not grown were written again.
RECURRING_CAUSES = frozenset({RemovalCause.EVICTED, RemovalCause.NO_ROOM, RemovalCause.UNWRITABLE})


@dataclass(frozen=True)
class RefusedWrite:
    """An entry that the disk refused, as both were at that time."""

    end: int
    kv_bytes: int
    used_s: float
    refused: Refused | None  # None: the write failed, or an earlier block was lost
    disk_end: int = field(default=0, compare=False)  # of the tokens that the disk has
    cause: RemovalCause | None = field(default=None, compare=False)  # why the disk removed it; None: it was refused


class RefusedWrites:
    """Entries that the disk refused or removed, and whether offering them again pays.

    `used_s` returns when a request last used an entry.
    """

    def __init__(self, tier: Tier, used_s: Callable[[Entry], float]) -> None:
        self._tier = tier
        self._used_s = used_s
        self._refusals: WeakKeyDictionary[Entry, RefusedWrite] = WeakKeyDictionary()
        # Entries that the disk may accept later, oldest refusal first.
        self._blocked: dict[Refusal, WeakKeyDictionary[Entry, Refused]] = {
            reason: WeakKeyDictionary() for reason in (Refusal.QUEUE_FULL, Refusal.PAUSED, Refusal.WRITE_BUDGET)
        }

    def refusal_of(self, entry: Entry) -> RefusedWrite | None:
        """Return the last refusal of an entry; None: the disk did not refuse it."""
        return self._refusals.get(entry)

    def record_refusal(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> None:
        self._refusals[entry] = self._refused_now(entry, refused, disk_end)
        if refused is not None and refused.reason in self._blocked:
            self._blocked[refused.reason][entry] = refused

    def record_removal(self, entry: Entry, removal: BlockRemoval) -> None:
        """Record that a block of an entry has left the disk, and with it all tokens from the block's start on."""
        before = self._refusals.get(entry)
        disk_end = removal.start if before is None else min(before.disk_end, removal.start)
        if removal.cause in RECURRING_CAUSES:
            self._refusals[entry] = replace(self._refused_now(entry, None, disk_end), cause=removal.cause)
        elif before is not None:
            self._refusals[entry] = replace(before, disk_end=disk_end)

    def remove_entry(self, entry: Entry) -> None:
        """Forget the refusal of an entry: the disk has accepted all of it."""
        self._refusals.pop(entry, None)

    def was_evicted(self, entry: Entry) -> bool:
        """Whether the disk evicted some of an entry in favour of others. It is written again when memory evicts it, and
        not ahead of that: otherwise entries would evict each other from the disk in turns without end."""
        before = self._refusals.get(entry)
        return before is not None and before.cause is RemovalCause.EVICTED and entry.span.end <= before.end

    def would_recur(self, entry: Entry) -> bool:
        """Whether the disk would refuse an entry again, because neither has changed."""
        before = self._refusals.get(entry)
        if before is not None and before.cause is not None:
            return before.cause is not RemovalCause.EVICTED and entry.span.end <= before.end
        if before is None or before != self._refused_now(entry, before.refused):
            return False
        return before.refused is None or not self._tier.write_state().would_take(before.refused)

    def next_takeable(self) -> Entry | None:
        """Return the first entry that the disk would accept now. One refusal of each reason stands for all others."""
        firsts = [first for blocked in self._blocked.values() for first in [next(iter(blocked.items()), None)] if first]
        if not firsts:
            return None
        writing = self._tier.write_state()
        return next((entry for entry, refused in firsts if writing.would_take(refused)), None)

    def unblock_entry(self, entry: Entry) -> None:
        """Remove an entry that is offered again from the blocked entries."""
        for blocked in self._blocked.values():
            blocked.pop(entry, None)

    def forget_faults(self) -> list[Entry]:
        """Forget refusals after a fault, and return their entries. Blocked entries stay blocked."""
        entries = [entry for entry, refusal in self._refusals.items() if refusal.cause is None]
        for entry in entries:
            del self._refusals[entry]
        return entries

    def clear(self) -> None:
        self._refusals.clear()
        for blocked in self._blocked.values():
            blocked.clear()

    def _refused_now(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> RefusedWrite:
        return RefusedWrite(entry.span.end, entry.span.kv_bytes, self._used_s(entry), refused, disk_end)
