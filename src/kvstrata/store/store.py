"""The prefix store: match, lease, commit.

Touched by the thread that owns MLX alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvstrata.eviction.history import History, kind_of
from kvstrata.eviction.worth import Kind
from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.layers.sequence import SequenceCache
from kvstrata.spans.live import live_span
from kvstrata.spans.span import empty_span, prefix_of
from kvstrata.store.entry import Entry, Found, Lease, note_asked_twice
from kvstrata.store.filing import Desk, Filing, NoFiling
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.search import Search, mark_of, ranges_of


class Store:
    can_share = True

    def __init__(
        self,
        search: Search,
        desk: Desk,
        rewriting: Rewriting,
        history: History,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._search = search
        self._desk = desk
        self._rewriting = rewriting
        self._history = history
        self._counters = counters
        self._clock = clock

    @property
    def needs_marks(self) -> bool:
        """Whether the model can be resumed at marks only."""
        return self._desk.marks.are_needed

    @property
    def version(self) -> int:
        """Changes with what a match may find."""
        return self._desk.shelf.version

    def find(self, tokens: Tokens, salt: str) -> Found:
        """What a match would give now. Keeps nothing from going."""
        return self._search.find(tokens, salt)

    def match(self, tokens: Tokens, salt: str, asked_twice: int | None = None, session: str = "") -> Lease:
        """The longest usable prefix of `tokens`, kept until it is released. It is counted when a sequence is opened
        on it. `asked_twice`: what the lease said that the same request was opened on before; None: it was not."""
        ids, root = as_ids(tokens), self._search.root_of(salt)
        thread = self._desk.branches.begins(root, session, ids)
        lease = self._lease(ids, salt, asked_twice, session)
        lease.session, lease.thread = session, thread
        return lease

    def _lease(self, ids: TokenIds, salt: str, asked_twice: int | None, session: str) -> Lease:
        found = self._search.find(ids, salt)
        known_tokens = self._history.known_tokens(self._search.root_of(salt), ids)
        kind = kind_of(known_tokens, len(ids))
        uncounted = ids if asked_twice is None else None
        if asked_twice is None:
            asked_twice = max(known_tokens, found.num_tokens)
        if not found.num_tokens:
            return Lease(kind, asked_twice=asked_twice, uncounted=uncounted)
        ranges = ranges_of(found)
        prefix = prefix_of(self._search.layout, ranges, mark_of(found))
        lease = Lease(kind, found.num_tokens, prefix, ranges, asked_twice, uncounted)
        self._desk.shelf.touch(found.path, kind, session)
        note_asked_twice(found.path, asked_twice)
        self._desk.leases.extend(lease, found.entries)
        return lease

    def awaits_encoding(self, found: Found) -> bool:
        """Whether some of a match is to be encoded before a request goes on from it. Then that is done next, between
        two steps, bit by bit: a lease encodes nothing."""
        waits = [entry for entry in found.entries if self._rewriting.holds_up(entry)]
        for entry in waits:
            self._rewriting.mover.hurry(entry)
        return bool(waits)

    def release(self, lease: Lease) -> None:
        self._desk.leases.release(lease)

    def open(self, lease: Lease, cache: SequenceCache, salt: str, resume_at: Sequence[int] = ()) -> Filing:
        """A sequence begins to compute what follows its lease. `resume_at`: where later ones are likely to part."""
        span, key = live_span(self._search.layout, cache), self._search.root_of(salt)
        entry = Entry(span, key, salt, lease.kind, lease.session, asked_twice=lease.asked_twice)
        if lease.uncounted is not None:
            self._counters["queried_tokens"] += len(lease.uncounted)
            self._counters["hit_tokens"] += lease.num_tokens
            self._history.asked(key, lease.uncounted, self._clock())
            lease.uncounted = None
        self._desk.shelf.add(entry)
        return Filing(self._desk, entry, lease, resume_at)

    def open_detached(self, lease: Lease) -> Filing:
        """Likewise, where nothing of it is to be filed."""
        return NoFiling(self._desk, Entry(empty_span(self._search.layout), b"", "", Kind.FRESH), lease)


class NoStore(Store):
    """Of a model whose caches cannot be shared: nothing is filed, so nothing is found."""

    can_share = False

    def open(self, lease: Lease, cache: SequenceCache, salt: str, resume_at: Sequence[int] = ()) -> Filing:
        del cache, salt, resume_at
        return self.open_detached(lease)
