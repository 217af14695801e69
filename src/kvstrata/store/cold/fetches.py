"""What comes from the disk for a request: looked up, read if that is faster than computing it, and filed.

The request waits for nothing here: it asks, and goes on asking how far it is.
"""

from __future__ import annotations

from collections import Counter

from kvstrata.eviction.worth import Kind
from kvstrata.index.ids import Tokens, as_ids
from kvstrata.spans.blocks import span_of
from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.loads import BlockLoad
from kvstrata.store.entry import Entry
from kvstrata.store.failures import Failures
from kvstrata.store.filing import Desk
from kvstrata.store.room import Room
from kvstrata.store.search import Search
from kvstrata.tier.chains import TierMatch
from kvstrata.tier.lookups import Lookup


class Fetches:
    def __init__(
        self, cold: Cold, search: Search, desk: Desk, room: Room, failures: Failures, counters: Counter[str]
    ) -> None:
        self._cold = cold
        self._search = search
        self._desk = desk
        self._room = room
        self._failures = failures
        self._counters = counters

    def look(self, tokens: Tokens, salt: str) -> Lookup[TierMatch] | None:
        """Ask what the disk has of these. None: nothing, or memory has all of it."""
        ids = as_ids(tokens)
        lookup = self._cold.look(self._search.root_of(salt), ids)
        if lookup.is_done and not lookup.answer.num_tokens:
            return None
        return lookup if self._search.find(ids, salt).num_tokens < len(ids) else None

    def load(self, match: TierMatch, tokens: Tokens, salt: str, *, prefill_tokens_s: float = 0.0) -> BlockLoad | None:
        """Begin to load what the disk has more than memory, if it is expected to come faster than at so many tokens in
        a second; 0: that is not known. None: it has no more, or it would not."""
        ids, root = as_ids(tokens), self._search.root_of(salt)
        found = self._search.find(ids, salt)
        rest = match.after(found.num_tokens)
        seconds = self._cold.loads.seconds_for(rest)
        more_tokens = match.num_tokens - found.num_tokens
        if more_tokens <= 0 or (prefill_tokens_s and seconds >= more_tokens / prefill_tokens_s):
            return None
        load = BlockLoad(root, salt, ids, rest, on_batch=self._promote)
        self._cold.loads.begin(load)
        # What comes would hang on nothing without it.
        load.lease = self._desk.leases.hold(found.entries)
        return load

    def promote(self, load: BlockLoad) -> None:
        """A load has ended: what came is in memory from now on, and nothing is kept for it."""
        if not self._desk.marks.are_needed or (load.mark is not None and load.is_whole):
            self._promote(load)
        self.forget(load)

    def forget(self, load: BlockLoad) -> None:
        """It is of no use any more: what was taken of it stays while there is room."""
        self._cold.loads.give_up(load)
        if load.lease is not None:
            self._desk.leases.release(load.lease)

    def _promote(self, load: BlockLoad) -> None:
        """What has come so far. The load ends where memory has no room for it, or not any more what it hangs on."""
        batch = load.take()
        if not batch.blocks:
            return
        shelf = self._desk.shelf
        try:
            span = span_of(self._search.layout, batch.blocks, batch.start, batch.end)
        except Exception as error:  # noqa: BLE001
            self._failures.note("promotions", error)
            self._cold.loads.give_up(load)
            return
        limit_bytes = self._room.limit_bytes
        self._room.shrink_to(limit_bytes - span.nbytes, 0.0, most_bytes=limit_bytes - span.nbytes)
        # A node may claim no token that its span has not.
        hangs = shelf.tree.match(load.root, load.ids[: batch.start]).num_tokens == batch.start
        if not hangs or shelf.held_bytes + span.nbytes > limit_bytes:
            self._cold.loads.give_up(load)
            self._counters["refused_promotions"] += 1
            return
        entry = Entry(span, load.root, load.salt, Kind.CONTINUED, is_running=False, is_clean=True)
        entry.clean_token_bytes = span.kv_bytes / span.num_tokens
        shelf.add(entry)
        path = shelf.insert(entry, load.ids[: batch.end])
        if load.mark is not None and load.mark.position == batch.end:
            self._desk.marks.add(path, load.mark)
        self._counters["promoted_tokens"] += batch.end - batch.start
        self._desk.intake.take_in(entry)
        if load.lease is not None:
            # Another request may have filed these tokens meanwhile: what the next batch hangs on must stay.
            self._desk.leases.extend(load.lease, (node.payload for node in path))
