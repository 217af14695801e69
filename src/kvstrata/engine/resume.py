"""What a sequence finds in the store when it begins, and leaves there as it goes.

Knows sequences and the store; does not know who runs when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvstrata.codecs.segments import GROUP_TOKENS
from kvstrata.engine.pinning import Pinning
from kvstrata.engine.rungs import Rung
from kvstrata.engine.runner import Runner
from kvstrata.engine.sequence import Sequence
from kvstrata.index.ids import TokenIds
from kvstrata.layers.raw_window import RawWindow
from kvstrata.layers.sequence import SequenceCache
from kvstrata.spans.live import SEAL_TOKENS
from kvstrata.spans.marks import take_mark
from kvstrata.store.entry import Found
from kvstrata.store.evictor import Evictor
from kvstrata.store.explain import Explainer
from kvstrata.store.precision.target import Precision
from kvstrata.store.store import Store
from kvstrata.tier.block import BLOCK_TOKENS

# A prefill in flight is waited for if it saves at least this many tokens.
MIN_FOLLOW_TOKENS = 32


class Resume:
    def __init__(
        self,
        store: Store,
        evictor: Evictor,
        explainer: Explainer,
        precision: Precision,
        pinning: Pinning,
        *,
        mark_every_tokens: int,
        shared_marks: Callable[[], None] | None = None,
    ) -> None:
        """`shared_marks`: what is computed goes to a tier that others share, which has marks at multiples of 256 only;
        called before one is taken while a batch runs, to give its sequences their own state. None: nothing does."""
        self._store = store
        self._evictor = evictor
        self._explainer = explainer
        self._precision = precision
        self._pinning = pinning
        self._mark_every = round_up_to_block(mark_every_tokens) if shared_marks else mark_every_tokens
        self._shared_marks = shared_marks

    def found(self, sequence: Sequence) -> Found:
        """What it would go on from if it began now."""
        self._evictor.expire()
        stored = sequence.stored
        if stored.found is None or stored.found_version != self._store.version:
            stored.found = self._store.find(sequence.ids()[:-1], sequence.request.salt)
            stored.found_version = self._store.version
        return stored.found

    def follow(self, sequence: Sequence, ahead: Iterable[Sequence]) -> bool:
        """Have a sequence ahead, which is about to compute what this one needs, pause where both part. True: there is
        such a one, so this one waits and shares what it computes."""
        if not self._store.can_share:
            return False
        known = self.found(sequence).num_tokens
        for other in ahead:
            shared = _shared_tokens(sequence, other)
            if shared - known >= MIN_FOLLOW_TOKENS and other.num_computed < shared:
                other.stored.stops.add(shared)
                return True
        return False

    def begin(self, sequence: Sequence, runner: Runner, capacity_after: Callable[[int], int]) -> bool:
        """Give it a cache, with what is stored in front; `capacity_after` so many tokens, 0: there is no room.

        What is stored may be less than when it was last looked at. False: it has to go on waiting.
        """
        sequence.stored.found = None
        sequence.stored.withdraw_lookup()
        salt = sequence.request.salt
        lease = self._store.match(sequence.ids()[:-1], salt, sequence.stored.asked_twice, sequence.request.session)
        capacity = capacity_after(lease.num_tokens)
        if not capacity:
            self._store.release(lease)
            return False
        sequence.stored.asked_twice = lease.asked_twice
        if self._shared_marks is not None and self._store.needs_marks:
            stops = {*sequence.stored.stops, len(sequence.tokens) - 1}
            sequence.stored.stops |= {stop - stop % BLOCK_TOKENS for stop in stops if stop >= BLOCK_TOKENS}
        sequence.cache = runner.new_cache(capacity, lease.prefix, sequence.rung.raw_tokens)
        filing = sequence.stored.filing = self._store.open(lease, sequence.cache, salt, sequence.request.resume_at)
        if sequence.rung.plan is not None and not self._precision.options.live:
            filing.entry.target = sequence.rung.plan
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.num_tokens
            sequence.miss = self._explainer.miss(sequence.ids(), salt)
            self._pinning.foresee(sequence)
        return True

    def next_stop(self, sequence: Sequence, at: int) -> int | None:
        """How many tokens after `at` its prefill should pause, so that others can resume there. None: it need not."""
        if not self._store.needs_marks:
            return None
        stops = [stop - at for stop in sequence.stored.stops if stop > at]
        return min([*stops, self._mark_every - at % self._mark_every])

    def after_chunk(self, sequence: Sequence) -> None:
        """What it has computed is open to others from now on."""
        if sequence.stored.filing is None or sequence.cache is None:
            return
        at = sequence.cache.num_tokens
        pauses = at in sequence.stored.stops or at % self._mark_every == 0 or not sequence.prefill_left
        mark = take_mark(sequence.cache) if self._store.needs_marks and pauses else None
        sequence.stored.filing.seal(sequence.ids()[:at], mark, is_end=not sequence.prefill_left)
        self._seal_in_time(sequence.cache, sequence.rung, SEAL_TOKENS)
        sequence.stored.filing.has_grown(at)

    def after_step(self, sequence: Sequence) -> None:
        """It has one token more: enough for another piece to be encoded, maybe."""
        if sequence.stored.filing is not None and sequence.num_generated % SEAL_TOKENS == 0:
            sequence.stored.filing.has_grown(sequence.num_computed)
        self._mark_reply(sequence)
        if sequence.cache is not None:
            self._seal_in_time(sequence.cache, sequence.rung, sequence.rung.raw_tokens or 0)

    def _mark_reply(self, sequence: Sequence) -> None:
        """Where another server can go on from a reply."""
        filing, cache = sequence.stored.filing, sequence.cache
        if self._shared_marks is None or not self._store.needs_marks or filing is None or cache is None:
            return
        if cache.num_tokens % BLOCK_TOKENS == 0 and cache.num_tokens > cache.start:
            self._shared_marks()
            filing.seal(sequence.ids()[: cache.num_tokens], take_mark(cache))

    def _seal_in_time(self, cache: SequenceCache, rung: Rung, num_tokens: int) -> None:
        """A sequence that fits because it is encoded is, as soon as so many tokens are raw, whatever else there is to
        do. Up to the end of a codec's group."""
        if rung.plan is None or cache.unsealed_tokens < num_tokens:
            return
        window = self._precision.window
        end = cache.num_tokens - window.recent_tokens
        recent = window.recent_tokens + end % GROUP_TOKENS
        cache.seal(rung.plan.pairs, RawWindow(window.first_tokens, recent))

    def end(self, sequence: Sequence) -> None:
        """It runs no more: what it has computed stays in the store."""
        if sequence.stored.filing is None or sequence.cache is None:
            return
        at = sequence.cache.num_tokens
        mark = take_mark(sequence.cache) if self._store.needs_marks and at > sequence.cache.start else None
        sequence.stored.filing.seal(sequence.ids()[:at], mark)
        sequence.stored.filing.end()
        sequence.stored.filing = None

    def pin(self, sequence: Sequence) -> None:
        """It has ended for good: keep what it asked for. One that was set aside must make room instead."""
        self._pinning.pin(sequence)


def round_up_to_block(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _shared_tokens(sequence: Sequence, other: Sequence) -> int:
    """How much of its prompt the other computes too. The last token is never shared."""
    if sequence.request.salt != other.request.salt:
        return 0
    if other.arrival not in sequence.stored.shared:
        sequence.stored.shared[other.arrival] = _common(sequence.ids()[:-1], other.ids()[:-1])
    return sequence.stored.shared[other.arrival]


def _common(a: TokenIds, b: TokenIds) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
