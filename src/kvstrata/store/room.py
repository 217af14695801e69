"""Makes room in memory: who steps down, who goes to the disk, who goes.

Decides when; what steps down is `Pressure`'s choice, what goes is the shelf's, and what the disk takes is the disk's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from kvstrata.index.tree import Node
from kvstrata.store.cold.spills import Handover, Spills
from kvstrata.store.entry import Entry
from kvstrata.store.losses import Losses
from kvstrata.store.precision.ladder import HIGH
from kvstrata.store.precision.mover import Mover
from kvstrata.store.precision.pressure import Pressure
from kvstrata.store.shelf import Shelf

# done         no more than the limit is held, or only what is in use, or what nothing can be done about
# steps_down   spans are about to step down: `work` does it
# awaits_disk  what is to go is on its way to the disk, which is working
Shrunk = Literal["done", "steps_down", "awaits_disk"]


class Room:
    """`pending_bytes` tells what the work that waits is about to free."""

    def __init__(
        self,
        shelf: Shelf,
        mover: Mover,
        pressure: Pressure,
        spills: Spills,
        losses: Losses,
        *,
        pending_bytes: Callable[[], int],
        disk_is_working: Callable[[], bool],
        hot_bytes: int,
    ) -> None:
        self._shelf = shelf
        self._mover = mover
        self._pressure = pressure
        self._spills = spills
        self._losses = losses
        self._pending_bytes = pending_bytes
        self._disk_is_working = disk_is_working
        self._hot_bytes = hot_bytes
        self.limit_bytes = hot_bytes  # of all that is stored, beside what runs at present
        self._is_waiting = False  # the leaf that was looked at last is on its way to the disk
        self._handed = Handover(0)  # of the leaf that goes just now

    @property
    def left_bytes(self) -> int:
        """How much more may be held before anything has to go."""
        return self.limit_bytes - self._shelf.held_bytes

    def relieve(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need: let spans step down when so much is in use, stored and running, of what there is."""
        self.limit_bytes = min(self._hot_bytes, limit_bytes - (used_bytes - self._shelf.held_bytes))
        is_high = used_bytes > HIGH * limit_bytes
        self._pressure.relieve(used_bytes - (self._pending_bytes() if is_high else 0), limit_bytes)

    def shrink_to(self, limit_bytes: int, slice_s: float, *, most_bytes: int | None) -> Shrunk:
        """See `Store.shrink_to`. First goes what the disk has too, as far as it is worth least; then spans step down;
        then leaves go as the disk takes them."""
        limit_bytes = min(limit_bytes, self._hot_bytes)
        until_s = time.monotonic() + slice_s
        self._spills.add_some(limit_bytes, self._hot_bytes)
        self._shelf.shrink_to(limit_bytes, lambda leaf: leaf.payload.is_clean)
        if self._shelf.held_bytes > limit_bytes:
            self._pressure.make_room(self._shelf.held_bytes - limit_bytes - self._pending_bytes())
        # What waits to be trimmed or encoded gives more room than it takes from anybody.
        while self._shelf.held_bytes > limit_bytes and not self._mover.idle and time.monotonic() < until_s:
            self._mover.work(0)
        shrunk = self._shrink_as_disk_takes(limit_bytes, until_s)
        if most_bytes is not None:
            # Rather what can be read again than what would be lost.
            self._shelf.shrink_to(most_bytes, spare_only=True)
            self._shelf.shrink_to(most_bytes)
        if shrunk == "done":
            self._losses.settled()
        return shrunk

    def _shrink_as_disk_takes(self, limit_bytes: int, until_s: float) -> Shrunk:
        if self._shelf.held_bytes > limit_bytes and self._pending_bytes() > 0:
            return "steps_down"
        self._is_waiting = False
        self._shelf.shrink_to(limit_bytes, lambda leaf: self._may_go(leaf, until_s))
        return "awaits_disk" if self._is_waiting else "done"

    def _may_go(self, leaf: Node[Entry], until_s: float) -> bool:
        """Unless the disk is about to take it."""
        self._is_waiting = self._spills.hand_over(leaf, until_s).waits and self._disk_is_working()
        return not self._is_waiting

    def before_eviction(self, leaf: Node[Entry]) -> None:
        """The last chance."""
        has_expired = self._shelf.has_expired(leaf)
        self._handed = Handover(leaf.start, "expired") if has_expired else self._spills.hand_over(leaf)

    def evicted(self, leaf: Node[Entry], start: int) -> None:
        """The tokens of a leaf from here on go."""
        lost_tokens = max(0, leaf.end - max(start, self._handed.end))
        self._losses.evicted(leaf.payload, lost_tokens, self._handed.reason, self._shelf.free_bytes)
