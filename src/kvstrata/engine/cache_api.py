"""Questions and changes that the server may put to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import mlx.core as mx

from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse as parse_precision
from kvstrata.engine.budget import Budget, with_formats
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.prefix_lookup import PrefixLookup
from kvstrata.engine.sequence import Sequence
from kvstrata.errors import InvalidRequest
from kvstrata.layers.sequence import SequenceCache
from kvstrata.layers.tail import FullLayer
from kvstrata.prefix_cache.conversation_list import (
    CachedConversation,
    ConversationRun,
    ConversationSnapshot,
    CountedSlice,
    RememberedConversation,
    SessionCounts,
)
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.eviction import Cleared, DropResult
from kvstrata.prefix_cache.jobs import Steps, run_to_end
from kvstrata.prefix_cache.keys import TokenIds, as_ids, owner_of
from kvstrata.prefix_cache.matching import Explanation
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.requantize import ChangeProgress, ChangeResult, PrecisionChange, Scope, TierChange
from kvstrata.prefix_cache.tier_client import TierRun
from kvstrata.prefix_cache.usage import PartUsage, PrecisionRun, TierUsage, precision_of
from kvstrata.spans.span import SpanRange
from kvstrata.tier.base import SharedUsage
from kvstrata.tier.chains import OnDisk
from kvstrata.tier.lookups import Lookup, answered


@dataclass(frozen=True)
class SequenceUsage:
    id: str
    tokens: int
    parts: tuple[PartUsage, ...]  # in order; the last one is what it computes itself


@dataclass(frozen=True)
class CacheUsage:
    tiers: dict[str, TierUsage]
    sequences: tuple[SequenceUsage, ...]
    budget_bytes: int  # for all KV: running and stored
    hot_budget_bytes: int  # for what is stored
    running_bytes: int
    pinned_bytes: int  # of what is stored in memory
    headroom_bytes: int
    allocator_bytes: int
    counters: dict[str, int]
    target: tuple[str, str]  # the precision of keys and of values that are stored from now on
    remote: SharedUsage | None = None  # a tier that other servers write too; None: there is none
    has_store: bool = True  # False: this model's caches cannot be stored


def cache_usage(
    stock: Stock, budget: Budget, running: Iterable[Sequence], prefixes: PrefixLookup, owner: str | None = None
) -> CacheUsage:
    """What is under an owner's salts, or all; budgets, headroom and counters are the server's in either case."""
    sequences = list(running)
    own = [s for s in sequences if owner is None or owner_of(s.request.salt) == owner]
    disk = stock.usage.disk_usage(owner)
    held_bytes = _running_bytes(sequences, budget) + stock.table.nbytes
    target = stock.requantizer.target
    return CacheUsage(
        tiers={"hot": stock.usage.usage(owner), **({"disk": disk} if disk else {})},
        sequences=tuple(_sequence(s, budget, prefixes) for s in own),
        budget_bytes=budget.total_bytes,
        hot_budget_bytes=stock.table.max_bytes,
        running_bytes=_running_bytes(own, budget),
        pinned_bytes=stock.pins.pinned_bytes(owner),
        headroom_bytes=max(0, budget.total_bytes - held_bytes),
        allocator_bytes=mx.get_active_memory(),
        counters=stock.usage.count(),
        target=(target.k.name, target.v.name),
        remote=stock.usage.shared_usage(),
        has_store=stock.store.can_share,
    )


def _running_bytes(sequences: Iterable[Sequence], budget: Budget) -> int:
    return sum(budget.bytes_held_by(s.cache, s.kv_format) for s in sequences if s.cache is not None)


def _sequence(sequence: Sequence, budget: Budget, prefixes: PrefixLookup) -> SequenceUsage:
    if sequence.cache is None:
        return SequenceUsage(sequence.request.id, 0, ())
    parts = [_shared(run, readers) for run, readers in prefixes.leased_ranges(sequence)]
    parts += _own(sequence.cache, budget, prefixes.num_readers(sequence))
    return SequenceUsage(sequence.request.id, sequence.cache.num_tokens, tuple(parts))


def _own(cache: SequenceCache, budget: Budget, readers: int) -> list[PartUsage]:
    """What a sequence computes itself: sealed parts, as the first layer that has some, then the buffers."""
    full = [layer.own for layer in cache.flat if isinstance(layer, FullLayer)]
    sealed = full[0].sealed if full else ()
    parts = [PartUsage(part.num_tokens, part.k.name, part.v.name, part.nbytes * len(full), readers) for part in sealed]
    raw = cache.num_tokens - cache.start - sum(part.num_tokens for part in sealed)
    return [*parts, PartUsage(raw, "raw", "raw", budget.bytes_for(cache.raw_capacity), readers)]


def _shared(run: SpanRange, readers: int) -> PartUsage:
    k, v = precision_of(run.span)
    tokens = run.end - run.start
    nbytes = run.span.kv_bytes * tokens // max(1, run.span.num_tokens)
    return PartUsage(tokens, k, v, nbytes, readers)


Tier = Literal["hot", "disk", "all"]


@dataclass(frozen=True)
class ClearedCache:
    cleared: Cleared
    left_bytes: int  # in the tiers that were cleared


class Operations:
    def __init__(self, loop: EngineCore) -> None:
        self._loop = loop
        self._stock = loop.stock

    def usage(self, owner: str | None = None) -> CacheUsage:
        """Of what is under an owner's salts; None: all."""
        loop = self._loop
        return cache_usage(self._stock, loop.budget, loop.sequences.running.values(), loop.prefixes, owner)

    def requantize(self, change: PrecisionChange) -> ChangeResult:
        """Raises ConfigError for a precision that the model's layers cannot be stored in."""
        return run_to_end(self.requantizing(change))

    def requantizing(self, change: PrecisionChange) -> Steps[ChangeResult]:
        """Likewise in small steps, each of which costs the same with ten entries and with thousands."""
        self._require_store()
        if change.scope == "disk":
            self._require_tier("disk", param="scope")
        loop, changes = self._loop, self._stock.requantizer
        plan = loop.catalog.plan_of(change.k or changes.target.k, change.v or changes.target.v)
        changed = yield from changes.requantizing(change, plan, self._entries_of(change.sequence, change.owner))
        loop.memory.budget = with_formats(loop.budget, loop.catalog, changes.target)
        return changed

    def requantize_progress(self, owner: str | None = None) -> ChangeProgress:
        self._require_store()
        return self._stock.requantizer.progress(owner)

    def cancel_requantize(self, owner: str | None = None) -> ChangeProgress:
        self._require_store()
        return self._stock.requantizer.cancel(owner)

    def ask_disk(self, ids: TokenIds, salt: str) -> Lookup[OnDisk | None]:
        """What the disk has of a prompt, which it tells on a thread of its own."""
        return self._stock.ask_disk(ids, salt)

    def ask_shared(self, ids: TokenIds, salt: str) -> Lookup[OnDisk | None]:
        """The same of the tier that other servers share."""
        return self._stock.ask_shared(ids, salt)

    def explain(self, ids: TokenIds, salt: str, on_disk: OnDisk | None, in_shared: OnDisk | None) -> Explanation:
        """`on_disk`, `in_shared`: what those tiers told; None: they did not."""
        return self._stock.explain(ids, salt, on_disk, in_shared)

    def count(self, census: SessionCounts, seconds: float) -> CountedSlice:
        """Go on with a census for about so long."""
        return census.advance(self._stock.matcher, self._stock.disk, seconds)

    def tell(self, strata: ConversationSnapshot, seconds: float) -> ConversationSnapshot:
        """Go on with telling what memory holds, for about so long."""
        strata.advance(self._stock.table, self._stock.candidates, self._stock.matcher, seconds)
        return strata

    def lie_on_disk(self, asked: Iterable[RememberedConversation]) -> Lookup[tuple[tuple[TierRun, ...], ...]]:
        """In which runs conversations lie on the disk, which it tells on a thread of its own. The answer is empty where
        there is no disk."""
        return self._stock.disk.locate_runs(self._rooted(asked))

    def lie_in_shared(self, asked: Iterable[RememberedConversation]) -> tuple[Lookup[tuple[int, ...]], str]:
        """How many tokens of conversations the tier has that servers share, and in which precision; likewise."""
        shared = self._stock.shared
        if shared is None:
            return answered(()), ""
        return shared.client.count_usable(self._rooted(asked)), shared.tier.shared_usage().precision

    def drop(self, ids: TokenIds, salt: str, *, is_dry: bool) -> DropResult:
        """What no other conversation has of this one."""
        self._require_store()
        return self._stock.evictor.drop_conversation(ids, salt, is_dry=is_dry)

    def _rooted(self, asked: Iterable[RememberedConversation]) -> list[tuple[bytes, TokenIds]]:
        return [(self._stock.matcher.root_of(each.salt), each.ids) for each in asked]

    def clear(self, salt: str | None, tier: Tier, *, owner: str | None) -> ClearedCache:
        self._require_tier(tier, param="tier")
        self._require_store()
        cleared = self._stock.evictor.clear(salt, tier, owner=owner)
        tiers = self.usage(owner).tiers.items()
        return ClearedCache(cleared, sum(left.nbytes for name, left in tiers if tier in ("all", name)))

    def pin(self, ids: TokenIds, salt: str, quota: Callable[[int], int] | None) -> int:
        """Tells how many tokens are kept. `quota`: how many bytes may be pinned, of those that there are for stored
        KV; None: any number."""
        self._require_store()
        return self._stock.pins.pin(ids, salt, None if quota is None else quota(self._stock.table.max_bytes))

    def unpin(self, ids: TokenIds, salt: str) -> int:
        self._require_store()
        return self._stock.pins.unpin(ids, salt)

    def _entries_of(self, request_id: str | None, owner: str | None) -> set[Entry] | None:
        """What a running request holds; None: no request was named. Another owner's is as good as none."""
        if request_id is None:
            return None
        for sequence in self._loop.sequences.running.values():
            is_own = owner is None or owner_of(sequence.request.salt) == owner
            if sequence.request.id == request_id and is_own:
                return self._loop.prefixes.held_entries(sequence)
        raise InvalidRequest(f"No request {request_id[:80]!r} is running. GET /cache/usage lists those that are.")

    def _require_store(self) -> None:
        if not self._stock.store.can_share:
            raise InvalidRequest(
                "This model brings caches of its own kind, which cannot be shared: nothing is stored. GET /props shows "
                "its layers.",
                code="no_store",
            )

    def _require_tier(self, tier: Tier, *, param: str) -> None:
        tiers = self.usage().tiers
        if tier != "all" and tier not in tiers:
            raise InvalidRequest(f"{param}: this server has no {tier} tier, only {', '.join(tiers)}.", param=param)


