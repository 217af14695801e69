"""The prefix store: match, lease, resume, commit.

Joins the index, spans and what they are stored as. Touched by the thread that owns MLX alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Literal

from kvstrata.eviction.history import kind_of
from kvstrata.eviction.worth import Kind
from kvstrata.index.identity import Identity, owner_key, owner_of, root_key
from kvstrata.index.ids import TokenIds, Tokens, as_ids
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.spans.marks import Mark, needs_marks
from kvstrata.spans.plan import Plan, make_plan
from kvstrata.spans.span import live_span, prefix_of
from kvstrata.store.cold.cold import Cold, no_cold
from kvstrata.store.cold.fetches import Fetches
from kvstrata.store.cold.flush import Flush
from kvstrata.store.cold.refusals import Refusals
from kvstrata.store.cold.restore import Restorer
from kvstrata.store.cold.spills import Spills
from kvstrata.store.cold.unwritten import Unwritten
from kvstrata.store.entry import Entry, Found, Lease, note_asked_twice
from kvstrata.store.explain import ending, explain
from kvstrata.store.failures import Failures
from kvstrata.store.filing import Filing
from kvstrata.store.losses import Losses
from kvstrata.store.options import Cleared, StoreOptions
from kvstrata.store.pins import Pins
from kvstrata.store.precision.changes import Changes
from kvstrata.store.precision.mover import Job, Mover
from kvstrata.store.precision.pending import Pending
from kvstrata.store.precision.pressure import PlanOf, Pressure
from kvstrata.store.precision.requantize import Change, Changed, Progress
from kvstrata.store.precision.target import Precision
from kvstrata.store.report import Ending, Explanation, TierUsage, disk_counts, disk_usage
from kvstrata.store.room import Room, Shrunk
from kvstrata.store.search import mark_of, search
from kvstrata.store.shelf import Shelf
from kvstrata.store.totals import Totals
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup

# Tokens of requests that eviction learns from.
MIN_WATCHED, MAX_WATCHED = 1 << 12, 1 << 20
# On the way from the first token to the end of a conversation.
MAX_SPANS = 8


class Store:
    def __init__(
        self,
        layout: Layout,
        identity: Identity,
        plan: Plan,
        options: StoreOptions,
        *,
        plan_of: PlanOf | None = None,
        cold: Cold | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self.precision = Precision(layout, plan, options.precision)
        self.options = options
        self.needs_marks = needs_marks(layout)  # it can be resumed at marks only
        self.counters: Counter[str] = Counter()
        self.cold = cold = cold or no_cold(layout)
        self._shelf = Shelf(
            needs_marks=self.needs_marks,
            max_tokens=self._max_tokens(plan),
            ttl_s=options.ttl_s,
            before_eviction=lambda leaf: self.room.before_eviction(leaf),
            evicted=lambda leaf, start: self.room.evicted(leaf, start),
            trimmed=lambda entry: self._mover.add(entry) if options.precision.gathers else None,
            clock=clock,
            counts_arrays=options.max_arrays is not None,
        )
        self.pins = Pins(self._shelf, cold)
        self._losses = Losses(self.counters, options.hot_bytes)
        self._failures = Failures(self.counters)
        changed = self._shelf.journal.reader()
        self._mover = Mover(self._job, self._tidy, self._get_stuck, changed.add)
        self._totals = Totals(self._shelf.journal.reader(), self._shelf.entries)
        self._pending = Pending(changed, self._mover.has, self.precision.pending_bytes)
        refusals = Refusals(cold.tier, self._shelf.used_s)
        self._spills = Spills(cold, self._shelf, self.counters, self._failures, self._mover, refusals)
        self._flush = Flush(cold, self._shelf, self._spills, refusals)
        plan_of = plan_of or partial(make_plan, layout)
        self.pressure = Pressure(self._shelf, plan_of, options.ladder, self.precision, self._review)
        self.room = Room(
            self._shelf,
            self._mover,
            self.pressure,
            self._spills,
            self._losses,
            pending_bytes=self._pending.nbytes,
            disk_is_working=lambda: cold.is_working,
            hot_bytes=options.hot_bytes,
        )
        self._restorer = Restorer(cold, self._shelf, self.room, self.counters, self._failures, self._review)
        self._changes = Changes(
            self._shelf,
            self.precision,
            self._mover,
            self._restorer,
            self.room,
            puts_away=options.put_away,
            review=self._review,
        )
        self.fetches = Fetches(self, cold)

    def _max_tokens(self, plan: Plan) -> int:
        """About what memory holds under a plan; for what is remembered of tokens there is a bound of its own."""
        fits = self.options.hot_bytes / max(1.0, plan.token_bytes(self._layout))
        return int(min(max(fits, MIN_WATCHED), MAX_WATCHED))

    def take_over(self, failed: Store) -> None:
        """Go on in its place: with what it counted, and what new spans were to be stored as. What it held goes now."""
        self.counters.update(failed.counters)
        self.pins.take_over(failed.pins)
        self.pressure.num_steps = failed.pressure.num_steps
        self._shelf.num_evicted_tokens = failed._shelf.num_evicted_tokens
        self.precision.target = failed.precision.target
        self._has_new_target()
        failed._shelf.abandon()
        failed._changes.cancel()
        failed._mover.clear()

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

    def root_of(self, salt: str) -> bytes:
        return root_key(self._identity, salt)

    # Match.

    def find(self, tokens: Tokens, salt: str) -> Found:
        """What a match would give now. Pins nothing."""
        return search(self._shelf.tree, self._layout, self.root_of(salt), tokens)

    def match(self, tokens: Tokens, salt: str, asked_twice: int | None = None) -> Lease:
        """The longest usable prefix of `tokens`, pinned until it is released. It is counted when a sequence is opened
        on it. `asked_twice`: what the lease said that the same request was opened on before; None: it was not."""
        ids = as_ids(tokens)
        found = self.find(ids, salt)
        known_tokens = self._shelf.known_tokens(self.root_of(salt), ids)
        kind = kind_of(known_tokens, len(ids))
        uncounted = ids if asked_twice is None else None
        if asked_twice is None:
            asked_twice = max(known_tokens, found.num_tokens)
        if not found.num_tokens:
            return Lease(kind, asked_twice=asked_twice, uncounted=uncounted)
        version = self.version
        for entry in found.entries:
            # A span that is to have fewer bits gets them before a request goes on from it. A change that was asked
            # for goes on under its readers: they do not wait for it.
            if entry.target is None:
                self._mover.finish(entry)
        if version != self.version:
            # Some of it was joined.
            found = self.find(ids, salt)
        prefix = prefix_of(self._layout, found.ranges, mark_of(found))
        lease = Lease(kind, found.num_tokens, prefix, found.ranges, asked_twice, uncounted)
        self._shelf.touch(found.path, kind)
        note_asked_twice(found.path, asked_twice)
        for entry in found.entries:
            self._pin(entry, lease)
        return lease

    def _pin(self, entry: Entry, lease: Lease) -> None:
        if entry not in lease.entries:
            lease.entries.add(entry)
            self._shelf.change(entry, num_leases=entry.num_leases + 1)

    def hold(self, entries: Iterable[Entry]) -> Lease:
        """Keep these while a request waits that would go on from them."""
        lease = Lease(Kind.CONTINUED)
        for entry in entries:
            self._pin(entry, lease)
        return lease

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
        span, key = live_span(self._layout, cache), self.root_of(salt)
        entry = Entry(span, key, salt, lease.kind, asked_twice=lease.asked_twice)
        self._shelf.add(entry)
        if lease.uncounted is not None:
            self.counters["queried_tokens"] += len(lease.uncounted)
            self.counters["hit_tokens"] += lease.num_tokens
            self._shelf.asked(key, lease.uncounted)
            lease.uncounted = None
        return Filing(self, entry, lease)

    def _seal(self, filing: Filing, ids: TokenIds, mark: Mark | None) -> None:
        entry = filing.entry
        num_tokens = len(ids) - entry.span.position
        if num_tokens <= entry.span.num_tokens and mark is None:
            return
        entry.span.num_tokens = num_tokens
        path = self._shelf.insert(entry, ids)
        note_asked_twice(path, filing.lease.asked_twice)
        self._review(entry)
        for node in path:
            # Another sequence may have filed some of these tokens meanwhile: what ours hang on must stay.
            if node.payload is not entry:
                self._pin(node.payload, filing.lease)
        if mark is not None:
            self._shelf.add_mark(path, mark, self.options.max_marks)

    def _end(self, entry: Entry) -> None:
        if entry.nodes:
            self.counters["stored_spans"] += 1
            self.counters["stored_tokens"] += sum(node.num_tokens for node in entry.nodes)
            self._shelf.touch(entry.nodes, entry.kind)
        else:
            # It computed nothing, or nothing that was not there already.
            self.counters["refused_present" if entry.span.num_tokens else "refused_empty"] += 1
        self._settle_in(entry)

    def _tidy(self, entry: Entry) -> None:
        """It is stored as it should be. Few and long spans are read faster than many short ones."""
        # Unless something else was asked for meanwhile, or it has grown.
        self._review(entry)
        self._changes.look()
        if entry.is_running or not entry.nodes:
            return
        last = entry.last_node
        for grown in self._shelf.join_along(last, MAX_SPANS):
            self._review(grown)
        self._keep_arrays_few()
        if self.options.write_through:
            # It may have been joined to what comes before it.
            self._spills.add(last.payload)

    def _keep_arrays_few(self) -> None:
        """What is worth least goes while there are more arrays than the machine allows."""
        most = self.options.max_arrays
        while most is not None and self._shelf.num_arrays > most and self._shelf.evict_least():
            pass

    def _get_stuck(self, entry: Entry, error: Exception) -> None:
        """Every layer of it is whole, as it was or as it should be."""
        entry.is_stuck = True
        self._failures.note("rewrites", error)

    # What is stored changes.

    @property
    def has_work(self) -> bool:
        return self._has_arrivals or self._restorer.is_ready or not self._mover.idle or not self._spills.idle

    @property
    def _has_arrivals(self) -> bool:
        return self.cold.loads.has_arrived

    @property
    def is_rewriting(self) -> bool:
        """Whether the next work replaces what readers may know."""
        return not self._mover.idle

    def work(self, slice_s: float) -> None:
        """Go on with what is to be done to stored spans. First what a request waits for."""
        if self._has_arrivals:
            self.cold.loads.take_in(slice_s)
        elif self._restorer.is_ready:
            self._restorer.work()
        elif not self._mover.idle:
            self._mover.work(slice_s)
        else:
            self._spills.work(slice_s)

    def _review(self, entry: Entry) -> None:
        """Something about it has changed: maybe it should be stored in another way now."""
        self._shelf.journal.note(entry)
        if entry in self._shelf.entries and self.precision.plan_for(entry) is not None:
            self._mover.add(entry)

    def _job(self, entry: Entry) -> Job | None:
        plan = self.precision.plan_for(entry) if entry in self._shelf.entries else None
        return None if plan is None else self._counted(entry, self.precision.job(entry, plan), plan)

    def _counted(self, entry: Entry, job: Job, plan: Plan) -> Job:
        if not plan.is_raw:
            self.counters["encoded_spans"] += 1
        if self.options.put_away and entry.target is not None and not entry.goes_up:
            # What it loses now can be had back.
            yield from self._spills.write(entry)
            if entry not in self._shelf.entries:
                return
        for _ in job:
            self._shelf.recount(entry)
            yield
            if entry not in self._shelf.entries:
                return
        self._shelf.recount(entry)

    def requantize(self, change: Change, plan: Plan, sequence_entries: Collection[Entry] | None = None) -> Changed:
        """Change what is cached, and what new spans are stored as. The work is done bit by bit, by `work`."""
        asked_at_s = time.perf_counter()
        assessed = self._changes.assess(change, plan, sequence_entries, self.disk_usage(change.owner))
        if not change.dry_run:
            self._changes.begin(change, plan, assessed, asked_at_s=asked_at_s)
            self._has_new_target()
        return assessed.changed

    def requantize_progress(self, owner: str | None = None) -> Progress:
        return self._changes.progress(owner)

    @property
    def is_requantizing(self) -> bool:
        return self._changes.is_running

    def cancel_requantize(self, owner: str | None = None) -> Progress:
        progress = self._changes.cancel(owner)
        self._has_new_target()
        return progress

    def _has_new_target(self) -> None:
        """What entries without a target of their own are to be stored as may be another plan now."""
        self._shelf.resize(self._max_tokens(self.precision.target))
        self._shelf.journal.note_all(self._shelf.entries)

    # The disk.

    def _settle_in(self, entry: Entry) -> None:
        """A span that is not its owner's any more: keep what no other sequence has filed."""
        if not entry.nodes:
            self._shelf.drop(entry)
            return
        start, end = min(node.start for node in entry.nodes), max(node.end for node in entry.nodes)
        entry.span.cut(start, end)
        self._shelf.change(entry, is_running=False)
        self.pins.look_at(entry)
        self._losses.stored(entry)
        self._review(entry)

    def spill(self) -> None:
        """Write what no request uses and the disk has not, as when memory fills up: bit by bit, by `work`."""
        self._spills.add_free()

    def flush(self, timeout_s: float) -> Unwritten:
        """The end: write all that the disk has not, for at most so long. Tells what is left."""
        self.expire()
        return self._flush.run(timeout_s)

    def close(self) -> None:
        self.cold.tier.close()

    # Room.

    def expire(self) -> None:
        """Let go of what no request asked for in time."""
        self._shelf.shrink_to(self._shelf.held_bytes)

    def seconds_to_expiry(self) -> float:
        """Until something has not been asked for in time; infinite where nothing waits for that."""
        return self._shelf.seconds_to_expiry()

    def relieve(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need: let spans step down when so much is in use, stored and running, of what there is."""
        self.room.relieve(used_bytes, limit_bytes)

    def shrink_to(self, limit_bytes: int, slice_s: float = math.inf, *, most_bytes: int | None = None) -> Shrunk:
        """Let spans step down and evict until no more than this is held, or only what is in use. What a working disk is
        about to take stays until then, but no more than `most_bytes` are held in any case. `slice_s`: the work that is
        done here and now, about; the rest is for `work`."""
        return self.room.shrink_to(limit_bytes, slice_s, most_bytes=most_bytes)

    def shorten(self, tokens: Tokens, salt: str, need_bytes: int, *, keeps_used: bool) -> bool:
        """Let go of some of what a match of these would keep in memory, so many bytes if that can be: what it does not
        use first. False: there is nothing that may go."""
        held_bytes = self._shelf.held_bytes
        for entry in self.find(tokens, salt).entries:
            self._mover.finish(entry)
        found = self.find(tokens, salt)
        return self._shelf.held_bytes < held_bytes or self._shelf.shorten(found, need_bytes, keeps_used=keeps_used)

    def drop_marks(self, filing: Filing) -> bool:
        """All on the way of a sequence that runs: it needs none of them itself. False: there are none."""
        return self._shelf.drop_marks(filing.entries)

    def clear(
        self, salt: str | None = None, tier: Literal["hot", "disk", "all"] = "all", *, owner: str | None = None
    ) -> Cleared:
        """Drop all that is free to go in memory and all on the disk; or only under one salt, or an owner's salts."""
        under = self._roots_begin(salt, owner)
        before, tokens = self._shelf.held_bytes, self._shelf.tree.num_tokens
        if tier != "disk":
            self._shelf.clear(under)
        hot = Cleared(before - self._shelf.held_bytes, tokens - self._shelf.tree.num_tokens)
        if tier == "hot":
            return hot
        self._spills.give_up(under)
        for entry in self._shelf.entries:
            if entry.root_key.startswith(under):
                self._shelf.set_clean(entry, is_clean=False)
        removed = self.cold.tier.clear(under)
        return Cleared(hot.nbytes + removed.disk_bytes, hot.tokens + removed.num_tokens)

    def _roots_begin(self, salt: str | None, owner: str | None) -> bytes:
        """What the roots have in common that are under a salt, an owner, or any."""
        if salt is not None:
            return self.root_of(salt)
        return b"" if owner is None else owner_key(self._identity, owner)

    def pin(self, tokens: Tokens, salt: str, limit_bytes: int | None = None) -> int:
        """Keep what is stored of these tokens, whatever else has to go. Tells how many are. Raises Forbidden where the
        salt's owner would have more pinned than this."""
        num_tokens = self.find(tokens, salt).num_tokens
        self.pins.add(self.root_of(salt), as_ids(tokens)[:num_tokens], limit_bytes)
        return num_tokens

    def unpin(self, tokens: Tokens, salt: str) -> int:
        self.pins.remove(self.root_of(salt), as_ids(tokens))
        return self.find(tokens, salt).num_tokens

    # Answers.

    def usage(self, owner: str | None = None) -> TierUsage:
        """Of what is in memory under an owner's salts; None: under all."""
        return self._totals.usage(lambda salt: owner is None or owner_of(salt) == owner)

    def disk_usage(self, owner: str | None = None) -> TierUsage | None:
        """None: there is no disk."""
        if not self.cold.has_tier:
            return None
        usage = self.cold.tier.usage(self._roots_begin(None, owner))
        # Files that were cleared and are being deleted are told by `disk_counts`.
        return disk_usage(usage, usage.disk_bytes - usage.leaving_bytes if owner is None else usage.block_bytes)

    def count(self) -> dict[str, int]:
        """What happened since the start."""
        counts = {**self.counters, "stepped_down_spans": self.pressure.num_steps}
        counts["evicted_tokens"] = self._shelf.num_evicted_tokens
        if self.cold.has_tier:
            counts["unreadable_blocks"] = self.cold.loads.num_unreadable
            counts |= disk_counts(self.cold.tier.usage())
        return counts

    def ask_disk(self, tokens: Tokens, salt: str) -> Lookup[OnDisk] | None:
        """What the disk has to say about a prompt. None: there is none."""
        if not self.cold.has_tier:
            return None
        return self.cold.about(self.root_of(salt), as_ids(tokens)[:-1])

    def explain(self, tokens: Tokens, salt: str, on_disk: OnDisk | None = None) -> Explanation:
        """How much of a prompt is there, and why not more. The last token is always computed. `on_disk`: what the disk
        said; None: it was not asked."""
        self.expire()
        ids, key = as_ids(tokens)[:-1], self.root_of(salt)
        return explain(self._shelf, on_disk, key, ids, self.find(ids, salt))

    def miss(self, tokens: Tokens, salt: str) -> Ending:
        """Why not more of a prompt is in memory."""
        ids, key = as_ids(tokens)[:-1], self.root_of(salt)
        return ending(self._shelf, key, ids, self.find(ids, salt), self._shelf.tree.diverged(key, ids))
