"""What comes from the tiers for a request: looked up, read if that is faster than computing it, and filed.

The request waits for nothing here: it asks, and goes on asking how far it is. All tiers are asked at once; what they
have is loaded one after the other, the nearest first. A tier that raises is counted and has nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.eviction.worth import Kind
from kvstrata.index.ids import Tokens, as_ids
from kvstrata.spans.blocks import span_of
from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.loads import BlockLoad
from kvstrata.store.cold.sharing import Shared
from kvstrata.store.entry import Entry
from kvstrata.store.failures import Failures
from kvstrata.store.filing import Desk
from kvstrata.store.room import Room
from kvstrata.store.search import Search
from kvstrata.tier.block import BLOCK_TOKENS
from kvstrata.tier.chains import TierMatch
from kvstrata.tier.lookups import Lookup

# For a tier on a network to say what it has, at most: of the time that computing the rest would take,
PATIENCE = 0.015
# or so long where that is less: a round trip, and the threads on the way.
LEAST_WAIT_S = 0.02


@dataclass(frozen=True)
class Offer:
    """What one tier has of a prompt."""

    cold: Cold
    match: TierMatch


@dataclass(frozen=True)
class Question:
    cold: Cold
    lookup: Lookup[TierMatch]
    until_s: float | None = None  # then it is not waited for any more; None: the caller decides


@dataclass(frozen=True)
class Asked:
    """What the tiers were asked about one prompt, the nearest first."""

    questions: tuple[Question, ...]
    asked_s: float

    @property
    def is_done(self) -> bool:
        """Whether no answer is worth waiting for any more."""
        now_s = time.monotonic()
        return all(
            each.lookup.is_done or (each.until_s is not None and now_s >= each.until_s) for each in self.questions
        )

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(Offer(each.cold, each.lookup.answer) for each in self.questions if each.lookup.is_done)

    def ends_s(self, patience_s: float) -> float:
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


class Fetches:
    """`shared`: a tier that is asked over a network; None: there is none."""

    def __init__(
        self, cold: Cold, shared: Shared | None, search: Search, desk: Desk, room: Room, failures: Failures
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

    def look(self, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0) -> Asked | None:
        """Ask what the tiers have of these. None: nothing, or memory has all of it."""
        ids, root = as_ids(tokens), self._search.root_of(salt)
        now_s = time.monotonic()
        questions = list[Question]()
        with self._failures.counting("lookups"):
            questions.append(Question(self._cold, self._cold.look(root, ids)))
        missing_tokens = len(ids) - self._search.find(ids, salt).num_tokens
        with self._failures.counting("lookups"):
            wait_s = self._wait_s(missing_tokens, len(ids), prefill_tokens_s)
            if self._shared is not None and wait_s:
                questions.append(Question(self._shared.cold, self._shared.cold.look(root, ids), now_s + wait_s))
        open_ones = tuple(each for each in questions if not each.lookup.is_done or each.lookup.answer.num_tokens)
        return Asked(open_ones, now_s) if open_ones and missing_tokens else None

    def _wait_s(self, missing_tokens: int, num_tokens: int, prefill_tokens_s: float) -> float:
        """For the shared tier, at most; 0: it is not worth asking."""
        if self._shared is None or num_tokens - num_tokens % BLOCK_TOKENS <= num_tokens - missing_tokens:
            return 0.0
        compute_s = missing_tokens / prefill_tokens_s if prefill_tokens_s else float("inf")
        wait_s = min(1.0, max(LEAST_WAIT_S, PATIENCE * compute_s))
        tier = self._shared.tier
        return 0.0 if tier.is_paused or tier.expected_latency_s > min(wait_s, compute_s) else wait_s

    def load(self, offer: Offer, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0) -> BlockLoad | None:
        """Begin to load what a tier has more than memory, if it is expected to come faster than at so many tokens in
        a second; 0: that is not known. None: it has no more, or it would not."""
        match, loads = offer.match, offer.cold.loads
        ids, root = as_ids(tokens), self._search.root_of(salt)
        found = self._search.find(ids, salt)
        rest = match.after(found.num_tokens)
        seconds = loads.seconds_for(rest)
        more_tokens = match.num_tokens - found.num_tokens
        if more_tokens <= 0 or (prefill_tokens_s and seconds >= more_tokens / prefill_tokens_s):
            return None
        load = BlockLoad(root, salt, ids, rest, on_batch=self._promote)
        loads.begin(load)
        if offer.cold is self._cold:
            for link in rest.links:
                self._residency.record_block(load, link.key)
        # What comes would hang on nothing without it.
        load.lease = self._desk.leases.hold(found.entries)
        return load

    def load_next(
        self, offers: Sequence[Offer], tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0
    ) -> tuple[BlockLoad | None, tuple[Offer, ...]]:
        """The first load that pays, and the offers after it."""
        for at, offer in enumerate(offers, 1):
            with self._failures.counting("loads"):
                load = self.load(offer, tokens, salt, prefill_tokens_s=prefill_tokens_s)
                if load is not None:
                    return load, tuple(offers[at:])
        return None, ()

    def promote(self, load: BlockLoad) -> None:
        """A load has ended: what came is in memory from now on, and nothing is kept for it."""
        if not self._desk.marks.are_needed or (load.mark is not None and load.is_whole):
            self._promote(load)
        self.forget(load)

    def forget(self, load: BlockLoad) -> None:
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
        batch = load.take()
        if not batch.blocks:
            return
        shelf = self._desk.shelf
        span = span_of(self._search.layout, batch.blocks, batch.start, batch.end)
        limit_bytes = self._room.limit_bytes
        self._room.shrink_to(limit_bytes - span.nbytes, 0.0, most_bytes=limit_bytes - span.nbytes)
        # A node may claim no token that its span has not.
        hangs = shelf.tree.match(load.root, load.ids[: batch.start]).num_tokens == batch.start
        if not hangs or shelf.held_bytes + span.nbytes > limit_bytes:
            load.lacked_room = True
            _give_up(load)
            self._counters["refused_promotions"] += 1
            return
        # What came from the disk is there, unless it has left since.
        comes_from_disk = load.source is self._cold.loads
        is_clean = comes_from_disk and all(self._residency.has_block(load, link.key) for link in batch.links)
        entry = Entry(span, load.root, load.salt, Kind.CONTINUED, is_running=False, is_clean=is_clean)
        entry.clean_token_bytes = span.kv_bytes / span.num_tokens if is_clean else 0.0
        entry.shared_end = 0 if comes_from_disk else batch.end
        shelf.add(entry)
        if is_clean:
            for link in batch.links:
                self._residency.record_block(entry, link.key)
        path = shelf.insert(entry, load.ids[: batch.end])
        if load.mark is not None and load.mark.position == batch.end:
            self._desk.marks.add(path, load.mark)
        self._counters["promoted_tokens"] += batch.end - batch.start
        self._desk.intake.take_in(entry)
        if load.lease is not None:
            # Another request may have filed these tokens meanwhile: what the next batch hangs on must stay.
            self._desk.leases.extend(load.lease, (node.payload for node in path))


def _give_up(load: BlockLoad) -> None:
    if load.source is not None:
        load.source.give_up(load)
