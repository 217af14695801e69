"""The prefix cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.prefix_cache.config import StoreOptions
from kvstrata.prefix_cache.conversations import Branches
from kvstrata.prefix_cache.entries import Entry, Found, Lease, note_asked_twice
from kvstrata.prefix_cache.entry_table import Leaves, Marks, Shelf, Watcher
from kvstrata.prefix_cache.eviction import Clearing, Dropping, Evictor
from kvstrata.prefix_cache.eviction_order import History, kind_of
from kvstrata.prefix_cache.flush import Flush, Unwritten
from kvstrata.prefix_cache.insertion import Desk, Filing, Intake, Leases, NoFiling
from kvstrata.prefix_cache.jobs import Errands, Failures, Mover
from kvstrata.prefix_cache.keys import Identity, TokenIds, Tokens, as_ids
from kvstrata.prefix_cache.matching import Explainer, Explanation, ForeignExplainer, Search, mark_of, ranges_of
from kvstrata.prefix_cache.offload import Losses, NoSpills, Spills
from kvstrata.prefix_cache.pins import Pins
from kvstrata.prefix_cache.precision import PlanOf, Precision, Pressure
from kvstrata.prefix_cache.prefetch import Fetches, Restorer
from kvstrata.prefix_cache.reclaim import Room, Shortening
from kvstrata.prefix_cache.requantize import Changes
from kvstrata.prefix_cache.sharing import Shared, Sharing
from kvstrata.prefix_cache.tier_client import Cold, no_cold
from kvstrata.prefix_cache.transcode import Rewriting
from kvstrata.prefix_cache.transfer import Incoming, Outgoing
from kvstrata.prefix_cache.usage import Reporter
from kvstrata.prefix_cache.worth import Kind, Reuse
from kvstrata.spans.convert import RAW
from kvstrata.spans.live import live_span
from kvstrata.spans.marks import needs_marks
from kvstrata.spans.plan import raw_plan
from kvstrata.spans.span import empty_span, prefix_of
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup, answered


class Chores:
    """`colds`: all tiers. `sharing`: what goes to one that others share; None: there is none."""

    def __init__(
        self,
        colds: Sequence[Cold],
        restorer: Restorer,
        mover: Mover,
        spills: Spills,
        errands: Errands,
        sharing: Sharing | None,
        changes: Changes,
    ) -> None:
        self._colds = tuple(colds)
        self._sharing = sharing
        self._restorer = restorer
        self._mover = mover
        self._spills = spills
        self._errands = errands
        self._changes = changes
        self._is_errands_turn = True

    @property
    def has_work(self) -> bool:
        is_busy = self.is_asked_for or not self._mover.idle or not self._spills.idle
        return is_busy or (self._sharing is not None and self._sharing.has_work)

    @property
    def has_work_beside_streams(self) -> bool:
        """The same, less what is written to the disk ahead of need while the disk has enough to write."""
        others = self.is_asked_for or not self._mover.idle or (self._sharing is not None and self._sharing.has_work)
        return others or not (self._spills.idle or self._spills.can_wait)

    @property
    def is_asked_for(self) -> bool:
        """Whether a request or a client waits for some of it."""
        return self._arrived is not None or self._restorer.is_ready or not self._errands.idle

    @property
    def _arrived(self) -> Cold | None:
        """A tier from which something came."""
        return next((cold for cold in self._colds if cold.loads.has_arrived), None)

    @property
    def is_rewriting(self) -> bool:
        """Whether the next work replaces what readers may know."""
        return not self._mover.idle and not self._does_errand

    @property
    def _does_errand(self) -> bool:
        """Errands and rewriting take turns: neither may keep the other waiting for good."""
        return not self._errands.idle and (self._is_errands_turn or self._mover.idle)

    def work(self, slice_s: float) -> None:
        """Go on with what is to be done. First what a request waits for. At the end, changes of precision notice how
        far they have got."""
        self._work(slice_s)
        self._changes.look()

    def _work(self, slice_s: float) -> None:
        arrived = self._arrived
        if arrived is not None:
            arrived.loads.take_in(slice_s)
        elif self._restorer.is_ready:
            self._restorer.work()
        elif self._does_errand:
            self._is_errands_turn = False
            self._errands.work(slice_s)
        elif not self._mover.idle:
            self._is_errands_turn = True
            self._mover.work(slice_s)
        elif not self._spills.idle or self._sharing is None:
            self._spills.work(slice_s)
        else:
            self._sharing.work(slice_s)


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


# Tokens of requests that eviction learns from.
MIN_WATCHED, MAX_WATCHED = 1 << 12, 1 << 20


@dataclass(frozen=True)
class Stock:
    shelf: Shelf
    leaves: Leaves
    search: Search
    store: Store
    leases: Leases
    pins: Pins
    fetches: Fetches
    room: Room
    evictor: Evictor
    shortening: Shortening
    chores: Chores
    rewriting: Rewriting
    pressure: Pressure
    changes: Changes
    clearing: Clearing
    dropping: Dropping
    explainer: Explainer
    reporter: Reporter
    spills: Spills
    flushing: Flush
    errands: Errands
    outgoing: Outgoing
    incoming: Incoming
    cold: Cold
    shared: Shared | None  # a tier that other servers write too; None: there is none
    sharing: Sharing | None
    counters: Counter[str]
    failures: Failures

    def take_over(self, failed: Stock) -> None:
        """Go on in its place: with what it counted, what is pinned, and what new spans were to be stored as. What it
        held goes now, whatever state it is in."""
        self.counters.update(failed.counters)
        self.pins.take_over(failed.pins)
        self.changes.take_over(failed.changes)
        loads = [self.cold.loads, *([self.shared.cold.loads] if self.shared is not None else [])]
        ends = (failed.shelf.abandon, failed.changes.cancel, failed.rewriting.mover.clear)
        for end in (*ends, *(each.clear for each in loads)):
            try:
                end()
            except Exception as error:  # noqa: BLE001
                self.failures.note("releases", error)

    def ask_disk(self, tokens: Tokens, salt: str) -> Lookup[OnDisk | None]:
        """Ask how much of a prompt the disk has."""
        return self.cold.about(self.search.root_of(salt), as_ids(tokens)[:-1])

    def ask_shared(self, tokens: Tokens, salt: str) -> Lookup[OnDisk | None]:
        """Ask the same of the tier that other servers share."""
        if self.shared is None:
            return answered(None)
        return self.shared.cold.about(self.search.root_of(salt), as_ids(tokens)[:-1])

    def explain(
        self, tokens: Tokens, salt: str, on_disk: OnDisk | None = None, in_shared: OnDisk | None = None
    ) -> Explanation:
        """Explain how much of a prompt is cached now, with the answers of these tiers; None: they were not asked."""
        self.evictor.expire()
        paused = "" if self.shared is None else self.shared.tier.writing().paused_because
        return self.explainer.explain(tokens, salt, on_disk, in_shared, paused)

    def flush(self, timeout_s: float) -> Unwritten:
        """The end: write all that the disk has not, for at most so long. Tells what is left."""
        self.pins.expire()
        self.evictor.expire()
        self.evictor.drop_superseded()
        return self.flushing.run(timeout_s)

    def close(self) -> None:
        self.cold.tier.close()
        if self.shared is not None:
            self.shared.tier.close()


def make_stock(
    layout: Layout,
    identity: Identity,
    options: StoreOptions,
    plan_of: PlanOf,
    *,
    cold: Cold | None = None,
    shared: Shared | None = None,
    watcher: Watcher | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Stock:
    """For a model that brings caches of its own kind the store stays empty. Raises ConfigError for a precision that the
    layers cannot be stored in."""
    cold = cold or no_cold(layout)
    ground = _lay_ground(layout, identity, options, plan_of, clock, watcher)
    shelf, search, counters, failures = ground.shelf, ground.search, ground.counters, ground.failures
    pins, losses = Pins(shelf, search, cold, counters, clock), Losses(shelf, counters)
    reporter = Reporter(shelf, search, cold, shared, counters)
    sharing = Sharing(shared, shelf, failures) if shared is not None and ground.can_share else None
    memory = _build_memory(ground, plan_of, cold, sharing, losses, reporter)
    rewriting, spills, evictor, room = memory.rewriting, memory.spills, memory.evictor, memory.room
    mover = rewriting.mover
    leases = Leases(shelf, rewriting.review)
    intake = Intake(shelf, pins, losses, counters, rewriting)
    desk = Desk(shelf, ground.marks, leases, intake, memory.pressure, rewriting, Branches(shelf, ground.leaves))
    errands = Errands(failures.watching)
    history = History(ground.reuse, lambda: _watched_tokens(options.hot_bytes, ground.precision))
    return Stock(
        shelf=shelf,
        leaves=ground.leaves,
        search=search,
        store=(Store if ground.can_share else NoStore)(search, desk, rewriting, history, counters, clock),
        leases=leases,
        pins=pins,
        fetches=Fetches(cold, shared, search, desk, room, failures),
        room=room,
        evictor=evictor,
        shortening=Shortening(shelf, search, ground.marks, evictor, mover),
        chores=Chores(
            (cold, shared.cold) if shared else (cold,),
            *(memory.restorer, mover, spills, errands, sharing, memory.changes),
        ),
        rewriting=rewriting,
        pressure=memory.pressure,
        changes=memory.changes,
        clearing=Clearing(search, shelf, evictor, spills, cold),
        dropping=Dropping(search, shelf, cold),
        explainer=(Explainer if ground.can_share else ForeignExplainer)(shelf, search),
        reporter=reporter,
        spills=spills,
        flushing=Flush(cold, shelf, ground.leaves, spills, rewriting),
        errands=errands,
        outgoing=Outgoing(desk, search, mover),
        incoming=Incoming(desk, search, room, counters),
        cold=cold,
        shared=shared,
        sharing=sharing,
        counters=counters,
        failures=failures,
    )


@dataclass(frozen=True)
class _Ground:
    """What all others stand on: the spans that are held, the index over them, and in which precision they should be."""

    options: StoreOptions
    can_share: bool  # whether the model's caches can be stored at all
    counters: Counter[str]
    failures: Failures
    reuse: Reuse
    precision: Precision
    leaves: Leaves
    shelf: Shelf
    search: Search
    marks: Marks


def _lay_ground(
    layout: Layout,
    identity: Identity,
    options: StoreOptions,
    plan_of: PlanOf,
    clock: Callable[[], float],
    watcher: Watcher | None,
) -> _Ground:
    can_share = all(spec.kind != "foreign" for spec in layout.flat())
    counters = Counter(stepped_down_spans=0, evicted_tokens=0) if can_share else Counter[str]()
    k, v = options.precision.k or RAW[0], options.precision.v or RAW[1]
    reuse = Reuse()
    leaves = Leaves(reuse, options.ttl_s, clock)
    hot_bytes = options.hot_bytes if can_share else 0
    shelf = Shelf(leaves, max_bytes=hot_bytes, max_arrays=options.max_arrays, watcher=watcher)
    return _Ground(
        options=options,
        can_share=can_share,
        counters=counters,
        failures=Failures(counters, shelf),
        reuse=reuse,
        precision=Precision(layout, plan_of(k, v) if can_share else raw_plan(layout), options.precision),
        leaves=leaves,
        shelf=shelf,
        search=Search(shelf, layout, identity),
        marks=Marks(shelf, options.max_marks, are_needed=can_share and needs_marks(layout)),
    )


@dataclass(frozen=True)
class _Memory:
    """Those who keep what is held within its bounds, and bring it to the precision that it should have."""

    rewriting: Rewriting
    spills: Spills
    pressure: Pressure
    evictor: Evictor
    room: Room
    restorer: Restorer
    changes: Changes


def _build_memory(
    ground: _Ground,
    plan_of: PlanOf,
    cold: Cold,
    sharing: Sharing | None,
    losses: Losses,
    reporter: Reporter,
) -> _Memory:
    options, shelf, leaves, counters = ground.options, ground.shelf, ground.leaves, ground.counters
    spills = (Spills if cold.has_tier else NoSpills)(
        cold, shelf, leaves, counters, ground.failures, was_short=ground.precision.was_short
    )
    rewriting = Rewriting(
        shelf,
        ground.precision,
        spills,
        sharing,
        counters,
        ground.failures,
        writes_after_reply=options.disk_write == "after-reply",
    )
    pressure = Pressure(shelf, leaves, ground.precision, plan_of, options.ladder)
    evictor = Evictor(shelf, leaves, ground.marks, spills, rewriting, losses, ground.failures)
    room = Room(shelf, evictor, rewriting, pressure, spills, losses)
    restorer = Restorer(cold, shelf, room, counters, ground.failures, rewriting.review)
    changes = Changes(shelf, leaves, rewriting, restorer, room, reporter.disk_usage)
    return _Memory(rewriting, spills, pressure, evictor, room, restorer, changes)


def _watched_tokens(hot_bytes: int, precision: Precision) -> int:
    """About what memory holds; for what is remembered of tokens there is a bound of its own."""
    fits = hot_bytes / max(1.0, precision.target_token_bytes())
    return int(min(max(fits, MIN_WATCHED), MAX_WATCHED))
