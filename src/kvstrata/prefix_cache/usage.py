"""Bytes, tokens and precision of what is cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvstrata.attention.segments import SealedSegment
from kvstrata.kv.checkpoints import RecurrentState
from kvstrata.kv.packing import bytes_by_kind, bytes_by_precision
from kvstrata.kv.span import Span
from kvstrata.prefix_cache.entries import DirtySets, Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.keys import owner_of
from kvstrata.prefix_cache.matching import PrefixMatcher
from kvstrata.prefix_cache.sharing import SharedTierClient
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.tiers.interface import SharedUsage, Usage


@dataclass(frozen=True)
class TierUsage:
    """The content of one tier, as a sum."""

    nbytes: int = 0
    tokens: int = 0
    spans: int = 0
    by_precision: dict[str, int] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)
    k: dict[str, int] = field(default_factory=dict)  # bytes of keys by precision; only the memory tier counts them
    v: dict[str, int] = field(default_factory=dict)  # bytes of values, likewise


@dataclass(frozen=True)
class PartUsage:
    """A run of tokens of a running sequence: its precision, its bytes and its readers."""

    tokens: int
    k: str
    v: str
    nbytes: int
    shared_by: int


def tier_usage(usage: Usage, nbytes: int) -> TierUsage:
    """Return what a tier reports of itself, with `nbytes` as its size."""
    labels = usage.labels
    return TierUsage(nbytes, usage.num_tokens, usage.num_blocks, bytes_by_precision(labels), bytes_by_kind(labels))


def disk_counts(usage: Usage) -> dict[str, int]:
    """Return the counters of the disk tier."""
    return _event_counts("disk", usage) | {
        "disk_written_bytes": usage.written_bytes,
        "disk_read_bytes": usage.read_bytes,
        "disk_queue_bytes": usage.queue_bytes,
        "disk_leaving_bytes": usage.leaving_bytes,
        "disk_limit_bytes": usage.limit_bytes,
        "disk_allowed_bytes": usage.allowed_bytes,
    }


def remote_counts(usage: Usage) -> dict[str, int]:
    """Return the counters of the shared tier."""
    return _event_counts("remote", usage) | {
        "remote_written_bytes": usage.written_bytes,
        "remote_read_bytes": usage.read_bytes,
        "remote_queue_bytes": usage.queue_bytes,
        "remote_is_paused": int(bool(usage.paused_because)),
    }


def _event_counts(tier: str, usage: Usage) -> dict[str, int]:
    return {
        f"{tier}_{event}_{reason}": count
        for event, by_reason in usage.counters.items()
        for reason, count in by_reason.items()
    }


def precision_of(span: Span) -> tuple[str, str]:
    """Return the precision of keys and of values for display: one name each, or several joined by a plus."""
    pairs = [pair for layer in span.layers for pair in span.codec_pairs(layer)]
    return _names(k.name for k, _ in pairs), _names(v.name for _, v in pairs)


@dataclass(frozen=True)
class PrecisionRun:
    """Consecutive tokens of a span in one precision. A run begins where the run before it ends."""

    end: int  # position
    k: str
    v: str


def precision_runs(span: Span) -> tuple[PrecisionRun, ...]:
    """Return the runs of a span by precision. Joined spans have several until they are transcoded.

    The segments of the first layer bound the runs; each run names the precisions of all layers' segments in it.
    """
    segments = () if span.is_live or not span.layers else span.sealed(span.layers[0])
    if len(segments) < 2:
        return (PrecisionRun(span.end, *precision_of(span)),)
    runs, start = list[PrecisionRun](), span.position
    for segment in segments:
        end = min(span.end, segment.k.position + segment.num_tokens)
        if end > start:
            pairs = [(k, v) for layer in span.layers for k, v in _precisions_between(span.sealed(layer), start, end)]
            runs.append(PrecisionRun(end, _names(k for k, _ in pairs), _names(v for _, v in pairs)))
            start = end
    return tuple(runs)


def _precisions_between(segments: Iterable[SealedSegment], start: int, end: int) -> Iterator[tuple[str, str]]:
    for segment in segments:
        if segment.k.position < end and segment.k.position + segment.num_tokens > start:
            yield segment.k.name, segment.v.name


def _names(names: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(names)) or "raw"


def recurrent_bytes(span: Span) -> int:
    """Return the bytes of the recurrent states in a span's checkpoints."""
    states = (state for checkpoint in span.checkpoints.values() for state in checkpoint.states)
    return sum(state.nbytes for state in states if isinstance(state, RecurrentState))


