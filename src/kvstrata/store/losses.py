"""What went from memory and is nowhere else: its tokens, counted by reason, so that nothing is lost without a word.

too_large     it alone is larger than all that may be stored
no_room       all else is leased, pinned or running, or had to go too
least_worth   others could have gone, and are worth more
disk_slow     the disk would have taken it, but not in time
disk_failed   the disk could not be written
disk_full     the disk has no room for it
first_touch   only what was asked for twice is written
write_budget  no more is written today
expired       no request asked for it in time
superseded    its conversation has gone on elsewhere: it is not written

What left memory because the disk had accepted it is counted when the disk gives it up before it is written. What the
disk wrote and evicted later is counted there (`disk_evicted` by reason).

A span is new from when its request ends until room was made for it once. One that does not stay so long was not stored
at all: that is counted too, as refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal
from weakref import WeakSet

from kvstrata.store.entry import Entry
from kvstrata.store.shelf import Shelf
from kvstrata.tier.base import Refusal, Refused, Writing
from kvstrata.tier.removals import RemovalCause

DiskReason = Literal["disk_slow", "disk_failed", "disk_full", "first_touch", "write_budget"]
Reason = Literal["too_large", "no_room", "least_worth", "expired", "superseded"] | DiskReason

# Blocks that the disk had accepted and did not write.
GIVEN_UP: Mapping[RemovalCause, DiskReason] = {
    RemovalCause.NO_ROOM: "disk_full",
    RemovalCause.VOLUME_FULL: "disk_full",
    RemovalCause.WRITE_BUDGET: "write_budget",
    RemovalCause.UNWRITABLE: "disk_failed",
    RemovalCause.FAILED: "disk_failed",
}


class Losses:
    def __init__(self, shelf: Shelf, counters: Counter[str]) -> None:
        self._shelf = shelf
        self._counters = counters
        self._new: WeakSet[Entry] = WeakSet()

    def stored(self, entry: Entry) -> None:
        self._new.add(entry)

    def evicted(self, entry: Entry, lost_tokens: int, reason: Reason | None, *, num_tokens: int) -> None:
        """So many of its tokens are about to go, and `lost_tokens` of these are not on the disk. `reason`: why not;
        None: there is no disk that could have them."""
        self._counters["evicted_tokens"] += num_tokens
        is_new = entry in self._new
        self._new.discard(entry)
        if not lost_tokens:
            return
        reason = reason or self._reason(entry)
        self._counters[f"dropped_tokens_{reason}"] += lost_tokens
        if is_new:
            self._counters[f"refused_{reason}"] += 1

    def given_up(self, num_tokens: int, cause: RemovalCause) -> None:
        """Count tokens that left memory while the disk was about to write them, and that it gave up."""
        self._counters[f"dropped_tokens_{GIVEN_UP[cause]}"] += num_tokens

    def all_fit(self) -> None:
        """There is room for all that is left."""
        self._new.clear()

    def _reason(self, entry: Entry) -> Reason:
        if entry.nbytes > self._shelf.max_bytes:
            return "too_large"
        return "least_worth" if self._shelf.free_bytes > entry.nbytes else "no_room"


def disk_reason(refused: Refused | None, writing: Writing) -> DiskReason:
    """Why the disk did not take a block. None: one that it hangs on was given up, for want of room or a fault."""
    match refused:
        case None:
            return "disk_failed" if writing.paused_because and not writing.is_full else "disk_full"
        case Refused(Refusal.QUEUE_FULL):
            return "disk_slow"
        case Refused(Refusal.FIRST_TOUCH):
            return "first_touch"
        case Refused(Refusal.WRITE_BUDGET):
            return "write_budget"
        case Refused(Refusal.TOO_LARGE):
            return "disk_full"
        case _:
            return "disk_full" if writing.is_full else "disk_failed"
