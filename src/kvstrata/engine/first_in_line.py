"""The oldest waiting request, where it does not fit an idle engine: shortens its cached prefix, or says how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstrata.engine.capacity import Capacity
from kvstrata.engine.entrance import Entrance
from kvstrata.engine.fetching import Fetching
from kvstrata.engine.memory import no_room_beside_pins
from kvstrata.engine.request import Failed
from kvstrata.engine.scheduler import Waiting
from kvstrata.engine.sequence import Sequence
from kvstrata.engine.sequences import Sequences
from kvstrata.store.failures import Failures
from kvstrata.store.shortening import Shortening


@dataclass(frozen=True)
class Unservable:
    """Waiting request that memory has no room for, and how it ends."""

    sequence: Sequence
    failure: Failed | None  # None: its reply ends with the tokens that it has


# unchanged  nothing was to be done, or something else has to happen first
# shortened  some of what it would resume from has gone: plan again
Outcome = Literal["unchanged", "shortened"] | Unservable


class FirstInLine:
    def __init__(
        self,
        sequences: Sequences,
        capacity: Capacity,
        fetching: Fetching,
        entrance: Entrance,
        shortening: Shortening,
        failures: Failures,
    ) -> None:
        self._sequences = sequences
        self._capacity = capacity
        self._fetching = fetching
        self._entrance = entrance
        self._shortening = shortening
        self._failures = failures

    def make_room(self, waiting: list[Waiting]) -> Outcome:
        """Make room for the first request that waits for nothing else: no other will. The caller ends it where it is
        unservable."""
        first = next((w for w in waiting if not w.follows), None)
        free_bytes = self._capacity.free_bytes
        if first is None or first.admit_bytes <= free_bytes:
            return "unchanged"
        if any(map(self._fetching.awaits_disk, self._sequences.waiting)):
            return "unchanged"
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
        if has_shortened:
            return "shortened"
        if self._failures.is_broken:
            return "unchanged"  # in an empty cache there will be room
        if sequence.num_generated:
            return Unservable(sequence, None)
        message = no_room_beside_pins(least_bytes, free_bytes, budget.total_bytes)
        return Unservable(sequence, Failed(message, "pinned"))
