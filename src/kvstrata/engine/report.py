"""What the engine holds at this moment, for people and dashboards to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from kvstrata.engine.memory import Budget
from kvstrata.engine.resume import Resume
from kvstrata.engine.sequence import Sequence
from kvstrata.spans.span import SpanRange
from kvstrata.store.report import PartUsage, TierUsage, precision_of


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
    headroom_bytes: int
    allocator_bytes: int
    counters: dict[str, int]


def cache_usage(resume: Resume, budget: Budget, running: Iterable[Sequence]) -> CacheUsage:
    sequences = list(running)
    store = resume.store
    hot = store.usage() if store else TierUsage()
    running_bytes = sum(budget.bytes_for(s.cache.capacity) for s in sequences if s.cache is not None)
    return CacheUsage(
        tiers={"hot": hot},
        sequences=tuple(_sequence(s, budget) for s in sequences),
        budget_bytes=budget.total_bytes,
        hot_budget_bytes=store.options.hot_bytes if store else 0,
        running_bytes=running_bytes,
        headroom_bytes=max(0, budget.total_bytes - running_bytes - hot.nbytes),
        allocator_bytes=mx.get_active_memory(),
        counters=dict(store.count()) if store else {},
    )


def _sequence(sequence: Sequence, budget: Budget) -> SequenceUsage:
    if sequence.cache is None:
        return SequenceUsage(sequence.request.id, 0, ())
    lease = sequence.filing.lease if sequence.filing else None
    parts = [_shared(run, lease.readers(run.span)) for run in lease.ranges] if lease else []
    own = sequence.cache.num_tokens - sequence.cache.start
    nbytes = budget.bytes_for(sequence.cache.capacity)
    followers = sequence.filing.entry.num_leases if sequence.filing else 0
    parts.append(PartUsage(own, "raw", "raw", nbytes, 1 + followers))
    return SequenceUsage(sequence.request.id, sequence.cache.num_tokens, tuple(parts))


def _shared(run: SpanRange, readers: int) -> PartUsage:
    k, v = precision_of(run.span)
    tokens = run.end - run.start
    nbytes = run.span.kv_bytes * tokens // max(1, run.span.num_tokens)
    return PartUsage(tokens, k, v, nbytes, readers)
