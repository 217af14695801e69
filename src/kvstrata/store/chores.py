"""What is to be done to stored spans between two steps of the engine, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.store.cold.cold import Cold
from kvstrata.store.cold.restore import Restorer
from kvstrata.store.cold.sharing import Sharing
from kvstrata.store.cold.spills import Spills
from kvstrata.store.errands import Errands
from kvstrata.store.precision.changes import Changes
from kvstrata.store.precision.mover import Mover


class Chores:
    """`colds`: all tiers. `sharing`: what goes to one that others share; None: there is none."""

    def __init__(
        self,
        colds: Sequence[Cold],
        restorer: Restorer,
        mover: Mover,
        spills: Spills,
        errands: Errands,
        sharing: Sharing | None,
        changes: Changes,
    ) -> None:
        self._colds = tuple(colds)
        self._sharing = sharing
        self._restorer = restorer
        self._mover = mover
        self._spills = spills
        self._errands = errands
        self._changes = changes
        self._is_errands_turn = True

    @property
    def has_work(self) -> bool:
        is_busy = self.is_asked_for or not self._mover.idle or not self._spills.idle
        return is_busy or (self._sharing is not None and self._sharing.has_work)

    @property
    def has_work_beside_streams(self) -> bool:
        """The same, less what is written to the disk ahead of need while the disk has enough to write."""
        others = self.is_asked_for or not self._mover.idle or (self._sharing is not None and self._sharing.has_work)
        return others or not (self._spills.idle or self._spills.can_wait)

    @property
    def is_asked_for(self) -> bool:
        """Whether a request or a client waits for some of it."""
        return self._arrived is not None or self._restorer.is_ready or not self._errands.idle

    @property
    def _arrived(self) -> Cold | None:
        """A tier from which something came."""
        return next((cold for cold in self._colds if cold.loads.has_arrived), None)

    @property
    def is_rewriting(self) -> bool:
        """Whether the next work replaces what readers may know."""
        return not self._mover.idle and not self._does_errand

    @property
    def _does_errand(self) -> bool:
        """Errands and rewriting take turns: neither may keep the other waiting for good."""
        return not self._errands.idle and (self._is_errands_turn or self._mover.idle)

    def work(self, slice_s: float) -> None:
        """Go on with what is to be done. First what a request waits for. At the end, changes of precision notice how
        far they have got."""
        self._work(slice_s)
        self._changes.look()

    def _work(self, slice_s: float) -> None:
        arrived = self._arrived
        if arrived is not None:
            arrived.loads.take_in(slice_s)
        elif self._restorer.is_ready:
            self._restorer.work()
        elif self._does_errand:
            self._is_errands_turn = False
            self._errands.work(slice_s)
        elif not self._mover.idle:
            self._is_errands_turn = True
            self._mover.work(slice_s)
        elif not self._spills.idle or self._sharing is None:
            self._spills.work(slice_s)
        else:
            self._sharing.work(slice_s)
