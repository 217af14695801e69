"""The first that waits, where it does not fit though no sequence runs: it goes on from less, or ends."""

from __future__ import annotations

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.endings import Endings
from kvstrata.engine.entrance import Entrance
from kvstrata.engine.fetching import Fetching
from kvstrata.engine.memory import no_room_beside_pins
from kvstrata.engine.request import Failed
from kvstrata.engine.scheduler import Waiting
from kvstrata.engine.sequences import Sequences
from kvstrata.store.failures import Failures
from kvstrata.store.shortening import Shortening


class FirstInLine:
    def __init__(
        self,
        sequences: Sequences,
        capacity: Capacity,
        fetching: Fetching,
        entrance: Entrance,
        shortening: Shortening,
        failures: Failures,
        endings: Endings,
    ) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._fetching = fetching
        self._entrance = entrance
        self._shortening = shortening
        self._failures = failures
        self._endings = endings

    def make_room(self, waiting: list[Waiting]) -> bool:
        """For the first that waits for nothing else: no other will. False: that changes nothing."""
        first = next((w for w in waiting if not w.follows), None)
        free_bytes = self._capacity.free_bytes
        if first is None or first.admit_bytes <= free_bytes:
            return False
        if any(map(self._fetching.awaits_disk, self._sequences.waiting)):
            return False
        self._entrance.let_go()  # some of what it held may go
        sequence, budget = self._sequences.waiting_at(first.id), self._capacity.budget
        least_bytes = budget.bytes_for(len(sequence.tokens), sequence.rung)
        prompt, need_bytes = sequence.ids()[:-1], first.admit_bytes - free_bytes
        salt, keeps_used = sequence.request.salt, least_bytes > free_bytes
        has_shortened = self._failures.require(
            "reclaims",
            lambda: self._shortening.shorten(prompt, salt, need_bytes, keeps_used=keeps_used),
            otherwise=False,
        )
        if has_shortened or self._failures.is_broken:
            return has_shortened  # in an empty cache there will be room
        if sequence.num_generated:
            sequence.cut_short()
            self._endings.finish(sequence, "length")
        else:
            message = no_room_beside_pins(least_bytes, free_bytes, budget.total_bytes)
            self._endings.fail(sequence, Failed(message, "pinned"))
        return True
