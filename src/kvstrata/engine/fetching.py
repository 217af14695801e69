"""What comes from the tiers for a sequence that waits. Asks, and goes on asking how far it is; never waits. Where that
fails, the sequence goes on without the tiers."""

from __future__ import annotations

import math
import time

from kvstrata.engine.sequence import Sequence
from kvstrata.store.cold.fetches import Fetches
from kvstrata.store.cold.loads import BlockLoad
from kvstrata.store.failures import Failures

# For the answer what a tier has, at most: then a request goes on without it. It comes within milliseconds.
LOOKUP_S = 1.0


class Fetching:
    def __init__(self, fetches: Fetches, failures: Failures) -> None:
        self._fetches = fetches
        self._failures = failures

    def fetch(self, sequence: Sequence, prefill_tokens_s: float) -> None:
        """Go on with what the tiers have for it: ask, load if that pays, and hand it to the store."""

        def go_on() -> bool:
            self._fetch(sequence, prefill_tokens_s)
            return True

        if not self._failures.attempt("lookups", go_on, otherwise=False):
            self.forget(sequence)

    def _fetch(self, sequence: Sequence, prefill_tokens_s: float) -> None:
        prompt, salt, stored = sequence.ids()[:-1], sequence.request.salt, sequence.stored
        if not stored.has_asked:
            stored.has_asked = True
            stored.num_asked += 1
            stored.lookup = self._fetches.look(prompt, salt, prefill_tokens_s=prefill_tokens_s)
        if stored.lookup is not None and stored.lookup.is_done:
            stored.offers = stored.lookup.offers
            # Who has not answered by now is not waited for.
            stored.lookup.withdraw()
            stored.lookup = None
        self._load_next(sequence, prefill_tokens_s)
        load = stored.load
        if load is not None and (load.is_done or _is_late(load, prefill_tokens_s)):
            self._fetches.promote(load)
            if load.lacked_room:
                # There may be room when it is admitted: it asks again then.
                stored.most_found = max(stored.most_found, load.links[-1].end)
            stored.load = None
            # What one tier had is there: maybe another has more.
            self._load_next(sequence, prefill_tokens_s)

    def _load_next(self, sequence: Sequence, prefill_tokens_s: float) -> None:
        stored = sequence.stored
        if stored.load is None and stored.offers:
            stored.load, stored.offers = self._fetches.load_next(
                stored.offers, sequence.ids()[:-1], sequence.request.salt, prefill_tokens_s=prefill_tokens_s
            )

    def awaits_disk(self, sequence: Sequence) -> bool:
        """Whether it should wait for what is on its way from the disk, or for what the disk has to say."""
        if sequence.stored.load is not None:
            return True
        lookup = sequence.stored.lookup
        return lookup is not None and time.monotonic() < lookup.ends_s(LOOKUP_S)

    def seconds_to_wait(self, sequence: Sequence, prefill_tokens_s: float) -> float:
        """Until it should look again what it waits for from the disk; infinite where it waits for nothing."""
        now_s = time.monotonic()
        if sequence.stored.load is not None:
            return sequence.stored.load.gives_up_at(prefill_tokens_s) - now_s
        if sequence.stored.lookup is not None and self.awaits_disk(sequence):
            return sequence.stored.lookup.ends_s(LOOKUP_S) - now_s
        return math.inf

    def forget(self, sequence: Sequence) -> None:
        """It will not begin: it no longer waits for what is on its way."""
        sequence.stored.withdraw_lookup()
        load, sequence.stored.load = sequence.stored.load, None
        if load is not None:
            self._failures.require("releases", lambda: self._fetches.forget(load), None)


def _is_late(load: BlockLoad, prefill_tokens_s: float) -> bool:
    """Whether it should be given up. What came and was not taken in yet may be what it waits for."""
    return time.monotonic() >= load.gives_up_at(prefill_tokens_s) and not load.has_arrived
