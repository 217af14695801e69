"""What the engine holds at this moment, for people and dashboards to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from kvstrata.engine.memory import Budget
from kvstrata.engine.sequence import Sequence
from kvstrata.index.identity import owner_of
from kvstrata.layers.sequence import SequenceCache
from kvstrata.layers.tail import FullLayer
from kvstrata.spans.span import SpanRange
from kvstrata.store.report import PartUsage, TierUsage, precision_of
from kvstrata.store.stock import Stock
from kvstrata.tier.base import SharedUsage


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


def cache_usage(stock: Stock, budget: Budget, running: Iterable[Sequence], owner: str | None = None) -> CacheUsage:
    """What is under an owner's salts, or all; budgets, headroom and counters are the server's in either case."""
    sequences = list(running)
    own = [s for s in sequences if owner is None or owner_of(s.request.salt) == owner]
    disk = stock.reporter.disk_usage(owner)
    held_bytes = _running_bytes(sequences, budget) + stock.shelf.held_bytes
    target = stock.changes.target
    return CacheUsage(
        tiers={"hot": stock.reporter.usage(owner), **({"disk": disk} if disk else {})},
        sequences=tuple(_sequence(s, budget) for s in own),
        budget_bytes=budget.total_bytes,
        hot_budget_bytes=stock.shelf.max_bytes,
        running_bytes=_running_bytes(own, budget),
        pinned_bytes=stock.pins.nbytes(owner),
        headroom_bytes=max(0, budget.total_bytes - held_bytes),
        allocator_bytes=mx.get_active_memory(),
        counters=stock.reporter.count(),
        target=(target.k.name, target.v.name),
        remote=stock.reporter.shared_usage(),
        has_store=stock.store.can_share,
    )


def _running_bytes(sequences: Iterable[Sequence], budget: Budget) -> int:
    return sum(budget.held_by(s.cache, s.rung) for s in sequences if s.cache is not None)


def _sequence(sequence: Sequence, budget: Budget) -> SequenceUsage:
    if sequence.cache is None:
        return SequenceUsage(sequence.request.id, 0, ())
    lease = sequence.stored.filing.lease if sequence.stored.filing else None
    parts = [_shared(run, lease.readers(run.span)) for run in lease.ranges] if lease else []
    readers = 1 + (sequence.stored.filing.entry.num_leases if sequence.stored.filing else 0)
    parts += _own(sequence.cache, budget, readers)
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
