"""Questions and changes that the server may put to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse as parse_precision
from kvstrata.engine.budget import Budget
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.prefix_lookup import PrefixLookup
from kvstrata.engine.sequence import Sequence
from kvstrata.errors import InvalidRequest
from kvstrata.kv.full_layer import FullLayer
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import SpanRange
from kvstrata.prefix_cache.conversation_list import (
    CachedConversation,
    ConversationListing,
    ConversationPart,
    ConversationSnapshot,
    ConversationTokens,
    CountedSlice,
    ListedConversation,
    SessionCounts,
)
from kvstrata.prefix_cache.conversations import Conversation, PromptDivergence, TrackedConversation
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.eviction import Cleared, DropResult
from kvstrata.prefix_cache.jobs import Steps, run_to_end
from kvstrata.prefix_cache.keys import TokenIds, as_ids, owner_of
from kvstrata.prefix_cache.matching import Explanation
from kvstrata.prefix_cache.requantize import ChangeProgress, ChangeResult, PrecisionChange, Scope, TierChange
from kvstrata.prefix_cache.tier_client import TierRun
from kvstrata.prefix_cache.usage import PartUsage, TierUsage, precision_of
from kvstrata.tiers.interface import PromptOnTier, SharedUsage
from kvstrata.tiers.lookups import Lookup, answered


@dataclass(frozen=True)
class SequenceUsage:
    """The KV that one running request holds."""

    id: str
    tokens: int
    parts: tuple[PartUsage, ...]  # in order of position; the sequence's own KV buffer comes last


@dataclass(frozen=True)
class CacheUsage:
    """The KV in memory and on the tiers, the budgets, and the event counters."""

    tiers: dict[str, TierUsage]
    sequences: tuple[SequenceUsage, ...]
    budget_bytes: int  # for all KV: running and cached
    hot_budget_bytes: int  # for cached KV
    running_bytes: int
    pinned_bytes: int  # of the cached KV in memory
    headroom_bytes: int
    allocator_bytes: int
    counters: dict[str, int]
    target: tuple[str, str]  # precision of the keys and of the values that are cached from now on
    remote: SharedUsage | None = None  # None: the server has no shared tier
    can_share: bool = True  # False: this model's caches cannot be shared, so nothing is cached


Tier = Literal["hot", "disk", "all"]


@dataclass(frozen=True)
class ClearedCache:
    """Result of `CacheApi.clear`."""

    cleared: Cleared
    left_bytes: int  # still held by the tiers that were cleared


@dataclass(frozen=True)
class RequantizedCache:
    """Result of `CacheApi.begin_requantize`: the change, and the usage right after it."""

    result: ChangeResult
    usage: CacheUsage


class CacheApi:
    """Questions and changes that the server may put to the cache.

    Runs on the engine thread and keeps no state: one is constructed for each question, because a core is replaced after
    a failed forward pass. None of its methods waits for a tier; those that need one return a `Lookup`.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._cache = core.prefix_cache

    def usage(self, owner: str | None = None) -> CacheUsage:
        """Return what is held under an owner's salts, or under all salts (None).

        Budgets, headroom and counters are the server's in either case.
        """
        cache, budget = self._cache, self._core.budget
        sequences = list(self._core.sequences.running.values())
        own = [each for each in sequences if owner is None or owner_of(each.request.salt) == owner]
        disk = cache.usage.disk_usage(owner)
        held_bytes = _running_bytes(sequences, budget) + cache.table.nbytes
        target = cache.requantizer.target
        return CacheUsage(
            tiers={"hot": cache.usage.usage(owner), **({"disk": disk} if disk else {})},
            sequences=tuple(_sequence_usage(each, budget, self._core.prefix_lookup) for each in own),
            budget_bytes=budget.total_bytes,
            hot_budget_bytes=cache.table.max_bytes,
            running_bytes=_running_bytes(own, budget),
            pinned_bytes=cache.pins.pinned_bytes(owner),
            headroom_bytes=max(0, budget.total_bytes - held_bytes),
            allocator_bytes=mx.get_active_memory(),
            counters=cache.usage.counters(),
            target=(target.k.name, target.v.name),
            remote=cache.usage.shared_usage(),
            can_share=cache.can_share,
        )

    # Precision.

    def begin_requantize(self, change: PrecisionChange) -> Future[RequantizedCache]:
        """Change the precision in small steps between those of the engine.

        The future raises ConfigError for a precision that the model's layers cannot be cached in.
        """

        def steps() -> Steps[RequantizedCache]:
            result = yield from self._requantize_in_steps(change)
            return RequantizedCache(result, self.usage(change.owner))

        return self._cache.tasks.add(steps())

    def requantize(self, change: PrecisionChange) -> ChangeResult:
        """Change the precision at once, for callers that hold up no requests. Raises ConfigError."""
        return run_to_end(self._requantize_in_steps(change))

    def requantize_progress(self, owner: str | None = None) -> ChangeProgress:
        """Return how far the latest change has come."""
        self._require_sharing()
        return self._cache.requantizer.progress(owner)

    def cancel_requantize(self, owner: str | None = None) -> ChangeProgress:
        """Stop the latest change; spans that are already transcoded stay so."""
        self._require_sharing()
        return self._cache.requantizer.cancel(owner)

    def _requantize_in_steps(self, change: PrecisionChange) -> Steps[ChangeResult]:
        """Change the precision. A step costs the same with ten entries and with thousands."""
        self._require_sharing()
        if change.scope == "disk":
            self._require_tier("disk", param="scope")
        core, requantizer = self._core, self._cache.requantizer
        plan = core.catalog.plan_of(change.k or requantizer.target.k, change.v or requantizer.target.v)
        entries = self._entries_of_request(change.sequence, change.owner)
        result = yield from requantizer.requantize_in_steps(change, plan, entries)
        core.memory.budget = core.budget.with_formats(core.catalog, requantizer.target)
        return result

    def _entries_of_request(self, request_id: str | None, owner: str | None) -> set[Entry] | None:
        """Return the entries that a running request holds; None: no request was named.

        A request of another owner is treated like one that does not exist.
        """
        if request_id is None:
            return None
        for sequence in self._core.sequences.running.values():
            is_own = owner is None or owner_of(sequence.request.salt) == owner
            if sequence.request.id == request_id and is_own:
                return self._core.prefix_lookup.held_entries(sequence)
        raise InvalidRequest(f"No request {request_id[:80]!r} is running. GET /cache/usage lists those that are.")

    # One prompt.

    def look_up_on_disk(self, ids: TokenIds, salt: str) -> Lookup[PromptOnTier | None]:
        """Begin to look up a prompt on the disk. A thread of the tier answers."""
        return self._cache.look_up_on_disk(ids, salt)

    def look_up_in_shared(self, ids: TokenIds, salt: str) -> Lookup[PromptOnTier | None]:
        """Begin to look up a prompt on the shared tier. A thread of the tier answers."""
        return self._cache.look_up_in_shared(ids, salt)

    def explain(
        self, ids: TokenIds, salt: str, on_disk: PromptOnTier | None, in_shared: PromptOnTier | None = None
    ) -> Explanation:
        """Explain how much of a prompt is cached, and why not more.

        `on_disk`, `in_shared`: answers of `look_up_on_disk` and `look_up_in_shared`; None: the tier did not answer.
        """
        return self._cache.explain(ids, salt, on_disk, in_shared)

    def pin(self, ids: TokenIds, salt: str, quota: Callable[[int], int] | None) -> int:
        """Pin the cached prefix of a prompt, and return its length in tokens.

        `quota`: returns the bytes that may be pinned, given the limit for cached KV; None: any number.
        """
        self._require_sharing()
        return self._cache.pins.pin(ids, salt, None if quota is None else quota(self._cache.table.max_bytes))

    def unpin(self, ids: TokenIds, salt: str) -> int:
        """Unpin a prompt, and return how many of its tokens are cached."""
        self._require_sharing()
        return self._cache.pins.unpin(ids, salt)

    # Conversations.

    def count_sessions(self, counts: SessionCounts, slice_s: float) -> CountedSlice:
        """Count the next slice of `counts`. One slice at a time: wait for its answer before the next call."""
        return counts.advance(self._cache.conversations, self._cache.matcher, self._cache.disk, slice_s)

    def divergence(self, salt: str, session: str, digest: bytes, ids: TokenIds) -> PromptDivergence | None:
        """Return where a prompt of a session diverges from the last turn: see `ConversationTracker.divergence`."""
        return self._cache.conversations.divergence(salt, session, digest, ids)

    def longest_conversation(self, salt: str, session: str) -> Conversation | None:
        """Return the longest conversation of a session. None: it has none, or they were forgotten."""
        return self._cache.conversations.longest(salt, session)

    def newest_conversations(self, owner: str | None, max_sessions: int) -> list[TrackedConversation]:
        """Return the conversations of the sessions that were used last, under an owner's salts or under all (None)."""
        return self._cache.conversations.newest(owner, max_sessions)

    def adopt_conversation(self, salt: str, session: str, digest: bytes, ids: TokenIds, num_prompt: int) -> None:
        """Track a conversation of a session that was served elsewhere."""
        self._cache.conversations.adopt_conversation(salt, session, digest, ids, num_prompt)

    def list_conversations(self, snapshot: ConversationSnapshot, slice_s: float) -> ConversationSnapshot:
        """Add the next slice to `snapshot`. One slice at a time: wait for its answer before the next call."""
        snapshot.advance(self._cache.table, self._cache.candidates, self._cache.matcher, slice_s)
        return snapshot

    def locate_on_disk(self, conversations: Iterable[ConversationTokens]) -> Lookup[tuple[tuple[TierRun, ...], ...]]:
        """Begin to look up the runs of conversations on the disk. The answer is empty where there is no disk."""
        return self._cache.disk.locate_runs(self._with_roots(conversations))

    def locate_in_shared(self, conversations: Iterable[ConversationTokens]) -> tuple[Lookup[tuple[int, ...]], str]:
        """Begin to look up how many tokens of conversations the shared tier has, and return the tier's precision.

        The answer is empty where there is no shared tier.
        """
        shared = self._cache.shared
        if shared is None:
            return answered(()), ""
        return shared.client.count_usable(self._with_roots(conversations)), shared.tier.shared_usage().precision

    def drop_conversation(self, ids: TokenIds, salt: str, *, is_dry: bool) -> DropResult:
        """Drop the tokens that no other conversation shares with this one. `is_dry`: only count them."""
        self._require_sharing()
        return self._cache.evictor.drop_conversation(ids, salt, is_dry=is_dry)

    def _with_roots(self, conversations: Iterable[ConversationTokens]) -> list[tuple[bytes, TokenIds]]:
        return [(self._cache.matcher.root_of(each.salt), each.ids) for each in conversations]

    # The whole cache.

    def clear(self, salt: str | None, tier: Tier, *, owner: str | None) -> ClearedCache:
        """Drop what no request uses under a salt (None: all salts of the owner), in one tier or in all. Unless only the
        disk is cleared, conversations are forgotten, too."""
        self._require_tier(tier, param="tier")
        self._require_sharing()
        if tier != "disk":
            self._cache.conversations.forget(salt, owner)
        cleared = self._cache.evictor.clear(salt, tier, owner=owner)
        tiers = self.usage(owner).tiers.items()
        return ClearedCache(cleared, sum(usage.nbytes for name, usage in tiers if tier in ("all", name)))

    @property
    def wait_for_removals(self) -> Callable[[float], bool]:
        """A function that waits until what was cleared or dropped stays so after a crash, at most some seconds. It runs
        on a thread of the caller, never on the engine's."""
        return self._cache.disk.tier.wait_for_removals

    def _require_sharing(self) -> None:
        if not self._cache.can_share:
            raise InvalidRequest(
                "This model brings caches of its own kind, which cannot be shared: nothing is stored. GET /props shows "
                "its layers.",
                code="no_store",
            )

    def _require_tier(self, tier: Tier, *, param: str) -> None:
        tiers = self.usage().tiers
        if tier != "all" and tier not in tiers:
            raise InvalidRequest(f"{param}: this server has no {tier} tier, only {', '.join(tiers)}.", param=param)


