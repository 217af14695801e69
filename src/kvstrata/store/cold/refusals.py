"""What the disk did not take, so that an entry is not packed again only to be refused again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from kvstrata.store.entry import Entry
from kvstrata.tier.base import Refusal, Refused, Tier
from kvstrata.tier.removals import BlockRemoval, RemovalCause

# What was removed for these would be again, as long as the entry has not grown.
FOR_ROOM = frozenset({RemovalCause.EVICTED, RemovalCause.NO_ROOM, RemovalCause.UNWRITABLE})


@dataclass(frozen=True)
class Untaken:
    """An entry that the disk did not take, and will not as long as neither of them changes."""

    end: int
    kv_bytes: int
    used_s: float
    refused: Refused | None  # None: work on it failed, or a block before it was given up
    disk_end: int = field(default=0, compare=False)  # the disk has the tokens up to here
    cause: RemovalCause | None = field(default=None, compare=False)  # for which it left the disk; None: it was refused


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

    def remove_block(self, entry: Entry, removal: BlockRemoval) -> None:
        """The disk has no longer what it had taken of an entry from the start of a block on."""
        before = self._untaken.get(entry)
        disk_end = removal.start if before is None else min(before.disk_end, removal.start)
        if removal.cause in FOR_ROOM:
            self._untaken[entry] = replace(self._as_it_is(entry, None, disk_end), cause=removal.cause)
        elif before is not None:
            self._untaken[entry] = replace(before, disk_end=disk_end)

    def remove(self, entry: Entry) -> None:
        """The disk has taken all of it."""
        self._untaken.pop(entry, None)

    def gave_way(self, entry: Entry) -> bool:
        """Whether the disk evicted some of an entry for others. It is written again when memory evicts it, and not
        ahead of that: then others would give way, in turns and without end."""
        before = self._untaken.get(entry)
        return before is not None and before.cause is RemovalCause.EVICTED and entry.span.end <= before.end

    def would_recur(self, entry: Entry) -> bool:
        """Whether the disk would refuse it again: neither it nor the disk has changed."""
        before = self._untaken.get(entry)
        if before is not None and before.cause is not None:
            return before.cause is not RemovalCause.EVICTED and entry.span.end <= before.end
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

    def forget_faults(self) -> list[Entry]:
        """After a fault: the disk may say something else now. Returns the entries concerned; those that wait for it go
        on waiting."""
        entries = [entry for entry, untaken in self._untaken.items() if untaken.cause is None]
        for entry in entries:
            del self._untaken[entry]
        return entries

    def clear(self) -> None:
        self._untaken.clear()
        for blocked in self._blocked.values():
            blocked.clear()

    def _as_it_is(self, entry: Entry, refused: Refused | None, disk_end: int = 0) -> Untaken:
        return Untaken(entry.span.end, entry.span.kv_bytes, self._used_s(entry), refused, disk_end)
