"""What comes from the disk for a sequence that waits. Asks, and goes on asking how far it is; never waits."""

from __future__ import annotations

import math
import time

from kvstrata.engine.sequence import Sequence
from kvstrata.store.cold.fetches import Fetches

# For the answer what the disk has, at most: then a request goes on without it. It comes within milliseconds.
LOOKUP_S = 1.0


class Fetching:
    def __init__(self, fetches: Fetches) -> None:
        self._fetches = fetches

    def fetch(self, sequence: Sequence, prefill_tokens_s: float) -> None:
        """Go on with what the disk has for it: ask, load if that pays, and hand it to the store."""
        prompt, salt, stored = sequence.ids()[:-1], sequence.request.salt, sequence.stored
        if not stored.looked_on_disk:
            stored.looked_on_disk = True
            stored.lookup = self._fetches.look(prompt, salt)
        if stored.lookup is not None and stored.lookup.is_done:
            answer, stored.lookup = stored.lookup.answer, None
            stored.load = self._fetches.load(answer, prompt, salt, prefill_tokens_s=prefill_tokens_s)
        load = stored.load
        if load is not None and (load.is_done or time.monotonic() >= load.gives_up_at(prefill_tokens_s)):
            self._fetches.promote(load)
            stored.load = None

    def awaits_disk(self, sequence: Sequence) -> bool:
        """Whether it should wait for what is on its way from the disk, or for what the disk has to say."""
        if sequence.stored.load is not None:
            return True
        return sequence.stored.lookup is not None and time.monotonic() < sequence.stored.lookup.asked_s + LOOKUP_S

    def seconds_to_wait(self, sequence: Sequence, prefill_tokens_s: float) -> float:
        """Until it should look again what it waits for from the disk; infinite where it waits for nothing."""
        now_s = time.monotonic()
        if sequence.stored.load is not None:
            return sequence.stored.load.gives_up_at(prefill_tokens_s) - now_s
        if sequence.stored.lookup is not None and self.awaits_disk(sequence):
            return sequence.stored.lookup.asked_s + LOOKUP_S - now_s
        return math.inf

    def forget(self, sequence: Sequence) -> None:
        """It will not begin: it no longer waits for what is on its way."""
        sequence.stored.withdraw_lookup()
        if sequence.stored.load is not None:
            self._fetches.forget(sequence.stored.load)
            sequence.stored.load = None
