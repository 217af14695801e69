"""The prefix cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.prefix_cache.config import CacheConfig
from kvstrata.prefix_cache.conversations import ConversationTracker
from kvstrata.prefix_cache.entries import CachedPrefix, Entry, Lease, record_reuse
from kvstrata.prefix_cache.entry_table import CacheListener, Checkpoints, EntryTable, EvictionCandidates
from kvstrata.prefix_cache.eviction import Evictor
from kvstrata.prefix_cache.eviction_order import RequestHistory, reuse_class_of
from kvstrata.prefix_cache.flush import Flush, UnwrittenReport
from kvstrata.prefix_cache.insertion import Desk, DetachedInsertion, Inserter, Insertion, Leases
from kvstrata.prefix_cache.jobs import ClientTasks, FailureLog, JobQueue
from kvstrata.prefix_cache.keys import Identity, TokenIds, Tokens, as_ids
from kvstrata.prefix_cache.matching import (
    Explainer,
    Explanation,
    ForeignExplainer,
    PrefixMatcher,
    checkpoint_of,
    ranges_of,
)
from kvstrata.prefix_cache.offload import DropCounters, NoOffloader, Offloader
from kvstrata.prefix_cache.pins import Pins
from kvstrata.prefix_cache.precision import PlanOf, PrecisionPolicy, StepDownPolicy
from kvstrata.prefix_cache.prefetch import Prefetcher, Restorer
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.requantize import Requantizer
from kvstrata.prefix_cache.sharing import SharedTierClient, Sharer
from kvstrata.prefix_cache.tier_client import TierClient, without_tier
from kvstrata.prefix_cache.transcode import Transcoder
from kvstrata.prefix_cache.transfer import ConversationExport, ConversationImport
from kvstrata.prefix_cache.usage import UsageReporter
from kvstrata.prefix_cache.worth import Reuse, ReuseClass
from kvstrata.spans.convert import RAW
from kvstrata.spans.live import live_span
from kvstrata.spans.marks import needs_marks
from kvstrata.spans.plan import raw_plan
from kvstrata.spans.span import empty_span, prefix_of
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup, answered


class BackgroundWork:
    """`colds`: all tiers. `sharing`: what goes to one that others share; None: there is none."""

    def __init__(
        self,
        colds: Sequence[TierClient],
        restorer: Restorer,
        mover: JobQueue,
        spills: Offloader,
        errands: ClientTasks,
        sharing: Sharer | None,
        changes: Requantizer,
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
    def _arrived(self) -> TierClient | None:
        """A tier from which something came."""
        return next((cold for cold in self._colds if cold.loader.has_arrived), None)

    @property
    def is_rewriting(self) -> bool:
        """Whether the next work replaces what readers may know."""
        return not self._mover.idle and not self._does_errand

    @property
    def _does_errand(self) -> bool:
        """Errands and rewriting take turns: neither may keep the other waiting for good."""
        return not self._errands.idle and (self._is_errands_turn or self._mover.idle)

    def run_background(self, slice_s: float) -> None:
        """Go on with what is to be done. First what a request waits for. At the end, changes of precision notice how
        far they have got."""
        self._work(slice_s)
        self._changes.update_progress()

    def _work(self, slice_s: float) -> None:
        arrived = self._arrived
        if arrived is not None:
            arrived.loader.run(slice_s)
        elif self._restorer.is_ready:
            self._restorer.run()
        elif self._does_errand:
            self._is_errands_turn = False
            self._errands.run(slice_s)
        elif not self._mover.idle:
            self._is_errands_turn = True
            self._mover.run(slice_s)
        elif not self._spills.idle or self._sharing is None:
            self._spills.run(slice_s)
        else:
            self._sharing.run(slice_s)


class Store:
    can_share = True

    def __init__(
        self,
        search: PrefixMatcher,
        desk: Desk,
        rewriting: Transcoder,
        history: RequestHistory,
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
    def needs_checkpoints(self) -> bool:
        """Whether the model can be resumed at marks only."""
        return self._desk.marks.are_needed

    @property
    def version(self) -> int:
        """Changes with what a match may find."""
        return self._desk.shelf.version

    def lookup(self, tokens: Tokens, salt: str) -> CachedPrefix:
        """What a match would give now. Keeps nothing from going."""
        return self._search.find(tokens, salt)

    def lease(self, tokens: Tokens, salt: str, asked_twice: int | None = None, session: str = "") -> Lease:
        """The longest usable prefix of `tokens`, kept until it is released. It is counted when a sequence is opened
        on it. `asked_twice`: what the lease said that the same request was opened on before; None: it was not."""
        ids, root = as_ids(tokens), self._search.root_of(salt)
        thread = self._desk.branches.begin_turn(root, session, ids)
        lease = self._lease(ids, salt, asked_twice, session)
        lease.session, lease.conversation = session, thread
        return lease

    def _lease(self, ids: TokenIds, salt: str, asked_twice: int | None, session: str) -> Lease:
        found = self._search.find(ids, salt)
        known_tokens = self._history.known_tokens(self._search.root_of(salt), ids)
        kind = reuse_class_of(known_tokens, len(ids))
        uncounted = ids if asked_twice is None else None
        if asked_twice is None:
            asked_twice = max(known_tokens, found.num_tokens)
        if not found.num_tokens:
            return Lease(kind, reused_end=asked_twice, uncounted_prompt=uncounted)
        ranges = ranges_of(found)
        prefix = prefix_of(self._search.layout, ranges, checkpoint_of(found))
        lease = Lease(kind, found.num_tokens, prefix, ranges, asked_twice, uncounted)
        self._desk.shelf.record_use(found.path, kind, session)
        record_reuse(found.path, asked_twice)
        self._desk.leases.extend(lease, found.entries)
        return lease

    def awaits_encoding(self, found: CachedPrefix) -> bool:
        """Whether some of a match is to be encoded before a request goes on from it. Then that is done next, between
        two steps, bit by bit: a lease encodes nothing."""
        waits = [entry for entry in found.entries if self._rewriting.is_awaited(entry)]
        for entry in waits:
            self._rewriting.jobs.prioritize(entry)
        return bool(waits)

    def release(self, lease: Lease) -> None:
        self._desk.leases.release(lease)

    def insert(self, lease: Lease, cache: SequenceCache, salt: str, resume_at: Sequence[int] = ()) -> Insertion:
        """A sequence begins to compute what follows its lease. `resume_at`: where later ones are likely to part."""
        span, key = live_span(self._search.layout, cache), self._search.root_of(salt)
        entry = Entry(span, key, salt, lease.reuse_class, lease.session, reused_end=lease.reused_end)
        if lease.uncounted_prompt is not None:
            self._counters["queried_tokens"] += len(lease.uncounted_prompt)
            self._counters["hit_tokens"] += lease.num_tokens
            self._history.record_request(key, lease.uncounted_prompt, self._clock())
            lease.uncounted_prompt = None
        self._desk.shelf.add_entry(entry)
        return Insertion(self._desk, entry, lease, resume_at)

    def insert_detached(self, lease: Lease) -> Insertion:
        """Likewise, where nothing of it is to be filed."""
        return DetachedInsertion(self._desk, Entry(empty_span(self._search.layout), b"", "", ReuseClass.FRESH), lease)


class NoStore(Store):
    """Of a model whose caches cannot be shared: nothing is filed, so nothing is found."""

    can_share = False

    def open(self, lease: Lease, cache: SequenceCache, salt: str, resume_at: Sequence[int] = ()) -> Insertion:
        del cache, salt, resume_at
        return self.insert_detached(lease)


# Tokens of requests that eviction learns from.
MIN_WATCHED, MAX_WATCHED = 1 << 12, 1 << 20


@dataclass(frozen=True)
class Stock:
    table: EntryTable
    candidates: EvictionCandidates
    matcher: PrefixMatcher
    store: Store
    leases: Leases
    pins: Pins
    prefetcher: Prefetcher
    reclaimer: Reclaimer
    evictor: Evictor
    background: BackgroundWork
    transcoder: Transcoder
    step_down: StepDownPolicy
    requantizer: Requantizer
    clearing: Evictor
    explainer: Explainer
    usage: UsageReporter
    offloader: Offloader
    flushing: Flush
    tasks: ClientTasks
    outgoing: ConversationExport
    incoming: ConversationImport
    disk: TierClient
    shared: SharedTierClient | None  # a tier that other servers write too; None: there is none
    sharing: Sharer | None
    counters: Counter[str]
    failures: FailureLog

    def take_over(self, failed: Stock) -> None:
        """Go on in its place: with what it counted, what is pinned, and what new spans were to be stored as. What it
        held goes now, whatever state it is in."""
        self.counters.update(failed.counters)
        self.pins.take_over(failed.pins)
        self.requantizer.take_over(failed.requantizer)
        loads = [self.disk.loader, *([self.shared.client.loader] if self.shared is not None else [])]
        ends = (failed.table.abandon, failed.requantizer.cancel, failed.transcoder.jobs.clear)
        for end in (*ends, *(each.clear for each in loads)):
            try:
                end()
            except Exception as error:  # noqa: BLE001
                self.failures.record_failure("releases", error)

    def ask_disk(self, tokens: Tokens, salt: str) -> Lookup[OnDisk | None]:
        """Ask how much of a prompt the disk has."""
        return self.disk.describe_prefix(self.matcher.root_of(salt), as_ids(tokens)[:-1])

    def ask_shared(self, tokens: Tokens, salt: str) -> Lookup[OnDisk | None]:
        """Ask the same of the tier that other servers share."""
        if self.shared is None:
            return answered(None)
        return self.shared.client.describe_prefix(self.matcher.root_of(salt), as_ids(tokens)[:-1])

    def explain(
        self, tokens: Tokens, salt: str, on_disk: OnDisk | None = None, in_shared: OnDisk | None = None
    ) -> Explanation:
        """Explain how much of a prompt is cached now, with the answers of these tiers; None: they were not asked."""
        self.evictor.expire()
        paused = "" if self.shared is None else self.shared.tier.writing().paused_because
        return self.explainer.explain(tokens, salt, on_disk, in_shared, paused)

    def flush(self, timeout_s: float) -> UnwrittenReport:
        """The end: write all that the disk has not, for at most so long. Tells what is left."""
        self.pins.expire()
        self.evictor.expire()
        self.evictor.drop_superseded()
        return self.flushing.run(timeout_s)

    def close(self) -> None:
        self.disk.tier.close()
        if self.shared is not None:
            self.shared.tier.close()


def make_stock(
    layout: Layout,
    identity: Identity,
    options: CacheConfig,
    plan_of: PlanOf,
    *,
    cold: TierClient | None = None,
    shared: SharedTierClient | None = None,
    watcher: CacheListener | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Stock:
    """For a model that brings caches of its own kind the store stays empty. Raises ConfigError for a precision that the
    layers cannot be stored in."""
    cold = cold or without_tier(layout)
    ground = _lay_ground(layout, identity, options, plan_of, clock, watcher)
    shelf, search, counters, failures = ground.shelf, ground.search, ground.counters, ground.failures
    pins, losses = Pins(shelf, search, cold, counters, clock), DropCounters(shelf, counters)
    reporter = UsageReporter(shelf, search, cold, shared, counters)
    sharing = Sharer(shared, shelf, failures) if shared is not None and ground.can_share else None
    memory = _build_memory(ground, plan_of, cold, sharing, losses, reporter)
    rewriting, spills, evictor, room = memory.rewriting, memory.spills, memory.evictor, memory.room
    mover = rewriting.jobs
    leases = Leases(shelf, rewriting.review)
    intake = Inserter(shelf, pins, losses, counters, rewriting)
    desk = Desk(
        shelf, ground.marks, leases, intake, memory.pressure, rewriting, ConversationTracker(shelf, ground.leaves)
    )
    errands = ClientTasks(failures.watching)
    history = RequestHistory(ground.reuse, lambda: _watched_tokens(options.hot_bytes, ground.precision))
    return Stock(
        table=shelf,
        candidates=ground.leaves,
        matcher=search,
        store=(Store if ground.can_share else NoStore)(search, desk, rewriting, history, counters, clock),
        leases=leases,
        pins=pins,
        prefetcher=Prefetcher(cold, shared, search, desk, room, failures),
        reclaimer=room,
        evictor=evictor,
        background=BackgroundWork(
            (cold, shared.client) if shared else (cold,),
            *(memory.restorer, mover, spills, errands, sharing, memory.changes),
        ),
        transcoder=rewriting,
        step_down=memory.pressure,
        requantizer=memory.changes,
        clearing=evictor,
        explainer=(Explainer if ground.can_share else ForeignExplainer)(shelf, search),
        usage=reporter,
        offloader=spills,
        flushing=Flush(cold, shelf, ground.leaves, spills, rewriting),
        tasks=errands,
        outgoing=ConversationExport(desk, search, mover),
        incoming=ConversationImport(desk, search, room, counters),
        disk=cold,
        shared=shared,
        sharing=sharing,
        counters=counters,
        failures=failures,
    )


@dataclass(frozen=True)
class _Ground:
    """What all others stand on: the spans that are held, the index over them, and in which precision they should be."""

    options: CacheConfig
    can_share: bool  # whether the model's caches can be stored at all
    counters: Counter[str]
    failures: FailureLog
    reuse: Reuse
    precision: PrecisionPolicy
    leaves: EvictionCandidates
    shelf: EntryTable
    search: PrefixMatcher
    marks: Checkpoints


def _lay_ground(
    layout: Layout,
    identity: Identity,
    options: CacheConfig,
    plan_of: PlanOf,
    clock: Callable[[], float],
    watcher: CacheListener | None,
) -> _Ground:
    can_share = all(spec.kind != "foreign" for spec in layout.flat())
    counters = Counter(stepped_down_spans=0, evicted_tokens=0) if can_share else Counter[str]()
    k, v = options.precision.k or RAW[0], options.precision.v or RAW[1]
    reuse = Reuse()
    leaves = EvictionCandidates(reuse, options.ttl_s, clock)
    hot_bytes = options.hot_bytes if can_share else 0
    shelf = EntryTable(leaves, max_bytes=hot_bytes, max_arrays=options.max_arrays, watcher=watcher)
    return _Ground(
        options=options,
        can_share=can_share,
        counters=counters,
        failures=FailureLog(counters, shelf),
        reuse=reuse,
        precision=PrecisionPolicy(layout, plan_of(k, v) if can_share else raw_plan(layout), options.precision),
        leaves=leaves,
        shelf=shelf,
        search=PrefixMatcher(shelf, layout, identity),
        marks=Checkpoints(shelf, options.max_checkpoints, are_needed=can_share and needs_marks(layout)),
    )


@dataclass(frozen=True)
class _Memory:
    """Those who keep what is held within its bounds, and bring it to the precision that it should have."""

    rewriting: Transcoder
    spills: Offloader
    pressure: StepDownPolicy
    evictor: Evictor
    room: Reclaimer
    restorer: Restorer
    changes: Requantizer


def _build_memory(
    ground: _Ground,
    plan_of: PlanOf,
    cold: TierClient,
    sharing: Sharer | None,
    losses: DropCounters,
    reporter: UsageReporter,
) -> _Memory:
    options, shelf, leaves, counters = ground.options, ground.shelf, ground.leaves, ground.counters
    spills = (Offloader if cold.has_tier else NoOffloader)(
        cold, shelf, leaves, counters, ground.failures, was_short=ground.precision.was_short
    )
    rewriting = Transcoder(
        shelf,
        ground.precision,
        spills,
        sharing,
        counters,
        ground.failures,
        writes_after_reply=options.disk_write == "after-reply",
    )
    pressure = StepDownPolicy(shelf, leaves, ground.precision, plan_of, options.ladder)
    evictor = Evictor(shelf, leaves, ground.marks, ground.search, cold, spills, rewriting, losses, ground.failures)
    room = Reclaimer(shelf, ground.search, ground.marks, evictor, rewriting, pressure, spills, losses)
    restorer = Restorer(cold, shelf, room, counters, ground.failures, rewriting.review)
    changes = Requantizer(shelf, leaves, rewriting, restorer, room, reporter.disk_usage)
    return _Memory(rewriting, spills, pressure, evictor, room, restorer, changes)


def _watched_tokens(hot_bytes: int, precision: PrecisionPolicy) -> int:
    """About what memory holds; for what is remembered of tokens there is a bound of its own."""
    fits = hot_bytes / max(1.0, precision.target_token_bytes())
    return int(min(max(fits, MIN_WATCHED), MAX_WATCHED))
