"""What is stored, summed up by precision and by kind of layer, for each salt. Asking costs what has changed since."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.attention.parts import SealedPart
from kvstrata.spans.live import live_bytes
from kvstrata.spans.marks import RecurrentState
from kvstrata.store.entry import Entry
from kvstrata.store.journal import Journal
from kvstrata.store.report import TierUsage


@dataclass
class Share:
    """Of one entry, or of several together."""

    sizes: Counter[str] = field(default_factory=Counter)  # bytes, tokens, spans
    by_precision: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    k: Counter[str] = field(default_factory=Counter)  # bytes by precision, of keys alone
    v: Counter[str] = field(default_factory=Counter)

    def add(self, other: Share) -> None:
        for mine, theirs in zip(self._counters(), other._counters(), strict=True):
            mine.update(theirs)

    def subtract(self, other: Share) -> None:
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


class Totals:
    def __init__(self, journal: Journal) -> None:
        self._changed = journal.reader(self._forget)
        self._shares: dict[Entry, Share] = {}
        self._by_salt: dict[str, Share] = {}

    def usage(self, sees: Callable[[str], bool] = lambda _: True) -> TierUsage:
        """Of the salts that the caller sees."""
        for entry in self._changed.take():
            self._count(entry)
        total = Share()
        for salt, share in self._by_salt.items():
            if sees(salt):
                total.add(share)
        return total.as_usage()

    def _count(self, entry: Entry) -> None:
        self._forget(entry)
        share = share_of(entry)
        if any(share.sizes.values()):
            self._shares[entry] = share
            self._by_salt.setdefault(entry.salt, Share()).add(share)

    def _forget(self, entry: Entry) -> None:
        before = self._shares.pop(entry, None)
        if before is None:
            return
        salted = self._by_salt[entry.salt]
        salted.subtract(before)
        if not any(salted.sizes.values()):
            del self._by_salt[entry.salt]


def share_of(entry: Entry) -> Share:
    """Of a sequence that runs its marks alone: its buffers are counted with it."""
    share = Share(Counter({"bytes": entry.nbytes}))
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


def _add_part(share: Share, part: SealedPart, kind: str) -> None:
    for planes, side in ((part.k, share.k), (part.v, share.v)):
        name, nbytes = planes.name, planes.nbytes
        share.by_precision[name] += nbytes
        side[name] += nbytes
        share.by_kind[kind] += nbytes
