"""All that a store consists of, put together. Callers take the objects that they need.

store, leases, pins, fetches    requests: match and commit, keep, bring back from the disk
outgoing, incoming, errands     conversations that move to another machine, in small steps
room, evictor, chores           memory: make room, let go, what is to be done between two steps
changes, clearing, dropping     what callers ask for
explainer, reporter             answers
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvstrata.eviction.history import History
from kvstrata.eviction.worth import Reuse
from kvstrata.index.identity import Identity
from kvstrata.index.ids import Tokens, as_ids
from kvstrata.layers.kinds import Layout
from kvstrata.spans.convert import RAW
from kvstrata.spans.marks import needs_marks
from kvstrata.spans.plan import raw_plan
from kvstrata.store.branches import Branches
from kvstrata.store.chores import Chores
from kvstrata.store.clearing import Clearing
from kvstrata.store.cold.cold import Cold, no_cold
from kvstrata.store.cold.fetches import Fetches
from kvstrata.store.cold.flush import Flush
from kvstrata.store.cold.restore import Restorer
from kvstrata.store.cold.sharing import Shared, Sharing
from kvstrata.store.cold.spills import NoSpills, Spills
from kvstrata.store.cold.unwritten import Unwritten
from kvstrata.store.dropping import Dropping
from kvstrata.store.errands import Errands
from kvstrata.store.evictor import Evictor
from kvstrata.store.explain import Explainer, Explanation, ForeignExplainer
from kvstrata.store.failures import Failures
from kvstrata.store.filing import Desk, Intake
from kvstrata.store.incoming import Incoming
from kvstrata.store.leases import Leases
from kvstrata.store.leaves import Leaves
from kvstrata.store.losses import Losses
from kvstrata.store.marks import Marks
from kvstrata.store.options import StoreOptions
from kvstrata.store.outgoing import Outgoing
from kvstrata.store.pins import Pins
from kvstrata.store.precision.changes import Changes
from kvstrata.store.precision.pressure import PlanOf, Pressure
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.precision.target import Precision
from kvstrata.store.reporter import Reporter
from kvstrata.store.room import Room
from kvstrata.store.search import Search
from kvstrata.store.shelf import Shelf
from kvstrata.store.shortening import Shortening
from kvstrata.store.store import NoStore, Store
from kvstrata.store.watching import Watcher
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup, answered

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
