"""Loads from tiers: for waiting requests, and archived planes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from kvstrata.attention.parts import CutPart, Part, SealedPart
from kvstrata.prefix_cache.entries import STEPPED_DOWN, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.insertion import Desk
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.keys import Tokens, as_ids
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import BlockLoad, TierClient, ids_to
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.spans.blocks import span_of
from kvstrata.spans.convert import bits_of
from kvstrata.spans.plan import Plan
from kvstrata.spans.rewrite import shrink
from kvstrata.spans.span import Span
from kvstrata.tier.block import BLOCK_TOKENS
from kvstrata.tier.chains import Link, TierMatch
from kvstrata.tier.lookups import Lookup

# For a tier on a network to say what it has, at most: of the time that computing the rest would take,
PATIENCE = 0.015

# or so long where that is less: a round trip, and the threads on the way.
LEAST_WAIT_S = 0.02


@dataclass(frozen=True)
class TierOffer:
    """What one tier has of a prompt."""

    client: TierClient
    match: TierMatch


@dataclass(frozen=True)
class TierQuestion:
    client: TierClient
    lookup: Lookup[TierMatch]
    until_s: float | None = None  # then it is not waited for any more; None: the caller decides


@dataclass(frozen=True)
class TierOffers:
    """What the tiers were asked about one prompt, the nearest first."""

    questions: tuple[TierQuestion, ...]
    asked_s: float

    @property
    def is_done(self) -> bool:
        """Whether no answer is worth waiting for any more."""
        now_s = time.monotonic()
        return all(
            each.lookup.is_done or (each.until_s is not None and now_s >= each.until_s) for each in self.questions
        )

    @property
    def offers(self) -> tuple[TierOffer, ...]:
        return tuple(TierOffer(each.client, each.lookup.answer) for each in self.questions if each.lookup.is_done)

    def deadline_s(self, patience_s: float) -> float:
        """When it should be looked at again, unless an answer comes; no tier is waited for longer than this."""
        latest_s = self.asked_s + patience_s
        open_ends = [each.until_s for each in self.questions if not each.lookup.is_done]
        return min([latest_s, *(end for end in open_ends if end is not None)])

    def wait(self, timeout_s: float) -> bool:
        """Whether all tiers answered in time."""
        until_s = time.monotonic() + timeout_s
        return all(each.lookup.wait(max(0.0, until_s - time.monotonic())) for each in self.questions)

    def withdraw(self) -> None:
        for each in self.questions:
            each.lookup.withdraw()


class Prefetcher:
    """`shared`: a tier that is asked over a network; None: there is none."""

    def __init__(
        self,
        cold: TierClient,
        shared: SharedTierClient | None,
        search: PrefixMatcher,
        desk: Desk,
        room: Reclaimer,
        failures: FailureLog,
    ) -> None:
        self._cold = cold
        self._shared = shared
        self._search = search
        self._desk = desk
        self._room = room
        self._failures = failures
        self._residency = desk.shelf.residency

    @property
    def _counters(self) -> Counter[str]:
        return self._failures.counters

    def ask(self, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0) -> TierOffers | None:
        """Ask what the tiers have of these. None: nothing, or memory has all of it."""
        ids, root = as_ids(tokens), self._search.root_of(salt)
        now_s = time.monotonic()
        questions = list[TierQuestion]()
        with self._failures.counting("lookups"):
            questions.append(TierQuestion(self._cold, self._cold.find_chain(root, ids)))
        missing_tokens = len(ids) - self._search.find(ids, salt).num_tokens
        with self._failures.counting("lookups"):
            wait_s = self._wait_s(missing_tokens, len(ids), prefill_tokens_s)
            if self._shared is not None and wait_s:
                questions.append(
                    TierQuestion(self._shared.client, self._shared.client.find_chain(root, ids), now_s + wait_s)
                )
        open_ones = tuple(each for each in questions if not each.lookup.is_done or each.lookup.answer.num_tokens)
        return TierOffers(open_ones, now_s) if open_ones and missing_tokens else None

    def _wait_s(self, missing_tokens: int, num_tokens: int, prefill_tokens_s: float) -> float:
        """For the shared tier, at most; 0: it is not worth asking."""
        if self._shared is None or num_tokens - num_tokens % BLOCK_TOKENS <= num_tokens - missing_tokens:
            return 0.0
        compute_s = missing_tokens / prefill_tokens_s if prefill_tokens_s else float("inf")
        wait_s = min(1.0, max(LEAST_WAIT_S, PATIENCE * compute_s))
        tier = self._shared.tier
        return 0.0 if tier.is_paused or tier.expected_latency_s > min(wait_s, compute_s) else wait_s

    def begin_load(
        self, offer: TierOffer, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0
    ) -> BlockLoad | None:
        """Begin to load what a tier has more than memory, if it is expected to come faster than at so many tokens in
        a second; 0: that is not known. None: it has no more, or it would not."""
        match, loads = offer.match, offer.client.loader
        ids, root = as_ids(tokens), self._search.root_of(salt)
        found = self._search.find(ids, salt)
        rest = match.after(found.num_tokens)
        seconds = loads.expected_seconds(rest)
        more_tokens = match.num_tokens - found.num_tokens
        if more_tokens <= 0 or (prefill_tokens_s and seconds >= more_tokens / prefill_tokens_s):
            return None
        load = BlockLoad(root, salt, ids, rest, on_batch=self._promote)
        loads.begin_load(load)
        if offer.client is self._cold:
            for link in rest.links:
                self._residency.record_block(load, link.key)
        # What comes would hang on nothing without it.
        load.lease = self._desk.leases.hold(found.entries)
        return load

    def begin_next_load(
        self, offers: Sequence[TierOffer], tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0
    ) -> tuple[BlockLoad | None, tuple[TierOffer, ...]]:
        """The first load that pays, and the offers after it."""
        for at, offer in enumerate(offers, 1):
            with self._failures.counting("loads"):
                load = self.begin_load(offer, tokens, salt, prefill_tokens_s=prefill_tokens_s)
                if load is not None:
                    return load, tuple(offers[at:])
        return None, ()

    def promote(self, load: BlockLoad) -> None:
        """A load has ended: what came is in memory from now on, and nothing is kept for it."""
        if not self._desk.marks.are_needed or (load.checkpoint is not None and load.is_complete):
            self._promote(load)
        self.abandon(load)

    def abandon(self, load: BlockLoad) -> None:
        """It is of no use any more: what was taken of it stays while there is room."""
        _give_up(load)
        self._residency.forget(load)
        if load.lease is not None:
            self._desk.leases.release(load.lease)

    def _promote(self, load: BlockLoad) -> None:
        """What has come so far. The load ends where that fails."""

        def promote() -> bool:
            self._insert(load)
            return True

        if not self._failures.attempt("promotions", promote, otherwise=False):
            _give_up(load)

    def _insert(self, load: BlockLoad) -> None:
        """The load ends where memory has no room for it, or not any more what it hangs on."""
        batch = load.take_blocks()
        if not batch.blocks:
            return
        shelf = self._desk.shelf
        span = span_of(self._search.layout, batch.blocks, batch.start, batch.end)
        limit_bytes = self._room.limit_bytes
        self._room.shrink_to(limit_bytes - span.nbytes, 0.0, most_bytes=limit_bytes - span.nbytes)
        # A node may claim no token that its span has not.
        hangs = shelf.tree.match(load.root, load.ids[: batch.start]).num_tokens == batch.start
        if not hangs or shelf.nbytes + span.nbytes > limit_bytes:
            load.lacked_memory = True
            _give_up(load)
            self._counters["refused_promotions"] += 1
            return
        # What came from the disk is there, unless it has left since.
        comes_from_disk = load.source is self._cold.loader
        is_clean = comes_from_disk and all(self._residency.has_block(load, link.key) for link in batch.links)
        entry = Entry(span, load.root, load.salt, ReuseClass.CONTINUED, is_running=False, is_archived=is_clean)
        entry.archived_token_bytes = span.kv_bytes / span.num_tokens if is_clean else 0.0
        entry.shared_end = 0 if comes_from_disk else batch.end
        shelf.add_entry(entry)
        if is_clean:
            for link in batch.links:
                self._residency.record_block(entry, link.key)
        path = shelf.insert_entry(entry, load.ids[: batch.end])
        if load.checkpoint is not None and load.checkpoint.position == batch.end:
            self._desk.marks.add_checkpoint(path, load.checkpoint)
        self._counters["promoted_tokens"] += batch.end - batch.start
        self._desk.intake.finish_span(entry)
        if load.lease is not None:
            # Another request may have filed these tokens meanwhile: what the next batch hangs on must stay.
            self._desk.leases.extend(load.lease, (node.payload for node in path))


def _give_up(load: BlockLoad) -> None:
    if load.source is not None:
        load.source.cancel_load(load)


class Restorer:
    """`review` is told of what has come back: it may have come in more bits than it should have now. What comes back
    takes the room that there is: nothing has to go for it. An entry that is being restored may be evicted, cut and
    joined meanwhile: blocks take the place of the same tokens only."""

    def __init__(
        self,
        cold: TierClient,
        shelf: EntryTable,
        room: Reclaimer,
        counters: Counter[str],
        failures: FailureLog,
        review: Callable[[Entry], None],
    ) -> None:
        self._cold = cold
        self._shelf = shelf
        self._counters = counters
        self._review = review
        self._room = room
        self._failures = failures
        self._waiting: dict[Entry, None] = {}  # in order
        # Of the first of them:
        self._lookup: Lookup[tuple[Link, ...]] | None = None
        self._load: BlockLoad | None = None
        self._has_swapped = False

    @property
    def is_ready(self) -> bool:
        """Whether the disk has said what it has: `work` should be called."""
        return self._lookup is not None and self._lookup.is_done

    def has_entry(self, entry: Entry) -> bool:
        return entry in self._waiting

    def restored_bytes(self, entry: Entry, plan: Plan) -> int:
        """What it would take under a plan when it has come back; 0 where the disk was given nothing better."""
        span = entry.span
        on_disk = entry.archived_token_bytes * span.num_tokens
        if span.is_live or not on_disk or span.kv_bytes >= STEPPED_DOWN * on_disk:
            return 0
        restored = int(min(on_disk, plan.token_bytes(span.layout) * span.num_tokens))
        return restored if restored * STEPPED_DOWN > span.kv_bytes else 0

    def add_entry(self, entry: Entry) -> None:
        """Bring it back if the disk has all of it. That it has it in more bits is seen when it comes."""
        self._waiting[entry] = None
        self._shelf.dirty_sets.mark_dirty(entry)
        self._begin()

    def discard_entry(self, entry: Entry) -> None:
        """It stays as far as it has come."""
        if entry not in self._waiting:
            return
        if entry is next(iter(self._waiting)):
            self._let_go()
        self._waiting.pop(entry)
        self._shelf.dirty_sets.mark_dirty(entry)
        self._begin()

    def clear(self) -> None:
        self._let_go()
        self._shelf.dirty_sets.mark_all_dirty(self._waiting)
        self._waiting.clear()

    def run(self) -> None:
        """Between two steps, on the thread that owns MLX: the disk has said what it has of the first."""
        if self._lookup is None or not self._lookup.is_done:
            return
        entry, blocks, self._lookup = next(iter(self._waiting)), self._lookup.answer, None
        own = [link for link in blocks if link.end > entry.span.position]
        if not own or not self._can_take(entry):
            self._end(entry)
            return
        self._has_swapped = False
        self._load = BlockLoad(
            entry.root_key,
            entry.salt,
            ids_to(entry.last_node),
            TierMatch(tuple(own)),
            on_batch=lambda load: self._take(entry, load),
            on_done=lambda load: self._take_last(entry, load),
        )
        self._cold.loader.begin_load(self._load)

    def _begin(self) -> None:
        """The next one, unless one is on its way."""
        while self._waiting and self._lookup is None and self._load is None:
            entry = next(iter(self._waiting))
            if self._can_take(entry):
                self._lookup = self._cold.find_whole_chain(entry.last_node, with_mark=False)
            else:
                del self._waiting[entry]
                self._shelf.dirty_sets.mark_dirty(entry)

    def _can_take(self, entry: Entry) -> bool:
        return entry in self._shelf.entries and bool(entry.nodes) and not entry.span.is_live

    def _let_go(self) -> None:
        """Of what is on its way."""
        if self._lookup is not None:
            self._lookup.withdraw()
        if self._load is not None:
            self._cold.loader.cancel_load(self._load)
        self._lookup = self._load = None

    def _end(self, entry: Entry) -> None:
        self._let_go()
        self._waiting.pop(entry, None)
        self._shelf.dirty_sets.mark_dirty(entry)
        self._begin()

    def _take_last(self, entry: Entry, load: BlockLoad) -> None:
        """All has come, or no more will."""
        if load is not self._load:
            return  # it is of no use any more
        if load.is_complete:
            self._take(entry, load)
        else:
            self._counters["refused_restores"] += 1
        if load is self._load:
            self._finish(entry)

    def _finish(self, entry: Entry) -> None:
        if self._has_swapped:
            self._counters["restored_spans"] += 1
            self._review(entry)
        self._end(entry)

    def _take(self, entry: Entry, load: BlockLoad) -> None:
        try:
            self._swap(entry, load)
        except Exception as error:  # noqa: BLE001
            # It stays as far as it has come.
            self._failures.record_failure("restores", error)
            self._finish(entry)

    def _swap(self, entry: Entry, load: BlockLoad) -> None:
        """What has come so far takes the place of what is there in fewer bits. The load ends where there is no room."""
        batch, span = load.take_blocks(), entry.span
        start, end = max(batch.start, span.position), min(batch.end, span.end)
        if not batch.blocks:
            return
        if not self._can_take(entry) or start >= end or not _has_tokens(entry, load, end):
            self._finish(entry)
            return
        came = span_of(span.layout, batch.blocks, batch.start, batch.end)
        came.cut(start, end)
        better = [layer for layer in span.layers if _bits(came, layer, start, end) > _bits(span, layer, start, end)]
        for layer in better:
            shrink(came, layer)
        grows = sum(_nbytes(came.sealed(layer)) - _share(span, layer, start, end) for layer in better)
        if grows > self._room.left_bytes:
            self._counters["restores_without_room"] += 1
            self._finish(entry)
            return
        for layer in better:
            span.replace_range(layer, came.sealed(layer), start, end)
        self._has_swapped |= bool(better)
        self._shelf.recount(entry)


def _has_tokens(entry: Entry, load: BlockLoad, end: int) -> bool:
    """Whether all tokens up to `end` are still those whose blocks are loaded. KV depends on every token before it."""
    return np.array_equal(ids_to(entry.last_node)[:end], load.ids[:end])


def _nbytes(parts: Iterable[SealedPart]) -> int:
    return sum(part.nbytes for part in parts)


def _share(span: Span, layer: int, start: int, end: int) -> int:
    """About what the tokens of a range take in a layer."""
    return sum(whole.nbytes * part.num_tokens // whole.num_tokens for part, whole in _wholes(span, layer, start, end))


def _bits(span: Span, layer: int, start: int, end: int) -> float:
    """Fewest that any token of a range has, K and V together."""
    dtype = span.layout.flat()[layer].dtype
    return min(_part_bits(whole, dtype) for _, whole in _wholes(span, layer, start, end))


def _part_bits(part: SealedPart, dtype: mx.Dtype) -> float:
    return bits_of(part.k.codec, part.k.dim, dtype) + bits_of(part.v.codec, part.v.dim, dtype)


def _wholes(span: Span, layer: int, start: int, end: int) -> Sequence[tuple[Part, SealedPart]]:
    """The parts of a range, each with what it is cut from."""
    parts = span.parts(layer, start, end)
    wholes = [part.whole if isinstance(part, CutPart) else part for part in parts]
    return [(part, whole) for part, whole in zip(parts, wholes, strict=True) if isinstance(whole, SealedPart)]
