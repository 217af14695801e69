"""What the disk did not take, so that an entry is not packed again only to be refused again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvstrata.store.entry import Entry
from kvstrata.tier.base import Refusal, Refused, Tier


@dataclass(frozen=True)
class Untaken:
    """An entry that the disk did not take, and will not as long as neither of them changes."""

    end: int
    kv_bytes: int
    used_s: float
    refused: Refused | None  # None: work on it failed, or a block before it was given up
    disk_end: int = field(default=0, compare=False)  # the disk has the tokens up to here


class Refusals:
    """`used_s` tells when a request last went on from an entry."""

    def __init__(self, tier: Tier, used_s: Callable[[Entry], float]) -> None:
        self._tier = tier
        self._used_s = used_s
        self._untaken: WeakKeyDictionary[Entry, Untaken] = WeakKeyDictionary()
        # Those that the disk may take later, in order.
        self._blocked: dict[Refusal, WeakKeyDictionary[Entry, Refused]] = {
            reason: WeakKeyDictionary() for reason in (Refusal.QUEUE_FULL, Refusal.PAUSED, Refusal.WRITE_BUDGET)
        }

    def of(self, entry: Entry) -> Untaken | None:
        """None: it was not refused."""
        return self._untaken.get(entry)

    def add(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> None:
        self._untaken[entry] = self._as_it_is(entry, refused, disk_end)
        if refused is not None and refused.reason in self._blocked:
            self._blocked[refused.reason][entry] = refused

    def would_recur(self, entry: Entry) -> bool:
        """Whether the disk would refuse it again: neither it nor the disk has changed."""
        before = self._untaken.get(entry)
        if before is None or before != self._as_it_is(entry, before.refused):
            return False
        return before.refused is None or not self._tier.writing().would_take(before.refused)

    def next_takeable(self) -> Entry | None:
        """The first that the disk would take now. The first of each reason stands for the others."""
        firsts = [first for blocked in self._blocked.values() for first in [next(iter(blocked.items()), None)] if first]
        if not firsts:
            return None
        writing = self._tier.writing()
        return next((entry for entry, refused in firsts if writing.would_take(refused)), None)

    def unblock(self, entry: Entry) -> None:
        """It is offered again."""
        for blocked in self._blocked.values():
            blocked.pop(entry, None)

    def forget(self) -> None:
        """After a fault: the disk may say something else now. Entries that wait for it go on waiting."""
        self._untaken.clear()

    def clear(self) -> None:
        self.forget()
        for blocked in self._blocked.values():
            blocked.clear()

    def _as_it_is(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> Untaken:
        return Untaken(entry.span.end, entry.span.kv_bytes, self._used_s(entry), refused, disk_end)
