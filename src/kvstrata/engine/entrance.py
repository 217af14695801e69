"""Who of those that the plan lets in may begin now, and who waits until memory has room for them.

Streams go on while others wait: spans step down bit by bit, and what has to go is written to the disk. What those that
wait would go on from is held for them meanwhile. No request waits longer for the disk than its patience, and
none waits for a disk that does not work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from kvstrata.engine.sequence import Sequence
from kvstrata.store.entry import Entry, Lease
from kvstrata.store.failures import Failures
from kvstrata.store.leases import Leases
from kvstrata.store.room import Room


class Entrance:
    """`patience_s`: how long a request may wait for the disk."""

    def __init__(
        self,
        room: Room,
        leases: Leases,
        failures: Failures,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._leases = leases
        self._failures = failures
        self._patience_s = patience_s
        self._clock = clock
        self._held: Lease | None = None

    def let_in(self, requests: list[Sequence], own_bytes: Iterable[int], limit_bytes: int, *, slice_s: float) -> int:
        """How many of these, in their order, may begin now. `own_bytes`: what each of them takes; `limit_bytes`: what
        those that run leave. `slice_s`: of work that may be done here and now. None where that fails: they begin when
        the engine has an empty cache."""
        sizes = tuple(own_bytes)
        return self._failures.require("reclaims", lambda: self._let_in(requests, sizes, limit_bytes, slice_s), 0)

    def _let_in(self, requests: list[Sequence], sizes: tuple[int, ...], limit_bytes: int, slice_s: float) -> int:
        if not self._room.fits(limit_bytes - sum(sizes)):
            # Something has to go: not what these would go on from.
            found = [request.stored.found for request in requests]
            self._hold([entry for each in found if each is not None for entry in each.entries])
        for number, (request, nbytes) in enumerate(zip(requests, sizes, strict=True)):
            limit_bytes -= nbytes
            if self._has_to_wait(request, limit_bytes, slice_s):
                return number
        self.let_go()
        return len(requests)

    def _has_to_wait(self, request: Sequence, limit_bytes: int, slice_s: float) -> bool:
        shrunk = "done" if self._room.nearly_fits(limit_bytes) else self._room.shrink_to(limit_bytes, slice_s)
        is_let_in = shrunk == "done" or self._room.nearly_fits(limit_bytes)
        if is_let_in or shrunk == "steps_down":
            request.stored.awaits_room_s = None
            return not is_let_in
        if request.stored.awaits_room_s is None:
            request.stored.awaits_room_s = self._clock()
        return self.seconds_left(request) > 0

    def seconds_left(self, request: Sequence) -> float:
        """For which it still waits for the disk to take what has to go; infinite where it does not."""
        if request.stored.awaits_room_s is None:
            return math.inf
        return request.stored.awaits_room_s + self._patience_s - self._clock()

    def let_go(self) -> None:
        """No request waits here now."""
        held, self._held = self._held, None
        if held is not None:
            self._failures.require("releases", lambda: self._leases.release(held), None)

    def _hold(self, entries: Iterable[Entry]) -> None:
        before, self._held = self._held, self._leases.hold(entries)
        if before is not None:
            self._leases.release(before)
