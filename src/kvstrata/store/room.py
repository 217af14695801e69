"""Makes room in memory: who steps down, who goes to the disk, who goes.

Decides when; what steps down is `Pressure`'s choice, what goes is the shelf's, and what the disk takes is the disk's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstrata.index.tree import Node
from kvstrata.store.admission import Admission
from kvstrata.store.entry import Entry
from kvstrata.store.ladder import HIGH
from kvstrata.store.mover import Mover
from kvstrata.store.pressure import Pressure
from kvstrata.store.shelf import Shelf
from kvstrata.store.spills import Spills


class Room:
    """`pending_bytes` tells what the work that waits is about to free."""

    def __init__(
        self,
        shelf: Shelf,
        mover: Mover,
        pressure: Pressure,
        spills: Spills,
        admission: Admission,
        *,
        pending_bytes: Callable[[], int],
        hot_bytes: int,
    ) -> None:
        self._shelf = shelf
        self._mover = mover
        self._pressure = pressure
        self._spills = spills
        self._admission = admission
        self._pending_bytes = pending_bytes
        self._hot_bytes = hot_bytes
        self.limit_bytes = hot_bytes  # of all that is stored, beside what runs at present

    @property
    def left_bytes(self) -> int:
        """How much more may be held before anything has to go."""
        return self.limit_bytes - self._shelf.held_bytes

    def relieve(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need: let spans step down when so much is in use, stored and running, of what there is."""
        self.limit_bytes = min(self._hot_bytes, limit_bytes - (used_bytes - self._shelf.held_bytes))
        is_high = used_bytes > HIGH * limit_bytes
        self._pressure.relieve(used_bytes - (self._pending_bytes() if is_high else 0), limit_bytes)

    def is_making_room(self, limit_bytes: int) -> bool:
        """Let spans step down until no more than this is held. Tells whether that is still to be done, by `work`."""
        need_bytes = self._shelf.held_bytes - min(limit_bytes, self._hot_bytes)
        if need_bytes <= 0:
            return False
        self._pressure.make_room(need_bytes - self._pending_bytes())
        return self._pending_bytes() > 0

    def shrink_to(self, limit_bytes: int, slice_s: float) -> None:
        limit_bytes = min(limit_bytes, self._hot_bytes)
        self._spills.add_some(self._hot_bytes)
        if self._shelf.held_bytes > limit_bytes:
            self._pressure.make_room(self._shelf.held_bytes - limit_bytes - self._pending_bytes())
        # What waits to be trimmed or encoded gives more room than it takes from anybody.
        until_s = time.monotonic() + slice_s
        while self._shelf.held_bytes > limit_bytes and not self._mover.idle and time.monotonic() < until_s:
            self._mover.work(0)
        self._shelf.shrink_to(limit_bytes)
        self._admission.settled()

    def before_eviction(self, leaf: Node[Entry]) -> None:
        if not self._shelf.has_expired(leaf):
            self._spills.before_eviction(leaf)
        self._admission.evicted(leaf.payload, self._shelf.free_bytes)
