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

What left memory because the disk had accepted it is counted when the disk gives it up before it is written, by
`Spills`. What the disk wrote and evicted later is counted there (`disk_evicted` by reason).

A span is new from when its request ends until room was made for it once. One that does not stay so long was not stored
at all: that is counted too, as refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal
from weakref import WeakSet

from kvstrata.store.cold.spills import UnwrittenReason
from kvstrata.store.entry import Entry
from kvstrata.store.shelf import Shelf

Reason = Literal["too_large", "no_room", "least_worth"] | UnwrittenReason


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

    def all_fit(self) -> None:
        """There is room for all that is left."""
        self._new.clear()

    def _reason(self, entry: Entry) -> Reason:
        if entry.nbytes > self._shelf.max_bytes:
            return "too_large"
        return "least_worth" if self._shelf.free_bytes > entry.nbytes else "no_room"
