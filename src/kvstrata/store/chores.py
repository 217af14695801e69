"""What is to be done to stored spans between two steps of the engine, and in which order."""

from __future__ import annotations

from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.restore import Restorer
from kvstrata.store.cold.spills import Spills
from kvstrata.store.precision.mover import Mover


class Chores:
    def __init__(self, cold: Cold, restorer: Restorer, mover: Mover, spills: Spills) -> None:
        self._cold = cold
        self._restorer = restorer
        self._mover = mover
        self._spills = spills

    @property
    def has_work(self) -> bool:
        return self._has_arrivals or self._restorer.is_ready or not self._mover.idle or not self._spills.idle

    @property
    def _has_arrivals(self) -> bool:
        return self._cold.loads.has_arrived

    @property
    def is_rewriting(self) -> bool:
        """Whether the next work replaces what readers may know."""
        return not self._mover.idle

    def work(self, slice_s: float) -> None:
        """Go on with what is to be done. First what a request waits for."""
        if self._has_arrivals:
            self._cold.loads.take_in(slice_s)
        elif self._restorer.is_ready:
            self._restorer.work()
        elif not self._mover.idle:
            self._mover.work(slice_s)
        else:
            self._spills.work(slice_s)