__all__ = [
    "Cache",
    "CacheUsage",
    "CachedConversation",
    "ChangeProgress",
    "ChangeResult",
    "Cleared",
    "Codec",
    "ConversationRun",
    "ConversationSnapshot",
    "CountedSlice",
    "DropResult",
    "Explanation",
    "OnDisk",
    "PartUsage",
    "PrecisionChange",
    "PrecisionRun",
    "RememberedConversation",
    "Scope",
    "SequenceUsage",
    "SessionCounts",
    "SharedUsage",
    "Tier",
    "TierChange",
    "TierRun",
    "TierUsage",
    "TokenIds",
    "as_ids",
    "owner_of",
    "parse_precision",
]

T = TypeVar("T")


class Ask(Protocol):
    def __call__(self, question: Callable[[EngineCore], T], /) -> Future[T]: ...


class Cache:
    """See `Operations`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def usage(self, owner: str | None = None) -> Future[CacheUsage]:
        return self._ask(lambda loop: Operations(loop).usage(owner))

    def requantize(self, change: PrecisionChange) -> Future[tuple[ChangeResult, CacheUsage]]:
        """With what is held then."""

        def steps(loop: EngineCore) -> Steps[tuple[ChangeResult, CacheUsage]]:
            operations = Operations(loop)
            changed = yield from operations.requantizing(change)
            return changed, operations.usage(change.owner)

        return self._have_done(steps)

    def _have_done(self, steps: Callable[[EngineCore], Steps[T]]) -> Future[T]:
        """Have work done in small steps between those of the engine."""
        answer: Future[T] = Future()

        def pass_on(done: Future[T]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            else:
                answer.set_exception(error)

        def begun(asked: Future[Future[T]]) -> None:
            error = asked.exception()
            if error is None:
                asked.result().add_done_callback(pass_on)
            else:
                answer.set_exception(error)

        answer.set_running_or_notify_cancel()
        self._ask(lambda loop: loop.stock.tasks.add(steps(loop))).add_done_callback(begun)
        return answer

    def requantize_progress(self, owner: str | None = None) -> Future[ChangeProgress]:
        return self._ask(lambda loop: Operations(loop).requantize_progress(owner))

    def cancel_requantize(self, owner: str | None = None) -> Future[ChangeProgress]:
        return self._ask(lambda loop: Operations(loop).cancel_requantize(owner))

    def ask_disk(self, ids: TokenIds, salt: str) -> Future[Lookup[OnDisk | None]]:
        return self._ask(lambda loop: Operations(loop).ask_disk(ids, salt))

    def ask_shared(self, ids: TokenIds, salt: str) -> Future[Lookup[OnDisk | None]]:
        return self._ask(lambda loop: Operations(loop).ask_shared(ids, salt))

    def explain(
        self, ids: TokenIds, salt: str, on_disk: OnDisk | None, in_shared: OnDisk | None = None
    ) -> Future[Explanation]:
        return self._ask(lambda loop: Operations(loop).explain(ids, salt, on_disk, in_shared))

    def count(self, census: SessionCounts, seconds: float) -> Future[CountedSlice]:
        """The next slice of a census. Not before the answer to the last one has come."""
        return self._ask(lambda loop: Operations(loop).count(census, seconds))

    def tell(self, strata: ConversationSnapshot, seconds: float) -> Future[ConversationSnapshot]:
        """The next slice of what memory holds. Not before the answer to the last one has come."""
        return self._ask(lambda loop: Operations(loop).tell(strata, seconds))

    def lie_on_disk(self, asked: Iterable[RememberedConversation]) -> Future[Lookup[tuple[tuple[TierRun, ...], ...]]]:
        return self._ask(lambda loop: Operations(loop).lie_on_disk(asked))

    def lie_in_shared(self, asked: Iterable[RememberedConversation]) -> Future[tuple[Lookup[tuple[int, ...]], str]]:
        return self._ask(lambda loop: Operations(loop).lie_in_shared(asked))

    def drop(self, ids: TokenIds, salt: str, *, is_dry: bool) -> Future[DropResult]:
        return self._ask(lambda loop: Operations(loop).drop(ids, salt, is_dry=is_dry))

    def clear(self, salt: str | None, tier: Tier, *, owner: str | None) -> Future[ClearedCache]:
        return self._ask(lambda loop: Operations(loop).clear(salt, tier, owner=owner))

    def pin(self, ids: TokenIds, salt: str, quota: Callable[[int], int] | None) -> Future[int]:
        return self._ask(lambda loop: Operations(loop).pin(ids, salt, quota))

    def unpin(self, ids: TokenIds, salt: str) -> Future[int]:
        return self._ask(lambda loop: Operations(loop).unpin(ids, salt))
