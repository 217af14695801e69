"""Makes room in memory: who steps down, who goes to the disk, who goes.

Decides when; what steps down is `Pressure`'s choice, what goes is the evictor's, and what the disk takes is the disk's.
"""

from __future__ import annotations

import math
import time
from typing import Literal

from kvstrata.index.tree import Node
from kvstrata.store.cold.spills import Spills
from kvstrata.store.entry import Entry
from kvstrata.store.evictor import Evictor
from kvstrata.store.losses import Losses
from kvstrata.store.precision.ladder import HIGH
from kvstrata.store.precision.pressure import Pressure
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.shelf import Shelf

# done         no more than the limit is held, or only what is in use, or what nothing can be done about
# steps_down   spans are about to step down: the chores do it
# awaits_disk  what is to go is on its way to the disk, which is working
Shrunk = Literal["done", "steps_down", "awaits_disk"]
# Of the memory for stored spans, while they step down or go to the disk between steps: a conversation that ends is
# stored at once, and no request should wait until there is room for it.
MOST_OVER = 1.5


class Room:
    def __init__(
        self, shelf: Shelf, evictor: Evictor, rewriting: Rewriting, pressure: Pressure, spills: Spills, losses: Losses
    ) -> None:
        self._shelf = shelf
        self._evictor = evictor
        self._rewriting = rewriting
        self._pressure = pressure
        self._spills = spills
        self._losses = losses
        self.limit_bytes = shelf.max_bytes  # of all that is stored, beside what runs at present
        self._is_waiting = False  # the leaf that was looked at last is on its way to the disk

    @property
    def left_bytes(self) -> int:
        """How much more may be held before anything has to go."""
        return self.limit_bytes - self._shelf.held_bytes

    def relieve(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need: let spans step down when so much is in use, stored and running, of what there is."""
        self.limit_bytes = min(self._shelf.max_bytes, limit_bytes - (used_bytes - self._shelf.held_bytes))
        is_high = used_bytes > HIGH * limit_bytes
        pending_bytes = self._rewriting.pending_bytes() if is_high else 0
        self._rewriting.step_down(self._pressure.choose_early(used_bytes - pending_bytes, limit_bytes))

    def step_down(self, need_bytes: int) -> None:
        """Let spans step down until so much would be free, as far as the floors allow. The chores do it."""
        self._rewriting.step_down(self._pressure.choose(need_bytes))

    def fits(self, limit_bytes: int) -> bool:
        """Whether no more than this is held already."""
        return self._shelf.held_bytes <= min(limit_bytes, self._shelf.max_bytes)

    def nearly_fits(self, limit_bytes: int) -> bool:
        """Whether no more is held than may be for a moment. `limit_bytes` is memory that there is: no more than that
        ever is."""
        return self._shelf.held_bytes <= self._most_for_now(limit_bytes)

    def _most_for_now(self, limit_bytes: int) -> float:
        return min(limit_bytes, MOST_OVER * self._shelf.max_bytes)

    def shrink_to(self, limit_bytes: int, slice_s: float = math.inf, *, most_bytes: int | None = None) -> Shrunk:
        """Let spans step down and evict until no more than this is held, or only what is in use. First goes what
        conversations have left behind, then what the disk has too, as far as it is worth least; then spans step down;
        then leaves go as the disk takes them.

        What a working disk is about to take stays until then, but no more than `most_bytes` are held in any case.
        `slice_s`: about how long it may work here. It stops as soon as what is held nearly fits; the chores do the
        rest. No more arrays are held afterwards than the machine allows, either: no job that changes spans lets go of
        any."""
        enough_bytes = self._most_for_now(limit_bytes)
        limit_bytes = min(limit_bytes, self._shelf.max_bytes)
        until_s = time.monotonic() + slice_s
        self._spills.add_some(limit_bytes, self._shelf.max_bytes)
        self._evictor.shrink_to(
            limit_bytes, lambda leaf: self._spills.holds(leaf.payload) or self._spills.leaves_out(leaf)
        )
        if self._shelf.held_bytes > limit_bytes:
            self.step_down(self._shelf.held_bytes - limit_bytes - self._rewriting.pending_bytes())
        # What waits to be trimmed or encoded gives more room than it takes.
        mover = self._rewriting.mover
        while self._shelf.held_bytes > enough_bytes and not mover.idle and time.monotonic() < until_s:
            mover.work(0)
        shrunk = self._shrink_as_disk_takes(limit_bytes, enough_bytes, until_s)
        if most_bytes is not None:
            # Rather what can be read again than what would be lost.
            self._evictor.shrink_to(most_bytes, spare_only=True)
            self._evictor.shrink_to(most_bytes, until_s=until_s)
        self._evictor.keep_arrays_few(until_s)
        if shrunk == "done":
            self._losses.all_fit()
        return shrunk

    def _shrink_as_disk_takes(self, limit_bytes: int, enough_bytes: float, until_s: float) -> Shrunk:
        if self._shelf.held_bytes > limit_bytes and self._rewriting.pending_bytes() > 0:
            return "steps_down"
        self._is_waiting = False
        self._evictor.shrink_to(limit_bytes, lambda leaf: self._may_go(leaf, enough_bytes, until_s), until_s=until_s)
        return "awaits_disk" if self._is_waiting else "done"

    def _may_go(self, leaf: Node[Entry], enough_bytes: float, until_s: float) -> bool:
        """Unless the disk is about to take it."""
        is_urgent = self._shelf.held_bytes > enough_bytes
        self._is_waiting = self._evictor.write_first(leaf, until_s if is_urgent else 0.0).waits
        return not self._is_waiting
