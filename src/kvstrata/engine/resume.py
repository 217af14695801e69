"""What a sequence finds in the store when it begins, and leaves there as it goes.

Knows sequences and the store; does not know who runs when.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

import numpy as np

from kvstrata.backend import max_arrays
from kvstrata.codecs.segments import GROUP_TOKENS
from kvstrata.engine.limits import Storage
from kvstrata.engine.memory import Budget
from kvstrata.engine.rungs import Rung, live_rungs, make_rungs
from kvstrata.engine.runner import Runner
from kvstrata.engine.scratch import max_chunk
from kvstrata.engine.sequence import Sequence
from kvstrata.index.identity import Identity
from kvstrata.index.ids import TokenIds
from kvstrata.layers.kinds import Layout
from kvstrata.layers.sequence import SequenceCache
from kvstrata.models.loaded import LoadedModel
from kvstrata.spans.marks import take_mark
from kvstrata.spans.plan import Plan, edges_of, make_plan
from kvstrata.spans.span import SEAL_TOKENS, RawWindow
from kvstrata.store.cold.cold import Cold
from kvstrata.store.entry import Found
from kvstrata.store.precision.ladder import Floors
from kvstrata.store.precision.pressure import LadderOptions
from kvstrata.store.precision.target import PrecisionOptions
from kvstrata.store.search import NOTHING
from kvstrata.store.store import Store, StoreOptions

# A prefill in flight is waited for if it saves at least this many tokens.
MIN_FOLLOW_TOKENS = 32
# For the answer what the disk has, at most: then a request goes on without it. It comes within milliseconds.
LOOKUP_S = 1.0
# Of the arrays that a machine allows, for stored spans. The rest is for weights, running sequences and passes.
STORED_ARRAYS = 0.75


class Resume:
    def __init__(
        self,
        store: Store | None,
        plan: Callable[[str, str], Plan],
        rungs: Callable[[Plan], tuple[tuple[Rung, ...], dict[int, Rung]]],
        *,
        mark_every_tokens: int,
    ) -> None:
        self.store = store  # None: this model's caches cannot be shared
        self.plan = plan  # from the names of a K and a V precision
        self._rungs = rungs  # from the target of new spans: those that there are, and those of other settings
        self._mark_every = mark_every_tokens
        self._needs_marks = store is not None and store.needs_marks
        self._fetches = None if store is None else store.fetches

    def found(self, sequence: Sequence) -> Found:
        """What it would go on from if it began now."""
        if self.store is None:
            return NOTHING
        self.store.expire()
        if sequence.stored.found is None or sequence.stored.found_version != self.store.version:
            sequence.stored.found = self.store.find(sequence.ids()[:-1], sequence.request.salt)
            sequence.stored.found_version = self.store.version
        return sequence.stored.found

    def fetch(self, sequence: Sequence, prefill_tokens_s: float) -> None:
        """Go on with what the disk has for it: ask, load if that pays, and hand it to the store. Never waits."""
        if self._fetches is None:
            return
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

    def follow(self, sequence: Sequence, ahead: Iterable[Sequence]) -> bool:
        """Have a sequence ahead, which is about to compute what this one needs, pause where both part. True: there is
        such a one, so this one waits and shares what it computes."""
        if self.store is None:
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
        self._withdraw_lookup(sequence)
        if self.store is None:
            sequence.cache = runner.new_cache(capacity_after(0))
            return True
        salt = sequence.request.salt
        lease = self.store.match(sequence.ids()[:-1], salt, sequence.stored.asked_twice)
        capacity = capacity_after(lease.num_tokens)
        if not capacity:
            self.store.release(lease)
            return False
        sequence.stored.asked_twice = lease.asked_twice
        sequence.cache = runner.new_cache(capacity, lease.prefix, sequence.rung.raw_tokens)
        sequence.stored.filing = self.store.open(lease, sequence.cache, salt)
        if sequence.rung.raw_tokens is not None and not self.store.options.precision.live:
            sequence.stored.filing.entry.target = self.plan(sequence.rung.k, sequence.rung.v)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.num_tokens
            sequence.miss = self.store.miss(sequence.ids(), salt)
        return True

    def shorten(self, sequence: Sequence, need_bytes: int, *, keeps_used: bool) -> bool:
        """It does not fit beside what it would go on from: let some of that go. False: there is nothing that may."""
        if self.store is None:
            return False
        return self.store.shorten(sequence.ids()[:-1], sequence.request.salt, need_bytes, keeps_used=keeps_used)

    def drop_marks(self, sequence: Sequence) -> bool:
        """It runs and has no room to grow. False: it has none."""
        return (
            self.store is not None
            and sequence.stored.filing is not None
            and self.store.drop_marks(sequence.stored.filing)
        )

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
        mark = take_mark(sequence.cache) if self._needs_marks and pauses else None
        sequence.stored.filing.seal(sequence.ids()[:at], mark, is_end=not sequence.prefill_left)
        self._seal_in_time(sequence.cache, sequence.rung, SEAL_TOKENS)
        sequence.stored.filing.has_grown(at)

    def after_step(self, sequence: Sequence) -> None:
        """It has one token more: enough for another piece to be encoded, maybe."""
        if sequence.stored.filing is not None and sequence.num_generated % SEAL_TOKENS == 0:
            sequence.stored.filing.has_grown(sequence.num_computed)
        if sequence.cache is not None:
            self._seal_in_time(sequence.cache, sequence.rung, sequence.rung.raw_tokens or 0)

    def _seal_in_time(self, cache: SequenceCache, rung: Rung, num_tokens: int) -> None:
        """A sequence that fits because it is encoded is, as soon as so many tokens are raw, whatever else there is to
        do. Up to the end of a codec's group."""
        if self.store is None or rung.raw_tokens is None or cache.unsealed_tokens < num_tokens:
            return
        window = self.store.options.precision.window
        end = cache.num_tokens - window.recent_tokens
        recent = window.recent_tokens + end % GROUP_TOKENS
        cache.seal(self.plan(rung.k, rung.v).pairs, first_raw=window.first_tokens, recent_raw=recent)

    def with_rungs(self, budget: Budget) -> Budget:
        """The budget with the ways to hold a running sequence that follow from the target of now."""
        if self.store is None:
            return budget
        rungs, live = self._rungs(self.store.precision.target)
        return replace(budget, rungs=rungs, live_rungs=live)

    def forget(self, sequence: Sequence) -> None:
        """It will not begin: it no longer waits for what is on its way."""
        self._withdraw_lookup(sequence)
        if sequence.stored.load is not None and self._fetches is not None:
            self._fetches.forget(sequence.stored.load)
            sequence.stored.load = None

    def _withdraw_lookup(self, sequence: Sequence) -> None:
        if sequence.stored.lookup is not None:
            sequence.stored.lookup.withdraw()
            sequence.stored.lookup = None

    def end(self, sequence: Sequence) -> None:
        """It runs no more: what it has computed stays in the store."""
        if sequence.stored.filing is None or sequence.cache is None:
            return
        at = sequence.cache.num_tokens
        mark = take_mark(sequence.cache) if self._needs_marks and at > sequence.cache.start else None
        sequence.stored.filing.seal(sequence.ids()[:at], mark)
        sequence.stored.filing.end()
        sequence.stored.filing = None


