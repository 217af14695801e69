"""The prefix store: match, lease, resume, commit.

Joins the index, spans and what they are stored as. Touched by the thread that owns MLX alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvstrata.index.identity import Identity, root_key
from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.spans.marks import Mark, needs_marks
from kvstrata.spans.plan import Plan
from kvstrata.spans.span import live_span, prefix_of
from kvstrata.store.entry import Entry, Found, Lease
from kvstrata.store.mover import Job, Mover
from kvstrata.store.precision import Precision, PrecisionOptions
from kvstrata.store.report import Ending, Explanation, TierUsage, usage_of
from kvstrata.store.requantize import Change, Changed, Progress, Requantizing, assess, in_scope
from kvstrata.store.search import mark_of, search
from kvstrata.store.shelf import Shelf

# On the way from the first token to the end of a conversation.
MAX_SPANS = 8


@dataclass(frozen=True)
class StoreOptions:
    hot_bytes: int  # most that stored spans may take
    max_marks: int = 8  # on the way from the first token to the end of a span
    ttl_s: float | None = None  # what nobody asked for so long goes
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)


@dataclass(frozen=True)
class Cleared:
    nbytes: int
    tokens: int


class Filing:
    """The tokens that a running sequence computes itself, on their way into the store."""

    def __init__(self, store: Store, entry: Entry, lease: Lease) -> None:
        self._store = store
        self.entry = entry
        self.lease = lease  # on what it goes on from, and on what it was filed under since

    def seal(self, tokens: Tokens, mark: Mark | None = None) -> None:
        """From now on others may go on from `tokens`, all of the sequence so far."""
        self._store._seal(self, as_ids(tokens), mark)

    def review(self) -> None:
        """The sequence has grown: maybe more of it should be encoded."""
        self._store._review(self.entry)

    def end(self) -> None:
        """The sequence writes no more."""
        self._store._end(self.entry)
        self._store.release(self.lease)


class Store:
    def __init__(
        self,
        layout: Layout,
        identity: Identity,
        plan: Plan,
        options: StoreOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self.precision = Precision(layout, plan, options.precision)
        self.options = options
        self.needs_marks = needs_marks(layout)  # it can be resumed at marks only
        self.counters: Counter[str] = Counter()
        self._shelf = Shelf(needs_marks=self.needs_marks, ttl_s=options.ttl_s, clock=clock)
        self._mover = Mover(self._job, self._tidy)
        self._requantizing: Requantizing | None = None

    @property
    def version(self) -> int:
        """Changes with what a match may find."""
        return self._shelf.version

    @property
    def held_bytes(self) -> int:
        """All that is stored, but for the buffers of sequences that still run."""
        return self._shelf.held_bytes

    @property
    def free_bytes(self) -> int:
        """What of that would go if it had to."""
        return self._shelf.free_bytes

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._shelf.entries)

    # Match.

    def find(self, tokens: Tokens, salt: str) -> Found:
        """What a match would give now. Pins nothing."""
        return search(self._shelf.tree, self._layout, root_key(self._identity, salt), tokens)

    def match(self, tokens: Tokens, salt: str) -> Lease:
        """The longest usable prefix of `tokens`, pinned until it is released."""
        ids = as_ids(tokens)
        found = self.find(ids, salt)
        self.counters["queried_tokens"] += len(ids)
        self.counters["hit_tokens"] += found.num_tokens
        kind = self._shelf.asked(root_key(self._identity, salt), ids)
        if not found.num_tokens:
            return Lease(kind)
        for entry in found.entries:
            # What is to be stored in fewer bits is, before somebody goes on from it.
            self._mover.finish(entry)
        prefix = prefix_of(self._layout, found.ranges, mark_of(found))
        lease = Lease(kind, found.num_tokens, prefix, found.ranges)
        self._shelf.touch(found.path, kind)
        for entry in found.entries:
            self._pin(entry, lease)
        return lease

    def _pin(self, entry: Entry, lease: Lease) -> None:
        if entry not in lease.entries:
            lease.entries.add(entry)
            self._shelf.change(entry, num_leases=entry.num_leases + 1)

    def release(self, lease: Lease) -> None:
        if not lease.is_open:
            return
        lease.is_open = False
        for entry in lease.entries:
            self._shelf.change(entry, num_leases=entry.num_leases - 1)
            self._review(entry)

    # Commit.

    def open(self, lease: Lease, cache: SequenceCache, salt: str) -> Filing:
        """A sequence begins to compute what follows its lease."""
        entry = Entry(live_span(self._layout, cache), root_key(self._identity, salt), salt, lease.kind)
        self._shelf.add(entry)
        return Filing(self, entry, lease)

    def _seal(self, filing: Filing, ids: TokenIds, mark: Mark | None) -> None:
        entry = filing.entry
        num_tokens = len(ids) - entry.span.position
        if num_tokens <= entry.span.num_tokens and mark is None:
            return
        entry.span.num_tokens = num_tokens
        path = self._shelf.insert(entry, ids)
        self._review(entry)
        for node in path:
            # Somebody else may have filed some of these tokens meanwhile: what ours hang on must stay.
            if node.payload is not entry:
                self._pin(node.payload, filing.lease)
        if mark is not None:
            self._shelf.add_mark(path, mark, self.options.max_marks)

    def _end(self, entry: Entry) -> None:
        if not entry.nodes:
            # It computed nothing, or nothing that was not there already.
            self.counters["refused_present" if entry.span.num_tokens else "refused_empty"] += 1
            self._shelf.drop(entry)
            return
        start, end = min(node.start for node in entry.nodes), max(node.end for node in entry.nodes)
        entry.span.cut(start, end)
        self._shelf.touch(entry.nodes, entry.kind)
        self._shelf.change(entry, is_running=False)
        self.counters["stored_spans"] += 1
        self.counters["stored_tokens"] += end - start
        self._review(entry)

    def _tidy(self, entry: Entry) -> None:
        """It is stored as it should be. Few and long spans are read faster than many short ones."""
        if entry.is_running or not entry.nodes:
            return
        leaf = max(entry.nodes, key=lambda node: node.end)
        for grown in self._shelf.join_along(leaf, MAX_SPANS):
            self._review(grown)

    # What is stored changes.

    @property
    def has_work(self) -> bool:
        return not self._mover.idle

    def work(self, slice_s: float) -> None:
        """Go on with what is to be done to stored spans."""
        self._mover.work(slice_s)

    def _review(self, entry: Entry) -> None:
        """Something about it has changed: maybe it should be stored in another way now."""
        if entry in self._shelf.entries and self.precision.plan_for(entry) is not None:
            self._mover.add(entry)

    def _job(self, entry: Entry) -> Job | None:
        plan = self.precision.plan_for(entry) if entry in self._shelf.entries else None
        return None if plan is None else self._counted(entry, self.precision.job(entry, plan), plan)

    def _counted(self, entry: Entry, job: Job, plan: Plan) -> Job:
        if not plan.is_raw:
            self.counters["encoded_spans"] += 1
        for _ in job:
            self._shelf.recount(entry)
            yield
            if entry not in self._shelf.entries:
                return
        self._shelf.recount(entry)

    def requantize(self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None = None) -> Changed:
        """Change what is cached, and what new spans are stored as. The work is done bit by bit, by `work`."""
        entries = [entry for entry in self.entries if in_scope(entry, change, sequence_entries)]
        changed = assess(entries, plan, change, self.precision.options)
        if change.dry_run:
            return changed
        self.cancel_requantize()
        self._requantizing = Requantizing(entries, self.precision.target)
        if change.is_general:
            self.precision.target = plan
        for entry in entries:
            entry.target, entry.goes_up = plan, change.force
            self._review(entry)
        return changed

    def requantize_progress(self) -> Progress:
        return self._requantizing.progress(self._mover.has) if self._requantizing else Progress()

    def cancel_requantize(self) -> Progress:
        """What is not done yet stays as it is; every span is whole. New spans are stored as before the change."""
        progress = self.requantize_progress()
        if self._requantizing and progress.is_running:
            self.precision.target = self._requantizing.before
            for entry in self._requantizing.entries:
                if self._mover.has(entry):
                    self._mover.discard(entry)
                    entry.target, entry.goes_up = None, False
                    # One that waits to be trimmed still is.
                    self._review(entry)
        self._requantizing = None
        return progress

    # Room.

    def shrink_to(self, limit_bytes: int) -> None:
        """Evict until no more than this is held, or only what is in use."""
        limit_bytes = min(limit_bytes, self.options.hot_bytes)
        # What waits to be trimmed or encoded gives more room than it takes from anybody.
        while self._shelf.held_bytes > limit_bytes and not self._mover.idle:
            self._mover.work(0)
        self._shelf.shrink_to(limit_bytes)

    def clear(self, salt: str | None = None) -> Cleared:
        """Drop all that nobody uses, or all of it under one salt."""
        before, tokens = self._shelf.held_bytes, self._shelf.tree.num_tokens
        key = None if salt is None else root_key(self._identity, salt)
        self._shelf.clear(key)
        return Cleared(before - self._shelf.held_bytes, tokens - self._shelf.tree.num_tokens)

    def pin(self, tokens: Tokens, salt: str) -> int:
        """Keep what is stored of these tokens, whatever else has to go. Tells how many are."""
        found = self.find(tokens, salt)
        for entry in found.entries:
            self._shelf.change(entry, is_pinned=True)
        return found.num_tokens

    def unpin(self, tokens: Tokens, salt: str) -> int:
        found = self.find(tokens, salt)
        for entry in found.entries:
            self._shelf.change(entry, is_pinned=False)
        return found.num_tokens

    # Answers.

    def usage(self) -> TierUsage:
        return usage_of(self.entries)

    def count(self) -> dict[str, int]:
        """What happened since the start."""
        return {**self.counters, "evicted_tokens": self._shelf.num_evicted_tokens}

    def explain(self, tokens: Tokens, salt: str) -> Explanation:
        """How much of a prompt is there, and why not more. The last token is always computed."""
        ids = as_ids(tokens)[:-1]
        found = self.find(ids, salt)
        key = root_key(self._identity, salt)
        diverged = self._shelf.tree.diverged(key, ids)
        because = self._ending(found, ids, key)
        instead = diverged.instead if because == "diverged" else ()
        at = found.num_tokens if because == "mark" else max(found.num_tokens, found.matched_tokens)
        return Explanation(len(ids) + 1, found.num_tokens, {"hot": found.num_tokens}, because, at, instead)

    def _ending(self, found: Found, ids: TokenIds, key: bytes) -> Ending:
        if found.num_tokens == len(ids):
            return "complete"
        if self._shelf.ghosts.match(key, ids).num_tokens > found.matched_tokens:
            return "evicted"
        if found.matched_tokens > found.num_tokens:
            return "mark"
        diverged = self._shelf.tree.diverged(key, ids)
        if not diverged.is_root_known:
            return "empty"
        return "diverged" if diverged.instead else "new"
