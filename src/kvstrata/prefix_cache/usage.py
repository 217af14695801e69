"""Usage: sums of what is cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvstrata.attention.parts import SealedPart
from kvstrata.prefix_cache.entries import DirtySets, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.keys import owner_of
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.spans.contents import KIND, PRECISION, by_label
from kvstrata.spans.live import live_bytes
from kvstrata.spans.marks import RecurrentState
from kvstrata.spans.span import Span
from kvstrata.tier.base import SharedUsage, Usage


@dataclass(frozen=True)
class TierUsage:
    nbytes: int = 0
    tokens: int = 0
    spans: int = 0
    by_precision: dict[str, int] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)
    k: dict[str, int] = field(default_factory=dict)  # bytes of keys by precision; of the memory tier alone
    v: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartUsage:
    """A run of tokens of a running sequence."""

    tokens: int
    k: str
    v: str
    nbytes: int
    shared_by: int


def disk_usage(usage: Usage, nbytes: int) -> TierUsage:
    by_precision, by_kind = (by_label(usage.labels, what) for what in (PRECISION, KIND))
    return TierUsage(nbytes, usage.num_tokens, usage.num_blocks, by_precision, by_kind)


def disk_counts(usage: Usage) -> dict[str, int]:
    counts = {
        f"disk_{event}_{reason}": count
        for event, by_reason in usage.counters.items()
        for reason, count in by_reason.items()
    }
    counts |= {"disk_written_bytes": usage.written_bytes, "disk_read_bytes": usage.read_bytes}
    levels = {"disk_queue_bytes": usage.queue_bytes, "disk_leaving_bytes": usage.leaving_bytes}
    return counts | levels | {"disk_limit_bytes": usage.limit_bytes, "disk_allowed_bytes": usage.allowed_bytes}


def remote_counts(usage: Usage) -> dict[str, int]:
    counts = {
        f"remote_{event}_{reason}": count
        for event, by_reason in usage.counters.items()
        for reason, count in by_reason.items()
    }
    counts |= {"remote_written_bytes": usage.written_bytes, "remote_read_bytes": usage.read_bytes}
    return counts | {"remote_queue_bytes": usage.queue_bytes, "remote_is_paused": int(bool(usage.paused_because))}


def precision_of(span: Span) -> tuple[str, str]:
    """K and V as people read it: one name each, or several with a plus between."""
    pairs = [pair for layer in span.layers for pair in span.pairs(layer)]
    return _names(k.name for k, _ in pairs), _names(v.name for _, v in pairs)


@dataclass(frozen=True)
class PrecisionRun:
    """The tokens of a span up to a position, from where others end, and what they are stored as."""

    end: int
    k: str
    v: str


def stored_as(span: Span) -> tuple[PrecisionRun, ...]:
    """Spans that were joined have runs of their own precision, until they are rewritten. They are told by the parts of
    the first layer; in those that have other parts, what overlaps counts."""
    parts = () if span.is_live or not span.layers else span.sealed(span.layers[0])
    if len(parts) < 2:
        return (PrecisionRun(span.end, *precision_of(span)),)
    runs, start = list[PrecisionRun](), span.position
    for part in parts:
        end = min(span.end, part.k.position + part.num_tokens)
        if end > start:
            pairs = [(k, v) for layer in span.layers for k, v in _pairs_in(span.sealed(layer), start, end)]
            runs.append(PrecisionRun(end, _names(k for k, _ in pairs), _names(v for _, v in pairs)))
            start = end
    return tuple(runs)


def _pairs_in(parts: Iterable[SealedPart], start: int, end: int) -> Iterator[tuple[str, str]]:
    for part in parts:
        if part.k.position < end and part.k.position + part.num_tokens > start:
            yield part.k.name, part.v.name


def _names(names: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(names)) or "raw"


def recurrent_bytes(span: Span) -> int:
    states = (state for mark in span.marks.values() for state in mark.states)
    return sum(state.nbytes for state in states if isinstance(state, RecurrentState))


@dataclass
class UsageShare:
    """Of one entry, or of several together."""

    sizes: Counter[str] = field(default_factory=Counter)  # bytes, tokens, spans
    by_precision: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    k: Counter[str] = field(default_factory=Counter)  # bytes by precision, of keys alone
    v: Counter[str] = field(default_factory=Counter)

    def add(self, other: UsageShare) -> None:
        for mine, theirs in zip(self._counters(), other._counters(), strict=True):
            mine.update(theirs)

    def subtract(self, other: UsageShare) -> None:
        for mine, theirs in zip(self._counters(), other._counters(), strict=True):
            mine.subtract(theirs)

    def _counters(self) -> tuple[Counter[str], ...]:
        return self.sizes, self.by_precision, self.by_kind, self.k, self.v

    def as_usage(self) -> TierUsage:
        return TierUsage(
            nbytes=self.sizes["bytes"],
            tokens=self.sizes["tokens"],
            spans=self.sizes["spans"],
            by_precision=dict(+self.by_precision),
            by_kind=dict(+self.by_kind),
            k=dict(+self.k),
            v=dict(+self.v),
        )


class UsageTotals:
    def __init__(self, journal: DirtySets) -> None:
        self._changed = journal.new_dirty_set(self._forget)
        self._shares: dict[Entry, UsageShare] = {}
        self._by_salt: dict[str, UsageShare] = {}

    def usage(self, sees: Callable[[str], bool] = lambda _: True) -> TierUsage:
        """Of the salts that the caller sees."""
        for entry in self._changed.drain():
            self._count(entry)
        total = UsageShare()
        for salt, share in self._by_salt.items():
            if sees(salt):
                total.add(share)
        return total.as_usage()

    def _count(self, entry: Entry) -> None:
        self._forget(entry)
        share = share_of(entry)
        if any(share.sizes.values()):
            self._shares[entry] = share
            self._by_salt.setdefault(entry.salt, UsageShare()).add(share)

    def _forget(self, entry: Entry) -> None:
        before = self._shares.pop(entry, None)
        if before is None:
            return
        salted = self._by_salt[entry.salt]
        salted.subtract(before)
        if not any(salted.sizes.values()):
            del self._by_salt[entry.salt]


def share_of(entry: Entry) -> UsageShare:
    """Of a sequence that runs its marks alone: its buffers are counted with it."""
    share = UsageShare(Counter({"bytes": entry.nbytes}))
    for mark in entry.span.marks.values():
        for state in mark.states:
            if isinstance(state, SealedPart):
                _add_part(share, state, "window")
            elif isinstance(state, RecurrentState):
                share.by_kind["recurrent"] += state.nbytes
                share.by_precision["raw"] += state.nbytes
    if not entry.is_running:
        share.sizes["tokens"] = sum(node.num_tokens for node in entry.nodes)
        share.sizes["spans"] = 1
        for part in entry.span.sealed_parts():
            _add_part(share, part, "full")
        if buffer_bytes := live_bytes(entry.span):
            share.by_kind["full"] += buffer_bytes
            share.by_precision["raw"] += buffer_bytes
    return share


def _add_part(share: UsageShare, part: SealedPart, kind: str) -> None:
    for planes, side in ((part.k, share.k), (part.v, share.v)):
        name, nbytes = planes.name, planes.nbytes
        share.by_precision[name] += nbytes
        side[name] += nbytes
        share.by_kind[kind] += nbytes


class UsageReporter:
    def __init__(
        self,
        shelf: EntryTable,
        search: PrefixMatcher,
        cold: TierClient,
        shared: SharedTierClient | None,
        counters: Counter[str],
    ) -> None:
        self._totals = UsageTotals(shelf.dirty_sets)
        self._search = search
        self._cold = cold
        self._shared = shared
        self._counters = counters

    def usage(self, owner: str | None = None) -> TierUsage:
        """Of what is in memory under an owner's salts; None: under all."""
        return self._totals.usage(lambda salt: owner is None or owner_of(salt) == owner)

    def disk_usage(self, owner: str | None = None) -> TierUsage | None:
        """None: there is no disk."""
        if not self._cold.has_tier:
            return None
        usage = self._cold.tier.usage(self._search.roots_begin(None, owner))
        # Files that were cleared and are being deleted are told by `disk_counts`.
        return disk_usage(usage, usage.disk_bytes - usage.leaving_bytes if owner is None else usage.block_bytes)

    def shared_usage(self) -> SharedUsage | None:
        """None: there is no tier that others share."""
        return None if self._shared is None else self._shared.tier.shared_usage()

    def count(self) -> dict[str, int]:
        """What happened since the start."""
        counts = dict(self._counters)
        if self._cold.has_tier:
            counts["unreadable_blocks"] = self._cold.loader.num_unreadable
            counts |= disk_counts(self._cold.tier.usage())
        if self._shared is not None:
            counts |= remote_counts(self._shared.tier.usage())
        return counts
