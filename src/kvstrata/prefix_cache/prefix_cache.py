"""The prefix cache."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvstrata.kv.checkpoints import needs_checkpoints
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import RAW, raw_plan
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import empty_span, live_span, prefix_of
from kvstrata.prefix_cache.config import CacheConfig, CacheLimits
from kvstrata.prefix_cache.conversations import ConversationTracker
from kvstrata.prefix_cache.entries import CachedPrefix, Entry, Lease
from kvstrata.prefix_cache.entry_table import CacheListener, EntryTable, EvictionCandidates
from kvstrata.prefix_cache.eviction import Evictor
from kvstrata.prefix_cache.eviction_order import RequestHistory, reuse_class_of
from kvstrata.prefix_cache.flush import UnwrittenReport, flush_all
from kvstrata.prefix_cache.insertion import DetachedInsertion, Inserter, Insertion, Leases
from kvstrata.prefix_cache.jobs import ClientTasks, FailureLog
from kvstrata.prefix_cache.keys import Identity, Tokens, as_ids
from kvstrata.prefix_cache.matching import Explanation, PrefixMatcher, checkpoint_of, ranges_of
from kvstrata.prefix_cache.offload import Offloader
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
from kvstrata.tiers.interface import PromptOnTier
from kvstrata.tiers.lookups import Lookup, answered

# Bounds of the tokens of requests that eviction learns from.
MIN_WATCHED, MAX_WATCHED = 1 << 12, 1 << 20


class PrefixCache:
    """Cached KV of all requests, in memory and on tiers. Each part uses only parts that are constructed before it.

    A model whose caches cannot be shared has a prefix cache with `can_share` False: its table stays empty.
    """

    def __init__(
        self,
        layout: Layout,
        identity: Identity,
        config: CacheConfig,
        limits: CacheLimits,
        plan_of: PlanOf,
        *,
        disk: TierClient | None = None,
        shared: SharedTierClient | None = None,
        listener: CacheListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plan_of`: makes a precision plan from a K and a V codec. `shared`: a tier that other servers write too.
        Raises ConfigError for a precision that the layers cannot be stored in."""
        self._clock = clock
        self._is_task_turn = True  # client tasks take their turn before transcoding
        self.can_share = all(spec.kind != "foreign" for spec in layout.flat())
        self.needs_checkpoints = self.can_share and needs_checkpoints(
            layout
        )  # the model can be resumed at checkpoints only
        if not self.can_share:
            limits = replace(limits, max_bytes=0)

        # Cached spans, and what a prompt finds of them.
        reuse = Reuse()
        self.candidates = EvictionCandidates(reuse, config.ttl_s, clock)
        self.table = EntryTable(
            self.candidates,
            limits,
            max_checkpoints=config.max_checkpoints,
            needs_checkpoints=self.needs_checkpoints,
            listener=listener,
        )
        self.counters = Counter(stepped_down_spans=0, evicted_tokens=0) if self.can_share else Counter[str]()
        self.failures = FailureLog(self.counters, self.table)
        self.matcher = PrefixMatcher(self.table, layout, identity)

        # Their precision, and writes to the tiers.
        target = plan_of(config.k or RAW[0], config.v or RAW[1]) if self.can_share else raw_plan(layout)
        precision = PrecisionPolicy(layout, target, config, limits)
        self.disk = without_tier(layout) if disk is None else disk
        self.shared = shared
        self.sharing = Sharer(shared, self.table, self.failures) if shared is not None and self.can_share else None
        self.offloader = Offloader(self.disk, self.table, precision, self.failures)
        self.transcoder = Transcoder(
            self.table,
            precision,
            self.offloader,
            self.sharing,
            self.failures,
            writes_after_reply=config.disk_write == "after_reply",
        )

        # Uses of entries, and eviction.
        self.leases = Leases(self.table, self.transcoder)
        self.pins = Pins(self.table, self.matcher, self.disk, self.counters, clock)
        self.conversations = ConversationTracker(self.table, self.candidates, self.matcher, config.ttl_s, clock)
        # Not a method of this cache: the reference would keep a failed one alive until the next garbage collection.
        self._history = RequestHistory(reuse, partial(_watched_tokens, limits.max_bytes, precision))
        self.evictor = Evictor(self.table, self.matcher, self.disk, self.offloader, self.transcoder, self.failures)
        self.step_down_policy = StepDownPolicy(self.table, precision, plan_of)
        self.reclaimer = Reclaimer(
            self.table, self.matcher, self.evictor, self.transcoder, self.step_down_policy, self.offloader
        )

        # New spans: computed, loaded and imported.
        self._inserter = Inserter(
            self.table,
            self.leases,
            self.pins,
            self.step_down_policy,
            self.transcoder,
            self.evictor.drop_counters,
            self.counters,
        )
        self.prefetcher = Prefetcher(self.disk, shared, self.matcher, self._inserter, self.reclaimer, self.failures)
        self._restorer = Restorer(
            self.disk, self.table, self.reclaimer, self.counters, self.failures, self.transcoder.review
        )
        self.exports = ConversationExport(self._inserter, self.matcher, self.transcoder.jobs)
        self.imports = ConversationImport(self._inserter, self.matcher, self.reclaimer, self.counters)

        # Questions and changes of clients.
        self.usage = UsageReporter(self.table, self.matcher, self.disk, shared, self.counters)
        self.requantizer = Requantizer(
            self.table, self.transcoder, self._restorer, self.reclaimer, self.usage.disk_usage
        )
        self.tasks = ClientTasks(self.failures.breaking_on_error)

    # Lookup, lease, insertion.

    @property
    def version(self) -> int:
        """Number that changes whenever a lookup may have another result."""
        return self.table.version

    def lookup(self, ids: Tokens, salt: str) -> CachedPrefix:
        """Return the longest usable cached prefix of `ids`. The result protects no entry from eviction."""
        return self.matcher.find(ids, salt)

    def lease(self, ids: Tokens, salt: str, *, is_new: bool = True, session: str = "") -> Lease:
        """Lease the longest usable cached prefix of `ids` until `release`. Opening a sequence on the lease counts it.

        `is_new`: False for a request that is resumed, which is not counted again.
        """
        prompt, root = as_ids(ids), self.matcher.root_of(salt)
        prefix = self.matcher.find(prompt, salt)
        reuse_class = reuse_class_of(self._history.known_tokens(root, prompt), len(prompt))
        lease = Lease(reuse_class, uncounted_prompt=prompt if is_new else None, session=session)
        if prefix.num_tokens:
            lease.num_tokens, lease.ranges = prefix.num_tokens, ranges_of(prefix)
            lease.prefix = prefix_of(self.matcher.layout, lease.ranges, checkpoint_of(prefix))
            self.table.record_use(prefix.path, reuse_class, session)
            self.leases.extend(lease, prefix.entries)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease. A second call has no effect."""
        self.leases.release(lease)

    def insert(self, lease: Lease, cache: SequenceCache, salt: str, resume_at: Sequence[int] = ()) -> Insertion:
        """Open an insertion for the tokens that a sequence computes after its lease.

        `resume_at`: positions in the prompt where later requests are likely to diverge.
        """
        if not self.can_share:
            return self.insert_detached(lease)
        span, root = live_span(self.matcher.layout, cache), self.matcher.root_of(salt)
        entry = Entry(span, root, salt, lease.reuse_class, lease.session)
        if lease.uncounted_prompt is not None:
            self.counters["queried_tokens"] += len(lease.uncounted_prompt)
            self.counters["hit_tokens"] += lease.num_tokens
            self._history.record_request(root, lease.uncounted_prompt, self._clock())
            lease.uncounted_prompt = None
        self.table.add_entry(entry)
        return Insertion(self._inserter, entry, lease, resume_at)

    def insert_detached(self, lease: Lease) -> Insertion:
        """Open an insertion that makes no token visible to other requests."""
        entry = Entry(empty_span(self.matcher.layout), b"", "", ReuseClass.FRESH)
        return DetachedInsertion(self._inserter, entry, lease)

    def waits_for_encoding(self, prefix: CachedPrefix) -> bool:
        """Whether entries of a prefix must be encoded before a request may resume from them. The transcoder takes
        those entries next, in slices: a lease encodes nothing."""
        waiting = [entry for entry in prefix.entries if self.transcoder.is_awaited(entry)]
        for entry in waiting:
            self.transcoder.jobs.prioritize(entry)
        return bool(waiting)

    # Background work.

    @property
    def has_work(self) -> bool:
        """Whether any background work is left."""
        return self._has_work_besides_offload or not self.offloader.is_idle

    @property
    def has_work_beside_streams(self) -> bool:
        """Whether background work is left that should run while streams decode: all but writes ahead of need while
        the disk has enough to write."""
        return self._has_work_besides_offload or not (self.offloader.is_idle or self.offloader.may_postpone_writes)

    @property
    def _has_work_besides_offload(self) -> bool:
        is_busy = self.has_awaited_work or not self.transcoder.jobs.is_idle
        return is_busy or (self.sharing is not None and self.sharing.has_work)

    @property
    def has_awaited_work(self) -> bool:
        """Whether a request or a client waits for background work."""
        return self._arrived_tier is not None or self._restorer.is_ready or not self.tasks.is_idle

    @property
    def is_transcoding(self) -> bool:
        """Whether the next slice of background work may replace spans that sequences read."""
        return not self.transcoder.jobs.is_idle and not self._is_next_a_task

    @property
    def _arrived_tier(self) -> TierClient | None:
        """First tier whose loader has blocks that have arrived."""
        return next((tier for tier in self._tiers if tier.loader.has_arrived), None)

    @property
    def _tiers(self) -> tuple[TierClient, ...]:
        return (self.disk,) if self.shared is None else (self.disk, self.shared.client)

    @property
    def _is_next_a_task(self) -> bool:
        """Whether a client task comes next. Tasks and transcoding take turns, so that neither starves the other."""
        return not self.tasks.is_idle and (self._is_task_turn or self.transcoder.jobs.is_idle)

    def run_background(self, slice_s: float) -> None:
        """Run one slice of background work, first the work that a request waits for."""
        self._run_slice(slice_s)
        self.requantizer.update_progress()

    def _run_slice(self, slice_s: float) -> None:
        arrived = self._arrived_tier
        if arrived is not None:
            arrived.loader.run(slice_s)
        elif self._restorer.is_ready:
            self._restorer.run()
        elif self._is_next_a_task:
            self._is_task_turn = False
            self.tasks.run(slice_s)
        elif not self.transcoder.jobs.is_idle:
            self._is_task_turn = True
            self.transcoder.jobs.run(slice_s)
        elif not self.offloader.is_idle or self.sharing is None:
            self.offloader.run(slice_s)
        else:
            self.sharing.run(slice_s)

    # Questions.

    def look_up_on_disk(self, ids: Tokens, salt: str) -> Lookup[PromptOnTier | None]:
        """Ask how many tokens of a prompt the disk has."""
        return self.disk.describe_prefix(self.matcher.root_of(salt), as_ids(ids)[:-1])

    def look_up_in_shared(self, ids: Tokens, salt: str) -> Lookup[PromptOnTier | None]:
        """Ask how many tokens of a prompt the shared tier has."""
        if self.shared is None:
            return answered(None)
        return self.shared.client.describe_prefix(self.matcher.root_of(salt), as_ids(ids)[:-1])

    def explain(
        self, ids: Tokens, salt: str, on_disk: PromptOnTier | None = None, in_shared: PromptOnTier | None = None
    ) -> Explanation:
        """Explain how much of a prompt is cached now. `on_disk`, `in_shared`: what these tiers answered; None: they
        were not asked."""
        self.evictor.expire()
        paused = "" if self.shared is None else self.shared.tier.write_state().paused_because
        return self.matcher.explain(ids, salt, on_disk, in_shared, paused)

    # The end.

    def take_over(self, failed: PrefixCache) -> None:
        """Replace a failed cache: adopt its counters, its pins, its conversations and its target precision, and drop
        its entries, in whatever state they are."""
        self.counters.update(failed.counters)
        self.pins.take_over(failed.pins)
        self.conversations.take_over(failed.conversations)
        self.requantizer.take_over(failed.requantizer)
        clearers = (
            failed.table.abandon,
            failed.requantizer.cancel,
            failed.transcoder.jobs.clear,
            *(tier.loader.cancel_all for tier in self._tiers),
        )
        for clear in clearers:
            try:
                clear()
            except Exception as error:  # noqa: BLE001
                self.failures.record_failure("releases", error)

    def flush(self, timeout_s: float) -> UnwrittenReport:
        """Write all that the disk lacks, for at most `timeout_s`, and report what is left."""
        self.pins.expire()
        self.evictor.expire()
        self.evictor.drop_superseded()
        return flush_all(self.disk, self.table, self.offloader, self.transcoder, timeout_s)

    def close(self) -> None:
        """Close the tiers."""
        for client in self._tiers:
            client.tier.close()


def _watched_tokens(max_bytes: int, precision: PrecisionPolicy) -> int:
    """Return how many tokens of requests eviction learns from: about as many as memory holds, within bounds."""
    fits = max_bytes / max(1.0, precision.target_token_bytes())
    return int(min(max(fits, MIN_WATCHED), MAX_WATCHED))
