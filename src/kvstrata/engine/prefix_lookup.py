"""Prefix lookup: connects a sequence with the prefix cache, from its arrival to its end.

It knows sequences and the cache; it does not know the schedule. A fault of the cache costs a sequence its cached
prefix: a failing lookup finds nothing, and after a failing commit the sequence continues without further commits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable

import numpy as np

from kvstrata.codecs.segments import GROUP_TOKENS
from kvstrata.engine.budget import KvFormat
from kvstrata.engine.request import PinRequest, Request
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.sequence import Sequence
from kvstrata.layers.raw_window import RawWindow
from kvstrata.layers.sequence import SequenceCache
from kvstrata.prefix_cache.entries import CachedPrefix, Lease
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.eviction import Evictor
from kvstrata.prefix_cache.insertion import Insertion
from kvstrata.prefix_cache.jobs import FailureLog
from kvstrata.prefix_cache.keys import TokenIds
from kvstrata.prefix_cache.matching import NO_PREFIX, Explainer
from kvstrata.prefix_cache.pins import Pins, Term
from kvstrata.prefix_cache.precision import PrecisionPolicy
from kvstrata.prefix_cache.prefetch import Prefetcher
from kvstrata.prefix_cache.prefix_cache import Store
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.tier_client import BlockLoad
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.spans.live import SEAL_TOKENS
from kvstrata.spans.marks import take_mark
from kvstrata.tier.block import BLOCK_TOKENS

# For the answer what a tier has, at most: then a request goes on without it. It comes within milliseconds.
LOOKUP_S = 1.0


class Fetching:
    def __init__(self, fetches: Prefetcher, reclaimer: Reclaimer, table: EntryTable, failures: FailureLog) -> None:
        self._fetches = fetches
        self._reclaimer = reclaimer
        self._table = table
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
            stored.lookup = self._fetches.ask(prompt, salt, prefill_tokens_s=prefill_tokens_s)
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
                # Memory may have more space when the request is admitted: the tiers are asked again then.
                stored.refused_end, stored.refused_space_bytes = load.links[-1].end, self.space_bytes
            stored.load = None
            # What one tier had is there: maybe another has more.
            self._load_next(sequence, prefill_tokens_s)

    @property
    def space_bytes(self) -> int:
        """Bytes that cached KV may take if all evictable entries go."""
        return self._reclaimer.limit_bytes - (self._table.nbytes - self._table.evictable_bytes)

    def _load_next(self, sequence: Sequence, prefill_tokens_s: float) -> None:
        stored = sequence.stored
        if stored.load is None and stored.offers:
            stored.load, stored.offers = self._fetches.begin_next_load(
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
            self._failures.require("releases", lambda: self._fetches.abandon(load), None)


def _is_late(load: BlockLoad, prefill_tokens_s: float) -> bool:
    """Whether it should be given up. What came and was not taken in yet may be what it waits for."""
    return time.monotonic() >= load.gives_up_at(prefill_tokens_s) and not load.has_arrived


OVER_QUOTA = "quota"

# Of a request without a session, that name its pin: chats that begin alike share one, so that there are never more
# pins than kinds of chats.
NAMING_TOKENS = 64


class Pinning:
    def __init__(self, pins: Pins, shelf: EntryTable, token_bytes: int) -> None:
        self._pins = pins
        self._shelf = shelf
        self._token_bytes = token_bytes

    def foresee(self, sequence: Sequence) -> None:
        """Before the client hears of the request: whether its quota will do, as far as that can be known."""
        request = sequence.request
        if request.pin is None:
            return
        asked = request.prompt[: request.pin.num_tokens]
        if not self._pins.may_keep(asked, request.salt, self._term(request, request.pin), self._token_bytes):
            sequence.unpinned_reason = OVER_QUOTA

    def pin(self, sequence: Sequence) -> None:
        """It has ended; what it computed is stored."""
        request = sequence.request
        if request.pin is None or sequence.unpinned_reason or sequence.num_computed < len(request.prompt) - 1:
            return
        self._pins.keep(request.prompt[: request.pin.num_tokens], request.salt, self._term(request, request.pin))

    def _term(self, request: Request, pin: PinRequest) -> Term:
        return Term(_name(request), pin.ttl_s, pin.quota.of(self._shelf.max_bytes))


def _name(request: Request) -> str:
    if request.session:
        return f"session {request.session}"
    first = np.array(request.prompt[:NAMING_TOKENS], np.int32)
    return f"begins {hashlib.sha256(first.tobytes()).hexdigest()}"


# A prefill in flight is waited for if it saves at least this many tokens.
MIN_FOLLOW_TOKENS = 32

# A request asks the tiers at most so often before it begins: where memory is so short that its prefix goes each time
# before the request is admitted, it computes the prefix.
MAX_ASKED = 4


class Resume:
    def __init__(
        self,
        store: Store,
        evictor: Evictor,
        explainer: Explainer,
        precision: PrecisionPolicy,
        pinning: Pinning,
        failures: FailureLog,
        *,
        fetching: Fetching,
        mark_every_tokens: int,
        shared_marks: Callable[[], None] | None = None,
    ) -> None:
        """`shared_marks`: what is computed goes to a tier that others share, which has marks at multiples of 256 only;
        called before one is taken while a batch runs, to give its sequences their own state. None: nothing does."""
        self._store = store
        self._needs_marks = store.needs_checkpoints  # of the model: read once, so that no step depends on the answer
        self._evictor = evictor
        self._explainer = explainer
        self._precision = precision
        self._pinning = pinning
        self._failures = failures
        self._fetching = fetching
        self._mark_every = round_up_to_block(mark_every_tokens) if shared_marks else mark_every_tokens
        self._shared_marks = shared_marks

    def found(self, sequence: Sequence) -> CachedPrefix:
        """What it would go on from if it began now."""
        return self._failures.attempt("lookups", lambda: self._find(sequence), NO_PREFIX)

    def _find(self, sequence: Sequence) -> CachedPrefix:
        self._evictor.expire()
        stored = sequence.stored
        if stored.found is None or stored.found_version != self._store.version:
            stored.found = self._store.lookup(sequence.ids()[:-1], sequence.request.salt)
            stored.found_version = self._store.version
        stored.most_found = max(stored.most_found, stored.found.num_tokens)
        return stored.found

    def awaits_encoding(self, sequence: Sequence) -> bool:
        """Whether it has to wait until what it would go on from is encoded, which is done next."""
        found = self.found(sequence)
        return self._failures.attempt("lookups", lambda: self._store.awaits_encoding(found), otherwise=False)

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

    def begin(self, sequence: Sequence, runner: ModelRunner, capacity_after: Callable[[int], int]) -> bool:
        """Give it a cache, with what is stored in front; `capacity_after` so many tokens, 0: there is no room.

        What is stored may be less than when it was last looked at. False: it has to go on waiting.
        """
        if self._has_to_ask_again(sequence) or self.awaits_encoding(sequence):
            return False
        sequence.stored.found = None
        sequence.stored.withdraw_lookup()
        lease = self._failures.attempt("lookups", lambda: self._lease(sequence), Lease(ReuseClass.FRESH))
        capacity = capacity_after(lease.num_tokens)
        if not capacity:
            self._failures.require("releases", lambda: self._store.release(lease), None)
            return False
        sequence.stored.asked_twice = lease.reused_end
        if self._shared_marks is not None and self._needs_marks:
            stops = {*sequence.stored.stops, len(sequence.tokens) - 1}
            sequence.stored.stops |= {stop - stop % BLOCK_TOKENS for stop in stops if stop >= BLOCK_TOKENS}
        sequence.stored.num_asked = 0
        cache = sequence.cache = runner.new_cache(capacity, lease.prefix, sequence.kv_format.raw_tokens)
        filing = self._failures.attempt("commits", lambda: self._open(sequence, lease, cache), None)
        sequence.stored.filing = self._store.insert_detached(lease) if filing is None else filing
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.num_tokens
            self._failures.attempt("lookups", lambda: self._foresee(sequence), None)
        return True

    def _lease(self, sequence: Sequence) -> Lease:
        request, asked_twice = sequence.request, sequence.stored.asked_twice
        return self._store.lease(sequence.ids()[:-1], request.salt, asked_twice, request.session)

    def _open(self, sequence: Sequence, lease: Lease, cache: SequenceCache) -> Insertion:
        filing = self._store.insert(lease, cache, sequence.request.salt, sequence.request.resume_at)
        if sequence.kv_format.plan is not None and not self._precision.options.live:
            filing.entry.target = sequence.kv_format.plan
        return filing

    def _foresee(self, sequence: Sequence) -> None:
        """What its client hears of the cache before the first token."""
        sequence.miss_reason = self._explainer.miss(sequence.ids(), sequence.request.salt)
        self._pinning.foresee(sequence)

    def _has_to_ask_again(self, sequence: Sequence) -> bool:
        """Whether memory has less of its prefix than when the tiers were asked, or more space than when a load lacked
        it. The tiers may have what was evicted or refused: it is not computed before they have answered."""
        stored, num_found = sequence.stored, self.found(sequence).num_tokens
        may_fit = num_found < stored.refused_end and self._fetching.space_bytes > stored.refused_space_bytes
        if (num_found >= stored.most_found and not may_fit) or stored.num_asked >= MAX_ASKED:
            return False
        stored.ask_again()
        return True

    def next_stop(self, sequence: Sequence, at: int) -> int | None:
        """How many tokens after `at` its prefill should pause, so that others can resume there. None: it need not."""
        if not self._needs_marks:
            return None
        stops = [stop - at for stop in sequence.stored.stops if stop > at]
        return min([*stops, self._mark_every - at % self._mark_every])

    def after_chunk(self, sequence: Sequence) -> None:
        """What it has computed is open to others from now on."""
        if sequence.stored.filing is None or sequence.cache is None:
            return
        at = sequence.cache.num_tokens
        pauses = at in sequence.stored.stops or at % self._mark_every == 0 or not sequence.prefill_left
        has_checkpoint = self._needs_marks and pauses
        self._commit(sequence, has_checkpoint=has_checkpoint, is_prompt_end=not sequence.prefill_left)
        self._seal_in_time(sequence.cache, sequence.kv_format, SEAL_TOKENS)
        self._grow(sequence, at)

    def after_step(self, sequence: Sequence) -> None:
        """It has one token more: enough for another piece to be encoded, maybe."""
        if sequence.stored.filing is not None and sequence.num_generated % SEAL_TOKENS == 0:
            self._grow(sequence, sequence.num_computed)
        self._mark_reply(sequence)
        if sequence.cache is not None:
            self._seal_in_time(sequence.cache, sequence.kv_format, sequence.kv_format.raw_tokens or 0)

    def _mark_reply(self, sequence: Sequence) -> None:
        """Where another server can go on from a reply."""
        filing, cache = sequence.stored.filing, sequence.cache
        if self._shared_marks is None or not self._needs_marks or filing is None or cache is None:
            return
        if cache.num_tokens % BLOCK_TOKENS == 0 and cache.num_tokens > cache.start:
            self._shared_marks()
            self._commit(sequence, has_checkpoint=True)

    def _seal_in_time(self, cache: SequenceCache, rung: KvFormat, num_tokens: int) -> None:
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
        filing, sequence.stored.orphans = sequence.stored.filing, ()
        if filing is None or sequence.cache is None:
            return
        has_computed = sequence.cache.num_tokens > sequence.cache.start
        self._commit(sequence, has_checkpoint=self._needs_marks and has_computed)
        self._failures.require("commits", filing.close, None)
        sequence.stored.filing = None

    def pin(self, sequence: Sequence) -> None:
        """It has ended for good: keep what it asked for. One that was set aside must make room instead."""
        self._failures.attempt("commits", lambda: self._pinning.pin(sequence), None)

    def drop_marks(self, sequence: Sequence) -> bool:
        """All on its way, where it has no room to grow. False: there are none."""
        filing = sequence.stored.filing
        return filing is not None and self._failures.attempt("reclaims", filing.drop_checkpoints, otherwise=False)

    def _commit(self, sequence: Sequence, *, has_checkpoint: bool, is_prompt_end: bool = False) -> None:
        self._file(sequence, lambda: _commit(sequence, has_checkpoint=has_checkpoint, is_prompt_end=is_prompt_end))

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        filing = sequence.stored.filing
        if filing is not None:
            self._file(sequence, lambda: filing.has_grown(num_tokens))

    def _file(self, sequence: Sequence, operation: Callable[[], None]) -> None:
        def run() -> bool:
            operation()
            return True

        if not self._failures.attempt("commits", run, otherwise=False) and sequence.stored.filing is not None:
            sequence.stored.filing.detach()


def _commit(sequence: Sequence, *, has_checkpoint: bool, is_prompt_end: bool = False) -> None:
    """Make the tokens that a sequence has computed visible to others. A step in flight may have computed one that the
    reply never got: it is left out, and so is a checkpoint, because the state has seen that token."""
    filing, cache, ids = sequence.stored.filing, sequence.cache, sequence.ids()
    if filing is None or cache is None:
        return
    num_tokens = min(cache.num_tokens, len(ids))
    mark = take_mark(cache) if has_checkpoint and num_tokens == cache.num_tokens else None
    filing.commit(ids[:num_tokens], mark, is_end=is_prompt_end)


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