def make_resume(
    loaded: LoadedModel,
    layout: Layout,
    budget: Budget,
    storage: Storage,
    max_kv_size: int | None,
    cold: Cold | None = None,
    chunk_tokens: int | None = None,
) -> Resume:
    """Raises ConfigError for a precision that the model's layers cannot be stored in."""
    plan_of = cache(partial(make_plan, layout, edge_layers=storage.edge_layers, edge=storage.edge))
    chunk_tokens = chunk_tokens or max_chunk()

    def rungs(target: Plan) -> tuple[tuple[Rung, ...], dict[int, Rung]]:
        now = replace(storage, k=target.k, v=target.v)
        return make_rungs(layout, now, chunk_tokens), live_rungs(layout, now, chunk_tokens)

    if any(spec.kind == "foreign" for spec in layout.flat()):
        return Resume(None, plan_of, rungs, mark_every_tokens=storage.mark_every_tokens)
    plan = plan_of(storage.k, storage.v)
    signature = tuple(spec.signature for spec in layout.flat())
    allowed = max_arrays()
    hot_bytes = budget.total_bytes if storage.hot_bytes is None else min(storage.hot_bytes, budget.total_bytes)
    options = StoreOptions(
        hot_bytes=hot_bytes,
        put_away=storage.put_away,
        write_through=storage.write_through,
        max_arrays=None if allowed is None else int(STORED_ARRAYS * allowed),
        max_marks=storage.max_marks,
        ttl_s=storage.ttl_s,
        precision=PrecisionOptions(
            min_quantize_tokens=storage.min_quantize_tokens,
            live=storage.live,
            gathers=allowed is not None,
            apart=edges_of(layout, storage.edge_layers),
            window=RawWindow(storage.first_raw_tokens, storage.recent_raw_tokens),
        ),
        ladder=LadderOptions(
            by_pressure=storage.dynamic,
            by_length=storage.dynamic_at,
            floors=Floors(storage.floor_k_bits, storage.floor_v_bits),
        ),
    )
    identity = Identity(loaded.fingerprint, loaded.dtype, signature, max_kv_size)
    store = Store(layout, identity, plan, options, plan_of=plan_of, cold=cold)
    return Resume(store, plan_of, rungs, mark_every_tokens=storage.mark_every_tokens)


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