def _running_bytes(sequences: Iterable[Sequence], budget: Budget) -> int:
    return sum(budget.bytes_held_by(each.cache, each.kv_format) for each in sequences if each.cache is not None)


def _sequence_usage(sequence: Sequence, budget: Budget, prefixes: PrefixLookup) -> SequenceUsage:
    if sequence.cache is None:
        return SequenceUsage(sequence.request.id, 0, ())
    parts = [_leased_usage(run, num_readers) for run, num_readers in prefixes.leased_ranges(sequence)]
    parts += _own_usage(sequence.cache, budget, prefixes.num_readers(sequence))
    return SequenceUsage(sequence.request.id, sequence.cache.num_tokens, tuple(parts))


def _leased_usage(run: SpanRange, num_readers: int) -> PartUsage:
    """Return the usage of a run of tokens that a sequence leases from the cache."""
    k, v = precision_of(run.span)
    num_tokens = run.end - run.start
    nbytes = run.span.kv_bytes * num_tokens // max(1, run.span.num_tokens)
    return PartUsage(num_tokens, k, v, nbytes, num_readers)


def _own_usage(cache: SequenceCache, budget: Budget, num_readers: int) -> list[PartUsage]:
    """Return the usage of the KV that a sequence computes itself: its sealed segments, then its KV buffer.

    The first layer with full attention stands for all of them.
    """
    full = [layer.own for layer in cache.flat if isinstance(layer, FullLayer)]
    sealed = full[0].sealed if full else ()
    usages = [
        PartUsage(each.num_tokens, each.k.name, each.v.name, each.nbytes * len(full), num_readers) for each in sealed
    ]
    num_raw = cache.num_tokens - cache.start - sum(each.num_tokens for each in sealed)
    return [*usages, PartUsage(num_raw, "raw", "raw", budget.bytes_for(cache.raw_capacity), num_readers)]


__all__ = [
    "CacheApi",
    "CacheUsage",
    "CachedConversation",
    "ChangeProgress",
    "ChangeResult",
    "Cleared",
    "ClearedCache",
    "Codec",
    "Conversation",
    "ConversationListing",
    "ConversationPart",
    "ConversationSnapshot",
    "ConversationTokens",
    "CountedSlice",
    "DropResult",
    "Explanation",
    "ListedConversation",
    "PartUsage",
    "PrecisionChange",
    "PromptDivergence",
    "PromptOnTier",
    "RequantizedCache",
    "Scope",
    "SequenceUsage",
    "SessionCounts",
    "SharedUsage",
    "Tier",
    "TierChange",
    "TierUsage",
    "TokenIds",
    "TrackedConversation",
    "as_ids",
    "owner_of",
    "parse_precision",
]