@dataclass
class UsageShare:
    """Mutable sums over one entry or several."""

    sizes: Counter[str] = field(default_factory=Counter)  # bytes, tokens, spans
    by_precision: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    k: Counter[str] = field(default_factory=Counter)  # bytes by precision, of keys alone
    v: Counter[str] = field(default_factory=Counter)

    def add(self, other: UsageShare) -> None:
        for own, added in zip(self._counters(), other._counters(), strict=True):
            own.update(added)

    def subtract(self, other: UsageShare) -> None:
        for own, removed in zip(self._counters(), other._counters(), strict=True):
            own.subtract(removed)

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
    """Running sums over all entries by salt. A question costs what changed since the last one, not the entry count."""

    def __init__(self, dirty_sets: DirtySets) -> None:
        self._dirty = dirty_sets.new_dirty_set(self._remove_entry)
        self._shares: dict[Entry, UsageShare] = {}
        self._by_salt: dict[str, UsageShare] = {}

    def total_usage(self, is_counted: Callable[[str], bool] = lambda _: True) -> TierUsage:
        """Return the sum over the salts for which `is_counted` is true."""
        for entry in self._dirty.drain():
            self._count_entry(entry)
        total = UsageShare()
        for salt, share in self._by_salt.items():
            if is_counted(salt):
                total.add(share)
        return total.as_usage()

    def _count_entry(self, entry: Entry) -> None:
        self._remove_entry(entry)
        share = share_of(entry)
        if any(share.sizes.values()):
            self._shares[entry] = share
            self._by_salt.setdefault(entry.salt, UsageShare()).add(share)

    def _remove_entry(self, entry: Entry) -> None:
        share = self._shares.pop(entry, None)
        if share is None:
            return
        salted = self._by_salt[entry.salt]
        salted.subtract(share)
        if not any(salted.sizes.values()):
            del self._by_salt[entry.salt]


def share_of(entry: Entry) -> UsageShare:
    """Return the sums of one entry.

    The entry of a running sequence counts with its checkpoints alone, because the sequence counts its own KV buffer.
    """
    share = UsageShare(Counter({"bytes": entry.nbytes}))
    for checkpoint in entry.span.checkpoints.values():
        for state in checkpoint.states:
            if isinstance(state, SealedSegment):
                _add_segment(share, state, "window")
            elif isinstance(state, RecurrentState):
                share.by_kind["recurrent"] += state.nbytes
                share.by_precision["raw"] += state.nbytes
    if not entry.is_running:
        share.sizes["tokens"] = sum(node.num_tokens for node in entry.nodes)
        share.sizes["spans"] = 1
        for segment in entry.span.sealed_segments():
            _add_segment(share, segment, "full")
        if buffer_bytes := entry.span.live_bytes:
            share.by_kind["full"] += buffer_bytes
            share.by_precision["raw"] += buffer_bytes
    return share


def _add_segment(share: UsageShare, segment: SealedSegment, layer_kind: str) -> None:
    for planes, side in ((segment.k, share.k), (segment.v, share.v)):
        name, nbytes = planes.name, planes.nbytes
        share.by_precision[name] += nbytes
        side[name] += nbytes
        share.by_kind[layer_kind] += nbytes


class UsageReporter:
    """Usage of memory and of the tiers, and the event counters."""

    def __init__(
        self,
        table: EntryTable,
        matcher: PrefixMatcher,
        disk: TierClient,
        shared: SharedTierClient | None,
        counters: Counter[str],
    ) -> None:
        self._totals = UsageTotals(table.dirty_sets)
        self._matcher = matcher
        self._disk = disk
        self._shared = shared
        self._counters = counters

    def usage(self, owner: str | None = None) -> TierUsage:
        """Return what memory holds under an owner's salts; None: under all."""
        return self._totals.total_usage(lambda salt: owner is None or owner_of(salt) == owner)

    def disk_usage(self, owner: str | None = None) -> TierUsage | None:
        """Return what the disk holds, likewise. None: there is no disk."""
        if not self._disk.has_tier:
            return None
        usage = self._disk.tier.usage(self._matcher.roots_begin(None, owner))
        # Cleared files that still wait to be deleted are in `disk_counts`.
        return tier_usage(usage, usage.disk_bytes - usage.leaving_bytes if owner is None else usage.block_bytes)

    def shared_usage(self) -> SharedUsage | None:
        """Return what the shared tier reports. None: there is none."""
        return None if self._shared is None else self._shared.tier.shared_usage()

    def counters(self) -> dict[str, int]:
        """Return the counters of events since the start."""
        counts = dict(self._counters)
        if self._disk.has_tier:
            counts["unreadable_blocks"] = self._disk.loader.num_unreadable
            counts |= disk_counts(self._disk.tier.usage())
        if self._shared is not None:
            counts |= remote_counts(self._shared.tier.usage())
        return counts
