"""A change of precision of what is cached: what is asked for, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from kvstrata.spans.estimate import Estimate, estimate, score_error
from kvstrata.spans.plan import Plan
from kvstrata.store.entry import Entry
from kvstrata.store.precision import PrecisionOptions
from kvstrata.store.report import recurrent_bytes

# Spans that the expected error is measured on.
MAX_SAMPLED = 3

Scope = Literal["all", "live", "stored", "disk"]


@dataclass(frozen=True)
class Change:
    """What to do. Names as in codecs/registry.py; None leaves K or V as it is."""

    k: str | None = None
    v: str | None = None
    scope: Scope = "all"
    salt: str | None = None  # only what is under this salt
    sequence: str | None = None  # only what this running request holds
    dry_run: bool = False
    force: bool = False  # decode what is lower, though that brings no precision back

    @property
    def is_general(self) -> bool:
        """It is about all that will come, too."""
        return self.scope in ("all", "stored") and self.salt is None and self.sequence is None


@dataclass(frozen=True)
class LeftAlone:
    reason: str
    spans: int
    nbytes: int


@dataclass(frozen=True)
class Changed:
    k: str  # the target from now on
    v: str
    dry_run: bool
    spans: int
    bytes_before: int
    bytes_after: int  # expected, while the work is not done
    left_alone: tuple[LeftAlone, ...]
    expected_error: float  # of scores, relative, measured on a sample; 0 where nothing changes
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Of the last change that was asked for."""

    spans_total: int = 0
    spans_done: int = 0
    bytes_freed: int = 0
    is_running: bool = False


class Requantizing:
    """A change at work: which entries it is about, and how far it has got."""

    def __init__(self, entries: Collection[Entry], before: Plan) -> None:
        self._entries = {entry: entry.span.kv_bytes for entry in entries}
        self.before = before  # the target that it replaced

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def progress(self, is_pending: Callable[[Entry], bool]) -> Progress:
        pending = [entry for entry in self._entries if is_pending(entry)]
        freed = sum(was - entry.span.kv_bytes for entry, was in self._entries.items())
        return Progress(len(self._entries), len(self._entries) - len(pending), freed, bool(pending))


def in_scope(entry: Entry, change: Change, sequence_entries: Collection[Entry] | None) -> bool:
    is_used = entry.is_running or entry.num_leases > 0
    by_scope = {"all": True, "live": is_used, "stored": not is_used, "disk": False}[change.scope]
    by_salt = change.salt is None or entry.salt == change.salt
    return by_scope and by_salt and (sequence_entries is None or entry in sequence_entries)


def assess(entries: Collection[Entry], plan: Plan, change: Change, options: PrecisionOptions) -> Changed:
    """What a change of these entries comes to. Changes nothing."""
    began_s = time.perf_counter()
    raw = {"first_raw": options.first_raw, "recent_raw": options.recent_raw}
    estimates = {entry: estimate(entry.span, plan, upward=change.force, **raw) for entry in entries}
    concerned = [entry for entry, found in estimates.items() if found.changes]
    return Changed(
        k=plan.k,
        v=plan.v,
        dry_run=change.dry_run,
        spans=len(concerned),
        bytes_before=sum(found.bytes_before for found in estimates.values()),
        bytes_after=sum(found.bytes_after for found in estimates.values()),
        left_alone=_left_alone(estimates),
        expected_error=_expected_error(concerned, plan, change.force),
        seconds=time.perf_counter() - began_s,
    )


def _left_alone(estimates: Mapping[Entry, Estimate]) -> tuple[LeftAlone, ...]:
    spans: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for entry, found in estimates.items():
        reasons = Counter(found.left_alone)
        reasons["recurrent state is never quantized"] += recurrent_bytes(entry.span)
        for reason, count in (+reasons).items():
            spans[reason] += 1
            nbytes[reason] += count
    return tuple(LeftAlone(reason, spans[reason], nbytes[reason]) for reason in spans)


def _expected_error(entries: Collection[Entry], plan: Plan, upward: bool) -> float:
    """Of the largest ones."""
    largest = sorted(entries, key=lambda entry: entry.span.kv_bytes)[-MAX_SAMPLED:]
    errors = [score_error(entry.span, plan, upward=upward) for entry in largest if entry.span.num_tokens]
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known else 0.0
