"""Loads from tiers: for waiting requests, and archived planes.

`Prefetcher` brings blocks that a waiting request can use into memory; `Restorer` brings back planes that entries in
memory have dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kvstrata.attention.segments import SealedSegment, Segment, SegmentSlice
from kvstrata.kv.packing import join_blocks
from kvstrata.kv.precision_plan import PrecisionPlan, bits_of
from kvstrata.kv.span import Span
from kvstrata.kv.transcode import shrink
from kvstrata.prefix_cache.entries import STEPPED_DOWN, ArchivedCopy, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.insertion import Inserter
from kvstrata.prefix_cache.jobs import FailureLog, run_to_end
from kvstrata.prefix_cache.keys import Tokens, as_ids
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import BlockLoad, TierClient, ids_to
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.tiers.block import BLOCK_TOKENS
from kvstrata.tiers.interface import ChainLink, TierMatch
from kvstrata.tiers.lookups import Lookup

# How long a request waits for the answer of a tier on a network: this share of the time that computing the missing
# tokens would take.
LOOKUP_SHARE = 0.015

# The least such wait: a round trip, and the threads on the way.
MIN_WAIT_S = 0.02


@dataclass(frozen=True)
class TierOffer:
    """Blocks of a prompt that one tier has."""

    client: TierClient
    match: TierMatch


@dataclass(frozen=True)
class TierQuestion:
    """Lookup of a prompt on one tier."""

    client: TierClient
    lookup: Lookup[TierMatch]
    until_s: float | None = None  # when waiting for the answer ends; None: the caller decides


@dataclass(frozen=True)
class TierOffers:
    """Lookups of one prompt on all tiers, the nearest tier first."""

    questions: tuple[TierQuestion, ...]
    asked_s: float

    @property
    def is_done(self) -> bool:
        """Whether each tier has answered or is not worth waiting for any more."""
        now_s = time.monotonic()
        return all(
            question.lookup.is_done or (question.until_s is not None and now_s >= question.until_s)
            for question in self.questions
        )

    @property
    def offers(self) -> tuple[TierOffer, ...]:
        return tuple(
            TierOffer(question.client, question.lookup.answer) for question in self.questions if question.lookup.is_done
        )

    def deadline_s(self, patience_s: float) -> float:
        """Return when to check again unless an answer arrives; no tier is waited for longer than `patience_s`."""
        latest_s = self.asked_s + patience_s
        open_ends = [question.until_s for question in self.questions if not question.lookup.is_done]
        return min([latest_s, *(end for end in open_ends if end is not None)])

    def wait(self, timeout_s: float) -> bool:
        """Wait for all answers. Return whether they arrived in time."""
        until_s = time.monotonic() + timeout_s
        return all(question.lookup.wait(max(0.0, until_s - time.monotonic())) for question in self.questions)

    def withdraw(self) -> None:
        for question in self.questions:
            question.lookup.withdraw()


class Prefetcher:
    """Loads blocks of waiting requests into memory. `shared`: a tier on a network; None: there is none."""

    def __init__(
        self,
        client: TierClient,
        shared: SharedTierClient | None,
        matcher: PrefixMatcher,
        inserter: Inserter,
        reclaimer: Reclaimer,
        failures: FailureLog,
    ) -> None:
        self._client = client
        self._shared = shared
        self._matcher = matcher
        self._table = inserter.table
        self._leases = inserter.leases
        self._inserter = inserter
        self._reclaimer = reclaimer
        self._failures = failures
        self._residency = inserter.table.residency

    @property
    def _counters(self) -> Counter[str]:
        return self._failures.counters

    def ask(self, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0) -> TierOffers | None:
        """Look up a prompt on the tiers. None: no tier can have more of it than memory."""
        ids, root = as_ids(tokens), self._matcher.root_of(salt)
        now_s = time.monotonic()
        questions = list[TierQuestion]()
        with self._failures.counting("lookups"):
            questions.append(TierQuestion(self._client, self._client.find_chain(root, ids)))
        missing_tokens = len(ids) - self._matcher.find(ids, salt).num_tokens
        with self._failures.counting("lookups"):
            wait_s = self._shared_wait_s(missing_tokens, len(ids), prefill_tokens_s)
            if self._shared is not None and wait_s:
                questions.append(
                    TierQuestion(self._shared.client, self._shared.client.find_chain(root, ids), now_s + wait_s)
                )
        useful = tuple(
            question for question in questions if not question.lookup.is_done or question.lookup.answer.num_tokens
        )
        return TierOffers(useful, now_s) if useful and missing_tokens else None

    def _shared_wait_s(self, missing_tokens: int, num_tokens: int, prefill_tokens_s: float) -> float:
        """Return how long to wait for the shared tier at most; 0: asking it does not pay."""
        if self._shared is None or num_tokens - num_tokens % BLOCK_TOKENS <= num_tokens - missing_tokens:
            return 0.0
        compute_s = missing_tokens / prefill_tokens_s if prefill_tokens_s else float("inf")
        wait_s = min(1.0, max(MIN_WAIT_S, LOOKUP_SHARE * compute_s))
        tier = self._shared.tier
        return 0.0 if tier.is_paused or tier.expected_latency_s > min(wait_s, compute_s) else wait_s

    def begin_load(
        self, offer: TierOffer, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0
    ) -> BlockLoad | None:
        """Begin to load the blocks of an offer that memory does not have, if reading them is expected to be faster than
        computing them at `prefill_tokens_s` (0: that speed is unknown). None: the offer has no more than memory, or
        reading is slower."""
        match, loader = offer.match, offer.client.loader
        ids, root = as_ids(tokens), self._matcher.root_of(salt)
        cached = self._matcher.find(ids, salt)
        rest = match.after(cached.num_tokens)
        seconds = loader.expected_seconds(rest)
        more_tokens = match.num_tokens - cached.num_tokens
        if more_tokens <= 0 or (prefill_tokens_s and seconds >= more_tokens / prefill_tokens_s):
            return None
        load = BlockLoad(root, salt, ids, rest, on_batch=self._insert_batch)
        loader.begin_load(load)
        if offer.client is self._client:
            for link in rest.links:
                self._residency.record_block(load, link.key)
        # Without the prefix in memory, the loaded blocks would be of no use.
        load.lease = self._leases.hold(cached.entries)
        return load

    def begin_next_load(
        self, offers: Sequence[TierOffer], tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0
    ) -> tuple[BlockLoad | None, tuple[TierOffer, ...]]:
        """Begin the first load that pays. Return it and the offers after it."""
        for number, offer in enumerate(offers, 1):
            with self._failures.counting("loads"):
                load = self.begin_load(offer, tokens, salt, prefill_tokens_s=prefill_tokens_s)
                if load is not None:
                    return load, tuple(offers[number:])
        return None, ()

    def promote(self, load: BlockLoad) -> None:
        """Insert the last blocks of a load that has ended, and end it."""
        if not self._table.needs_checkpoints or (load.checkpoint is not None and load.is_complete):
            self._insert_batch(load)
        self.end_load(load)

    def end_load(self, load: BlockLoad) -> None:
        """End a load, whether or not it is complete. Its inserted blocks stay cached until they are evicted."""
        _cancel_load(load)
        self._residency.forget(load)
        if load.lease is not None:
            self._leases.release(load.lease)

    def _insert_batch(self, load: BlockLoad) -> None:
        """Insert the blocks that a load has so far; cancel the load where that fails."""

        def insert() -> bool:
            self._insert_blocks(load)
            return True

        if not self._failures.attempt("promotions", insert, otherwise=False):
            _cancel_load(load)

    def _insert_blocks(self, load: BlockLoad) -> None:
        """Insert the blocks that a load has so far. Cancel the load where they do not fit in memory, or where their
        prefix has been evicted."""
        batch = load.take_blocks()
        if not batch.blocks:
            return
        table = self._table
        span = run_to_end(join_blocks(self._matcher.layout, batch.blocks, batch.start, batch.end))
        fits = self._reclaimer.reclaim_for_load(span.nbytes)
        # A node may claim only tokens that its span has.
        has_prefix = table.tree.match(load.root, load.ids[: batch.start]).num_tokens == batch.start
        if not has_prefix or not fits:
            load.lacked_memory = True
            _cancel_load(load)
            self._counters["refused_promotions"] += 1
            return
        # Blocks that came from the disk are archived there, unless they have left it since.
        comes_from_disk = load.source is self._client.loader
        is_clean = comes_from_disk and all(self._residency.has_block(load, link.key) for link in batch.links)
        entry = Entry(
            *(span, load.root, load.salt, ReuseClass.CONTINUED),
            is_running=False,
            archived=ArchivedCopy(span.kv_bytes / span.num_tokens) if is_clean else None,
            shared_end=0 if comes_from_disk else batch.end,
        )
        table.add_entry(entry)
        if is_clean:
            for link in batch.links:
                self._residency.record_block(entry, link.key)
        path = table.insert_entry(entry, load.ids[: batch.end])
        if load.checkpoint is not None and load.checkpoint.position == batch.end:
            table.add_checkpoint(path, load.checkpoint)
        self._counters["promoted_tokens"] += batch.end - batch.start
        self._inserter.finish_span(entry)
        if load.lease is not None:
            # Another request may have inserted these tokens meanwhile: the path that the next batch extends must stay.
            self._leases.extend(load.lease, (node.payload for node in path))


def _cancel_load(load: BlockLoad) -> None:
    if load.source is not None:
        load.source.cancel_load(load)


class Restorer:
    """Restores planes of entries that the disk has in more bits than memory, one entry at a time.

    Restored planes use free memory only: nothing is evicted for them. `review` is called with each restored entry,
    because the disk may have it in more bits than its target. An entry may be evicted, cut or joined during its
    restore: loaded blocks replace the same tokens only.
    """

    def __init__(
        self,
        client: TierClient,
        table: EntryTable,
        reclaimer: Reclaimer,
        counters: Counter[str],
        failures: FailureLog,
        review: Callable[[Entry], None],
    ) -> None:
        self._client = client
        self._table = table
        self._counters = counters
        self._review = review
        self._reclaimer = reclaimer
        self._failures = failures
        self._waiting: dict[Entry, None] = {}  # in order
        # State of the first waiting entry.
        self._lookup: Lookup[tuple[ChainLink, ...]] | None = None
        self._load: BlockLoad | None = None
        self._has_replaced = False  # some of its planes

    @property
    def is_ready(self) -> bool:
        """Whether the disk has answered, so that `run` should be called."""
        return self._lookup is not None and self._lookup.is_done

    def has_entry(self, entry: Entry) -> bool:
        return entry in self._waiting

    def restored_bytes(self, entry: Entry, plan: PrecisionPlan) -> int:
        """Return the bytes that an entry would take under a plan after its restore; 0: the disk has no more bits of it
        than memory."""
        span = entry.span
        disk_bytes = 0.0 if entry.archived is None else entry.archived.nbytes(span.num_tokens)
        if span.is_live or not disk_bytes or span.kv_bytes >= STEPPED_DOWN * disk_bytes:
            return 0
        restored = int(min(disk_bytes, plan.token_bytes(span.layout) * span.num_tokens))
        return restored if restored * STEPPED_DOWN > span.kv_bytes else 0

    def add_entry(self, entry: Entry) -> None:
        """Restore an entry if the disk has all of it. Whether its blocks have more bits is known when they are read."""
        self._waiting[entry] = None
        self._table.dirty_sets.mark_dirty(entry)
        self._begin_next()

    def discard_entry(self, entry: Entry) -> None:
        """Stop restoring an entry; planes that were restored stay."""
        if entry not in self._waiting:
            return
        if entry is next(iter(self._waiting)):
            self._cancel_current()
        self._waiting.pop(entry)
        self._table.dirty_sets.mark_dirty(entry)
        self._begin_next()

    def clear(self) -> None:
        self._cancel_current()
        self._table.dirty_sets.mark_all_dirty(self._waiting)
        self._waiting.clear()

    def run(self) -> None:
        """Begin to load the first entry once the disk has answered. Runs between two steps, on the thread that owns
        MLX."""
        if self._lookup is None or not self._lookup.is_done:
            return
        entry, blocks, self._lookup = next(iter(self._waiting)), self._lookup.answer, None
        span_links = [link for link in blocks if link.end > entry.span.position]
        if not span_links or not self._is_restorable(entry):
            self._end_entry(entry)
            return
        self._has_replaced = False
        self._load = BlockLoad(
            entry.root_key,
            entry.salt,
            ids_to(entry.last_node),
            TierMatch(tuple(span_links)),
            on_batch=lambda load: self._take_batch(entry, load),
            on_done=lambda load: self._take_last_batch(entry, load),
        )
        self._client.loader.begin_load(self._load)

    def _begin_next(self) -> None:
        """Look up the next entry on the disk, unless one is being restored."""
        while self._waiting and self._lookup is None and self._load is None:
            entry = next(iter(self._waiting))
            if self._is_restorable(entry):
                self._lookup = self._client.find_whole_chain(entry.last_node, with_checkpoint=False)
            else:
                del self._waiting[entry]
                self._table.dirty_sets.mark_dirty(entry)

    def _is_restorable(self, entry: Entry) -> bool:
        return entry in self._table.entries and bool(entry.nodes) and not entry.span.is_live

    def _cancel_current(self) -> None:
        """Cancel the lookup and the load of the first entry."""
        if self._lookup is not None:
            self._lookup.withdraw()
        if self._load is not None:
            self._client.loader.cancel_load(self._load)
        self._lookup = self._load = None

    def _end_entry(self, entry: Entry) -> None:
        self._cancel_current()
        self._waiting.pop(entry, None)
        self._table.dirty_sets.mark_dirty(entry)
        self._begin_next()

    def _take_last_batch(self, entry: Entry, load: BlockLoad) -> None:
        """Handle the end of a load, complete or not."""
        if load is not self._load:
            return  # the load was cancelled
        if load.is_complete:
            self._take_batch(entry, load)
        else:
            self._counters["refused_restores"] += 1
        if load is self._load:
            self._finish_entry(entry)

    def _finish_entry(self, entry: Entry) -> None:
        if self._has_replaced:
            self._counters["restored_spans"] += 1
            self._review(entry)
        self._end_entry(entry)

    def _take_batch(self, entry: Entry, load: BlockLoad) -> None:
        try:
            self._replace_planes(entry, load)
        except Exception as error:  # noqa: BLE001
            # Planes that were restored before the fault stay.
            self._failures.record_failure("restores", error)
            self._finish_entry(entry)

    def _replace_planes(self, entry: Entry, load: BlockLoad) -> None:
        """Replace segments by the loaded ones that have more bits. The restore ends where memory is not free."""
        batch, span = load.take_blocks(), entry.span
        start, end = max(batch.start, span.position), min(batch.end, span.end)
        if not batch.blocks:
            return
        if not self._is_restorable(entry) or start >= end or not _has_tokens(entry, load, end):
            self._finish_entry(entry)
            return
        loaded = run_to_end(join_blocks(span.layout, batch.blocks, batch.start, batch.end))
        loaded.cut(start, end)
        better = [
            layer for layer in span.layers if _min_bits(loaded, layer, start, end) > _min_bits(span, layer, start, end)
        ]
        for layer in better:
            shrink(loaded, layer)
        more_bytes = sum(_nbytes(loaded.sealed(layer)) - _range_bytes(span, layer, start, end) for layer in better)
        if more_bytes > self._reclaimer.free_bytes:
            self._counters["restores_without_room"] += 1
            self._finish_entry(entry)
            return
        for layer in better:
            span.replace_range(layer, loaded.sealed(layer), start, end)
        self._has_replaced |= bool(better)
        self._table.recount(entry)


def _has_tokens(entry: Entry, load: BlockLoad, end: int) -> bool:
    """Whether all tokens up to `end` are still those of the loaded blocks. KV depends on every token before it."""
    return np.array_equal(ids_to(entry.last_node)[:end], load.ids[:end])


def _nbytes(segments: Iterable[SealedSegment]) -> int:
    return sum(segment.nbytes for segment in segments)


def _range_bytes(span: Span, layer: int, start: int, end: int) -> int:
    """Return about how many bytes the tokens of a range take in a layer."""
    segments = _segments_in(span, layer, start, end)
    return sum(whole.nbytes * cut.num_tokens // whole.num_tokens for cut, whole in segments)


def _min_bits(span: Span, layer: int, start: int, end: int) -> float:
    """Return the fewest bits that any token of a range has, K and V together."""
    dtype = span.layout.flat()[layer].dtype
    return min(_segment_bits(whole, dtype) for _, whole in _segments_in(span, layer, start, end))


def _segment_bits(segment: SealedSegment, dtype: mx.Dtype) -> float:
    return bits_of(segment.k.codec, segment.k.dim, dtype) + bits_of(segment.v.codec, segment.v.dim, dtype)


def _segments_in(span: Span, layer: int, start: int, end: int) -> Sequence[tuple[Segment, SealedSegment]]:
    """Return the sealed segments of a range, each with the whole segment that it is cut from."""
    cuts = span.segments(layer, start, end)
    wholes = [cut.whole if isinstance(cut, SegmentSlice) else cut for cut in cuts]
    return [(cut, whole) for cut, whole in zip(cuts, wholes, strict=True) if isinstance(whole, SealedSegment)]
