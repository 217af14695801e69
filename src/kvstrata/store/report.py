"""What the store holds, and why a prompt is found only so far: answers for people and for dashboards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvstrata.spans.contents import KIND, PRECISION, by_label
from kvstrata.spans.marks import RecurrentState
from kvstrata.spans.span import Span
from kvstrata.store.entry import Entry
from kvstrata.tiers.usage import Usage

# complete  all that can be found was: the last prompt token is always computed
# new       what is stored ends there: the rest was never seen
# diverged  something else is stored there
# evicted   it was stored, and had to go
# mark      more is stored, but the model cannot be resumed there
# damaged   the next block was on the disk, and was not what it said
# salt      it is stored under another salt of the same caller
# empty     nothing is stored for this model and salt
# identity  nothing is; the disk has blocks of other models, settings or salts only
# foreign   the model brings caches that cannot be shared
Ending = Literal["complete", "new", "diverged", "evicted", "mark", "damaged", "salt", "empty", "identity", "foreign"]


@dataclass(frozen=True)
class Explanation:
    prompt_tokens: int
    cached_tokens: int
    by_tier: dict[str, int]
    ends_because: Ending
    at_token: int  # the first that is not cached
    instead: tuple[tuple[int, ...], ...] = ()  # how what is stored goes on from that position: a few ways
    num_instead: int = 0  # how many ways there are


@dataclass(frozen=True)
class TierUsage:
    nbytes: int = 0
    tokens: int = 0
    spans: int = 0
    by_precision: dict[str, int] = field(default_factory=dict)
    by_kind: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartUsage:
    """A run of tokens of a running sequence."""

    tokens: int
    k: str
    v: str
    nbytes: int
    shared_by: int


def usage_of(entries: Iterable[Entry]) -> TierUsage:
    """Of what is stored; the buffers of sequences that run are counted with them."""
    stored = [entry for entry in entries if not entry.is_running]
    by_precision: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for entry in entries:
        marks = _mark_bytes(entry.span)
        by_kind.update(marks)
        by_precision.update(_mark_precisions(entry.span))
        if not entry.is_running:
            by_precision.update(entry.span.bytes_by_precision())
            by_kind["full"] += entry.span.kv_bytes
    return TierUsage(
        nbytes=sum(entry.nbytes for entry in entries),
        tokens=sum(node.num_tokens for entry in stored for node in entry.nodes),
        spans=len(stored),
        by_precision=dict(+by_precision),
        by_kind=dict(+by_kind),
    )


def disk_usage(usage: Usage) -> TierUsage:
    """What stays there: files that were cleared and are being deleted are told by `disk_counts`."""
    by_precision, by_kind = (by_label(usage.labels, what) for what in (PRECISION, KIND))
    return TierUsage(usage.disk_bytes - usage.leaving_bytes, usage.num_tokens, usage.num_blocks, by_precision, by_kind)


def disk_counts(usage: Usage) -> dict[str, int]:
    counts = {
        f"disk_{event}_{reason}": count
        for event, by_reason in usage.counters.items()
        for reason, count in by_reason.items()
    }
    counts |= {"disk_written_bytes": usage.written_bytes, "disk_read_bytes": usage.read_bytes}
    levels = {"disk_queue_bytes": usage.queue_bytes, "disk_leaving_bytes": usage.leaving_bytes}
    return counts | levels | {"disk_limit_bytes": usage.limit_bytes}


def precision_of(span: Span) -> tuple[str, str]:
    """K and V as people read it: one name each, or several with a plus between."""
    pairs = [pair for layer in span.layers for pair in span.pairs(layer)]
    return _names(k.name for k, _ in pairs), _names(v.name for _, v in pairs)


def _names(names: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(names)) or "raw"


def _mark_bytes(span: Span) -> Counter[str]:
    by_kind: Counter[str] = Counter()
    for mark in span.marks.values():
        for state in mark.states:
            if state is not None:
                by_kind["recurrent" if isinstance(state, RecurrentState) else "window"] += state.nbytes
    return by_kind


def recurrent_bytes(span: Span) -> int:
    return _mark_bytes(span)["recurrent"]


def _mark_precisions(span: Span) -> Counter[str]:
    by_name: Counter[str] = Counter()
    for mark in span.marks.values():
        for state in mark.states:
            if isinstance(state, RecurrentState):
                by_name["raw"] += state.nbytes
            elif state is not None:
                by_name[state.k.name] += state.k.nbytes
                by_name[state.v.name] += state.v.nbytes
    return by_name
