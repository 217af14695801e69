"""Bytes, tokens and precision of what is cached, as values for people and for dashboards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvstrata.attention.parts import SealedPart
from kvstrata.spans.contents import KIND, PRECISION, by_label
from kvstrata.spans.marks import RecurrentState
from kvstrata.spans.span import Span
from kvstrata.tier.base import Usage


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
class Stored:
    """The tokens of a span up to a position, from where others end, and what they are stored as."""

    end: int
    k: str
    v: str


def stored_as(span: Span) -> tuple[Stored, ...]:
    """Spans that were joined have runs of their own precision, until they are rewritten. They are told by the parts of
    the first layer; in those that have other parts, what overlaps counts."""
    parts = () if span.is_live or not span.layers else span.sealed(span.layers[0])
    if len(parts) < 2:
        return (Stored(span.end, *precision_of(span)),)
    runs, start = list[Stored](), span.position
    for part in parts:
        end = min(span.end, part.k.position + part.num_tokens)
        if end > start:
            pairs = [(k, v) for layer in span.layers for k, v in _pairs_in(span.sealed(layer), start, end)]
            runs.append(Stored(end, _names(k for k, _ in pairs), _names(v for _, v in pairs)))
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
