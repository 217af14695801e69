"""Prefix lookup: connects a sequence with the prefix cache, from its arrival to its end.

It knows sequences and the cache; it does not know the schedule. A fault of the cache costs a sequence its cached
prefix: a failing lookup finds nothing, and after a failing commit the sequence continues without further commits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstrata.codecs.mean_runs import GROUP_TOKENS
from kvstrata.common_prefix import common_prefix_len
from kvstrata.engine.budget import KvFormat
from kvstrata.engine.request import PinRequest, Request
from kvstrata.engine.runner import ModelRunner
from kvstrata.engine.sequence import Sequence, SequenceTable
from kvstrata.kv.checkpoints import take_checkpoint
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.kv.span import Span, SpanRange
from kvstrata.kv.transcode import ENCODE_TOKENS
from kvstrata.prefix_cache.conversations import ConversationTracker, ConversationTurn
from kvstrata.prefix_cache.entries import CachedPrefix, Entry, Lease, PrecisionTarget
from kvstrata.prefix_cache.insertion import Insertion
from kvstrata.prefix_cache.matching import NO_PREFIX
from kvstrata.prefix_cache.pins import Term
from kvstrata.prefix_cache.prefetch import Prefetcher, TierOffer, TierOffers
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.reclaim import Reclaimer
from kvstrata.prefix_cache.tier_client import BlockLoad
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.tiers.block import BLOCK_TOKENS

# Longest wait for the tiers to say what they have; then a request continues without them. Answers take milliseconds.
LOOKUP_S = 1.0

# A request waits for the prefill of another if that saves at least this many tokens.
MIN_FOLLOW_TOKENS = 32

# Limit of lookups on the tiers before a request starts: where memory is so short that the prefix is evicted each time
# before the request is admitted, the request computes it.
MAX_TIER_LOOKUPS = 4

# Tokens that name the pin of a request without a session. Chats that begin alike share one pin, so that the number of
# pins stays bounded.
NAMING_TOKENS = 64

OVER_QUOTA = "quota"

# ended      the sequence is at its end; its pin is set
# preempted  the sequence will be resumed
# abandoned  a forward pass failed: its KV may not be computable
Outcome = Literal["ended", "preempted", "abandoned"]


@dataclass(frozen=True)
class TierAnswers:
    """Answers of the tiers for one waiting sequence, as of now. What is loaded and cached follows from them."""

    offers: tuple[TierOffer, ...] | None  # None: there are no new ones
    is_lookup_awaited: bool  # a tier has not answered, and it is not too late yet
    is_load_over: bool  # all blocks of the load have been read, or they come too late


class _TierFetch:
    """Lookups of one sequence on the tiers, and the loads that follow from the answers."""

    def __init__(self, sequence: Sequence, prefetcher: Prefetcher, reclaimer: Reclaimer) -> None:
        self._sequence = sequence
        self._prefetcher = prefetcher
        self._reclaimer = reclaimer
        self._has_asked = False  # the tiers were asked for what memory lacks
        self._num_asked = 0  # lookups on the tiers since the last start
        self._most_cached = 0  # most tokens of the prefix in memory since the tiers were asked
        self._refused_end = 0  # end of a load that memory had no space for; 0: there was none
        self._refused_space_bytes = 0  # space at that time
        self._is_lookup_awaited = False
        self._offers: tuple[TierOffer, ...] = ()  # answers that are not loaded yet
        self.lookup: TierOffers | None = None  # open question to the tiers
        self.load: BlockLoad | None = None  # on its way from a tier

    @property
    def is_awaited(self) -> bool:
        """Whether the sequence waits for a load, or for the answer of a tier."""
        return self.load is not None or self._is_lookup_awaited

    def ask_once(self, prefill_tokens_s: float) -> None:
        """Ask the tiers for what memory lacks, unless they were asked."""
        if not self._has_asked:
            self._has_asked = True
            self._num_asked += 1
            self.lookup = self._prefetcher.ask(
                self._sequence.lookup_ids, self._sequence.request.salt, prefill_tokens_s=prefill_tokens_s
            )

    def follow(self, answers: TierAnswers, prefill_tokens_s: float) -> None:
        """Insert the blocks of a load that is over, and begin the next load that is faster than computing."""
        self._is_lookup_awaited = answers.is_lookup_awaited
        if answers.offers is not None:
            self.withdraw_lookup()  # a tier that has not answered by now is not waited for
            self._offers = answers.offers
        if answers.is_load_over and self.load is not None:
            self._promote(self.load)
            self.load = None
        if self.load is None and self._offers:
            self.load, self._offers = self._prefetcher.begin_next_load(
                *(self._offers, self._sequence.lookup_ids, self._sequence.request.salt),
                prefill_tokens_s=prefill_tokens_s,
            )

    def _promote(self, load: BlockLoad) -> None:
        self._prefetcher.promote(load)
        if load.lacked_memory:
            # Memory may have more space when the request is admitted: the tiers are asked again then.
            self._refused_end = max(self._refused_end, load.links[-1].end)
            self._refused_space_bytes = self._reclaimer.free_or_evictable_bytes

    def deadline_s(self, prefill_tokens_s: float) -> float:
        """Return when the sequence gives up what it waits for; infinity where that is nothing."""
        if self.load is not None:
            return self.load.deadline_s(prefill_tokens_s)
        return self.lookup.deadline_s(LOOKUP_S) if self.lookup is not None and self._is_lookup_awaited else math.inf

    def record_cached(self, num_tokens: int) -> None:
        """Note how much of the prefix memory has."""
        self._most_cached = max(self._most_cached, num_tokens)

    def needs_new_lookup(self, cached_tokens: int) -> bool:
        """Whether memory has less of the prefix than when the tiers were asked, or more space than when it refused a
        load. The tiers may have the rest, so the sequence does not compute it before they have answered."""
        has_more_space = self._reclaimer.free_or_evictable_bytes > self._refused_space_bytes
        may_fit_now = cached_tokens < self._refused_end and has_more_space
        return (cached_tokens < self._most_cached or may_fit_now) and self._num_asked < MAX_TIER_LOOKUPS

    def reset_lookup(self) -> None:
        """Have the tiers asked anew: they may have what memory lost or refused."""
        self.withdraw_lookup()
        self._has_asked, self._most_cached, self._refused_end = False, 0, 0

    def withdraw_lookup(self) -> None:
        """Withdraw the open question to the tiers, and drop their answers."""
        if self.lookup is not None:
            self.lookup.withdraw()
        self.lookup, self._offers, self._is_lookup_awaited = None, (), False

    def end_wait(self) -> None:
        """Resume from what is cached: the sequence starts."""
        self.withdraw_lookup()
        self._num_asked = 0


class _PrefixState:
    """Prefix state of one sequence: the last lookup in memory, what it fetches from tiers, and its insertion."""

    def __init__(self, sequence: Sequence, fetch: _TierFetch) -> None:
        self._sequence = sequence
        self.fetch = fetch
        # Positions where other requests will resume: prefill pauses there if the model needs checkpoints.
        self.pauses = set(sequence.request.resume_at)
        self.insertion: Insertion | None = None  # None: the sequence waits
        self.turn: ConversationTurn | None = None  # of its conversation; None: it has not begun, or counts as none
        self.has_started = False  # it had a lease before
        self._cached: CachedPrefix | None = None  # result of the last lookup
        self._cached_version = 0  # of the entry table, at that lookup
        self._common_tokens: dict[int, int] = {}  # length of the prefix shared with another sequence, by its id

    def find_cached(self, cache: PrefixCache) -> CachedPrefix:
        """Return the cached prefix. The lookup is repeated only after the entry table has changed."""
        if self._cached is None or self._cached_version != cache.version:
            self._cached = cache.lookup(self._sequence.lookup_ids, self._sequence.request.salt)
            self._cached_version = cache.version
        self.fetch.record_cached(self._cached.num_tokens)
        return self._cached

    def end_wait(self) -> None:
        """Drop what only a waiting sequence needs."""
        self._cached = None
        self.fetch.end_wait()

    def common_tokens(self, other: Sequence) -> int:
        """Return the length of the prefix that two prompts have in common, without their last tokens."""
        if self._sequence.request.salt != other.request.salt:
            return 0
        if other.id not in self._common_tokens:
            self._common_tokens[other.id] = common_prefix_len(self._sequence.lookup_ids, other.lookup_ids)
        return self._common_tokens[other.id]

    def pause_at_blocks(self) -> None:
        """Have prefill pause at the last end of a block before each pause, and before the end of the prompt."""
        ends = {*self.pauses, len(self._sequence.tokens) - 1}
        self.pauses |= {end - end % BLOCK_TOKENS for end in ends if end >= BLOCK_TOKENS}

    def begin_turn(self, conversations: ConversationTracker) -> None:
        """Note for the client where the prompt diverges from its conversation's last turn, and supersede the branch
        that it leaves behind."""
        sequence, request = self._sequence, self._sequence.request
        if request.is_first_choice:
            ids = sequence.ids()
            sequence.divergence = conversations.divergence(
                request.salt, request.session, request.conversation_digest, ids
            )
            self.turn = conversations.begin_turn(request.salt, request.session, ids)

    def end_turn(self, conversations: ConversationTracker) -> None:
        """Record the prompt and the reply of a sequence that was started."""
        sequence, request = self._sequence, self._sequence.request
        if self.turn is not None and sequence.cached_tokens is not None:
            conversations.end_turn(
                *(request.salt, request.session, self.turn, request.conversation_digest),
                *(sequence.ids(), len(request.prompt)),
            )


class PrefixLookup:
    """Prefix state of every sequence, and all calls of the cache on behalf of a sequence."""

    def __init__(self, prefix_cache: PrefixCache, runner: ModelRunner, *, checkpoint_every_tokens: int) -> None:
        self._prefix_cache = prefix_cache
        self._failures = prefix_cache.failures
        self._runner = runner
        self._needs_checkpoints = prefix_cache.needs_checkpoints  # read once: no step depends on the answer
        # A shared tier has checkpoints at multiples of a block only.
        self._is_shared = prefix_cache.shared is not None
        self._checkpoint_every = (
            _round_up_to_block(checkpoint_every_tokens) if self._is_shared else checkpoint_every_tokens
        )
        self._raw_window = prefix_cache.transcoder.precision.raw_window  # of running sequences
        self._states: dict[int, _PrefixState] = {}  # by id of their sequence
        # Spans of a broken entry table that running sequences read, by id: no table counts their bytes.
        self._orphaned_spans: dict[int, tuple[Span, ...]] = {}

    @property
    def orphaned_bytes(self) -> int:
        """Bytes of the spans that running sequences read from an entry table that has failed."""
        return sum(span.nbytes for span in {span for spans in self._orphaned_spans.values() for span in spans})

    def track_sequence(self, sequence: Sequence) -> None:
        """Begin the prefix state of a sequence that has arrived."""
        fetch = _TierFetch(sequence, self._prefix_cache.prefetcher, self._prefix_cache.reclaimer)
        self._states[sequence.id] = _PrefixState(sequence, fetch)

    # Lookup in memory.

    def cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Return what the sequence would resume from if it started now."""

        def find() -> CachedPrefix:
            self._prefix_cache.evictor.expire()
            return self._states[sequence.id].find_cached(self._prefix_cache)

        return self._failures.attempt("lookups", find, NO_PREFIX)

    def awaits_encoding(self, sequence: Sequence) -> bool:
        """Whether the cached prefix has to be encoded before the sequence starts. The transcoder does that next."""
        cached = self.cached_prefix(sequence)
        return self._failures.attempt("lookups", lambda: self._prefix_cache.waits_for_encoding(cached), otherwise=False)

    def is_blocked(self, sequence: Sequence, ahead: Iterable[Sequence]) -> bool:
        """Whether the sequence waits for a tier, or for the prefill of a sequence of `ahead`."""
        return self.awaits_tier(sequence) or self._pause_leader(sequence, ahead)

    def _pause_leader(self, sequence: Sequence, ahead: Iterable[Sequence]) -> bool:
        """Have a sequence ahead, which is about to compute a prefix of this one, pause where the two diverge. Return
        True where there is one: this sequence waits and resumes from what the other computes."""
        if not self._prefix_cache.can_share:
            return False
        state, cached_tokens = self._states[sequence.id], self.cached_prefix(sequence).num_tokens
        for other in ahead:
            common = state.common_tokens(other)
            if common - cached_tokens >= MIN_FOLLOW_TOKENS and other.num_computed < common:
                self._states[other.id].pauses.add(common)
                return True
        return False

    # Loads from tiers.

    def refresh(self, sequence: Sequence, prefill_tokens_s: float) -> CachedPrefix:
        """Ask the tiers once, load where that is faster than computing, and return the cached prefix."""
        fetch = self._states[sequence.id].fetch

        def refresh() -> bool:
            fetch.ask_once(prefill_tokens_s)
            fetch.follow(self._tier_answers(fetch, prefill_tokens_s), prefill_tokens_s)
            return True

        if not self._failures.attempt("lookups", refresh, otherwise=False):
            self._end_fetch(fetch)
        return self.cached_prefix(sequence)

    def _tier_answers(self, fetch: _TierFetch, prefill_tokens_s: float) -> TierAnswers:
        """Return the answers of the tiers so far. They and the time enter the lookup here alone; the measured speeds of
        the tiers enter in `Prefetcher`."""
        now_s, lookup, load = time.monotonic(), fetch.lookup, fetch.load
        is_answered = lookup is not None and lookup.is_done
        return TierAnswers(
            offers=lookup.offers if lookup is not None and is_answered else None,
            is_lookup_awaited=lookup is not None and not is_answered and now_s < lookup.deadline_s(LOOKUP_S),
            # Blocks that came and are not inserted yet may be all that a late load lacks.
            is_load_over=load is not None
            and (load.is_done or (now_s >= load.deadline_s(prefill_tokens_s) and not load.has_arrived)),
        )

    def awaits_tier(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for a load, or for the answer of a tier."""
        return self._states[sequence.id].fetch.is_awaited

    def seconds_to_wait(self, sequence: Sequence, prefill_tokens_s: float) -> float:
        """Return the time until the sequence gives up what it waits for from a tier; infinity where that is nothing."""
        return self._states[sequence.id].fetch.deadline_s(prefill_tokens_s) - time.monotonic()

    def _end_fetch(self, fetch: _TierFetch) -> None:
        """End the lookup and the load of a sequence that does not wait for them any more."""
        fetch.withdraw_lookup()
        load, fetch.load = fetch.load, None
        if load is not None:
            self._failures.attempt_or_break("releases", lambda: self._prefix_cache.prefetcher.end_load(load), None)

    # A sequence that runs.

    def start(self, sequence: Sequence, capacity_for: Callable[[int], int]) -> bool:
        """Lease the cached prefix of a sequence, make its KV cache, and open its insertion. `capacity_for` maps the
        number of cached tokens to the capacity of the KV cache; 0: memory has no space for it.

        Return False where the sequence keeps waiting: the cached prefix may have shrunk since it was scheduled.
        """
        state = self._states[sequence.id]
        cached_tokens = self.cached_prefix(sequence).num_tokens
        if self._failures.attempt("lookups", lambda: state.fetch.needs_new_lookup(cached_tokens), otherwise=False):
            state.fetch.reset_lookup()
            return False
        if self.awaits_encoding(sequence):
            return False
        request, is_first = sequence.request, sequence.cached_tokens is None
        if is_first:
            self._failures.attempt("lookups", lambda: state.begin_turn(self._prefix_cache.conversations), None)
        lease = self._failures.attempt(
            "lookups",
            lambda: self._prefix_cache.lease(
                sequence.lookup_ids, request.salt, is_new=not state.has_started, session=request.session
            ),
            Lease(ReuseClass.FRESH),
        )
        capacity = capacity_for(lease.num_tokens)
        if not capacity:
            self._failures.attempt_or_break("releases", lambda: self._prefix_cache.release(lease), None)
            return False
        state.has_started = True
        if self._is_shared and self._needs_checkpoints:
            state.pause_at_blocks()
        state.end_wait()
        cache = sequence.cache = self._runner.new_cache(capacity, lease.prefix, sequence.kv_format.raw_tokens)
        insertion = self._failures.attempt("commits", lambda: self._open_insertion(sequence, lease, cache), None)
        state.insertion = self._prefix_cache.insert_detached(lease) if insertion is None else insertion
        if is_first:
            sequence.cached_tokens = lease.num_tokens
            self._failures.attempt("lookups", lambda: self._explain_start(sequence), None)
        return True

    def _open_insertion(self, sequence: Sequence, lease: Lease, cache: SequenceCache) -> Insertion:
        insertion = self._prefix_cache.insert(lease, cache, sequence.request.salt, sequence.request.resume_at)
        if sequence.kv_format.plan is not None and not self._prefix_cache.transcoder.precision.config.encodes_running:
            self._prefix_cache.transcoder.retarget(insertion.entry, PrecisionTarget(sequence.kv_format.plan))
        return insertion

    def _explain_start(self, sequence: Sequence) -> None:
        """Note for the client, before the first token, why the rest of the prompt is not cached, and whether the quota
        allows its pin, as far as that can be known."""
        sequence.miss_reason = self._prefix_cache.matcher.miss_reason(sequence.ids(), sequence.request.salt)
        request, pins = sequence.request, self._prefix_cache.pins
        if request.pin is None:
            return
        pinned, token_bytes = request.prompt[: request.pin.num_tokens], self._runner.layout.token_bytes
        term = _pin_term(request, request.pin, self._prefix_cache.table.max_bytes)
        if not pins.can_pin_until(pinned, request.salt, term, token_bytes):
            sequence.unpinned_reason = OVER_QUOTA

    def chunk_limit(self, sequence: Sequence, at: int) -> int | None:
        """Return the number of tokens from `at` to the next checkpoint, where prefill pauses. None: there is none."""
        if not self._needs_checkpoints:
            return None
        pauses = [pause - at for pause in self._states[sequence.id].pauses if pause > at]
        return min([*pauses, self._checkpoint_every - at % self._checkpoint_every])

    def commit_chunk(self, sequence: Sequence) -> None:
        """Make the tokens that a prompt chunk has computed visible to other requests."""
        state, cache = self._states[sequence.id], sequence.cache
        if state.insertion is None or cache is None:
            return
        at, is_prompt_end = cache.num_tokens, not sequence.prefill_left
        pauses = at in state.pauses or at % self._checkpoint_every == 0 or is_prompt_end
        has_checkpoint = self._needs_checkpoints and pauses
        self._commit(sequence, state, has_checkpoint=has_checkpoint, is_prompt_end=is_prompt_end)
        _seal_segments(cache, sequence.kv_format, ENCODE_TOKENS, self._raw_window)
        self._record_growth(state, at)

    def commit_token(self, sequence: Sequence) -> None:
        """Have the tokens of a reply encoded as soon as a segment is full, and checkpoints taken for a shared tier."""
        state, cache = self._states[sequence.id], sequence.cache
        if sequence.num_generated % ENCODE_TOKENS == 0:
            self._record_growth(state, sequence.num_computed)
        if cache is None:
            return
        self._commit_shared_checkpoint(sequence, state, cache)
        _seal_segments(cache, sequence.kv_format, sequence.kv_format.raw_tokens or 0, self._raw_window)

    def _commit_shared_checkpoint(self, sequence: Sequence, state: _PrefixState, cache: SequenceCache) -> None:
        """Take a checkpoint from which another server can resume a reply."""
        if not self._is_shared or not self._needs_checkpoints or state.insertion is None:
            return
        if cache.num_tokens % BLOCK_TOKENS == 0 and cache.num_tokens > cache.start:
            self._runner.disband()  # gives each sequence its own state
            self._commit(sequence, state, has_checkpoint=True)

    def drop_checkpoints(self, sequence: Sequence) -> bool:
        """Drop all checkpoints of a running sequence that has no memory to grow. Return False where it has none."""
        insertion = self._states[sequence.id].insertion
        return insertion is not None and self._failures.attempt("reclaims", insertion.drop_checkpoints, otherwise=False)

    def held_entries(self, sequence: Sequence) -> set[Entry]:
        """Return the entries that a running sequence reads or writes."""
        insertion = self._states[sequence.id].insertion
        return set() if insertion is None else insertion.entries

    def leased_ranges(self, sequence: Sequence) -> list[tuple[SpanRange, int]]:
        """Return the cached spans that a running sequence reads, each with the number of its readers."""
        insertion = self._states[sequence.id].insertion
        lease = None if insertion is None else insertion.lease
        return [] if lease is None else [(run, lease.readers(run.span)) for run in lease.ranges]

    def num_readers(self, sequence: Sequence) -> int:
        """Return how many sequences read the KV that this sequence computes, itself included."""
        insertion = self._states[sequence.id].insertion
        return 1 if insertion is None else 1 + insertion.entry.num_leases

    # End.

    def finish(self, sequence: Sequence, outcome: Outcome) -> None:
        """Release what a sequence holds of the cache; what it has computed stays cached."""
        state = self._states[sequence.id] if outcome == "preempted" else self._states.pop(sequence.id)
        self._orphaned_spans.pop(sequence.id, None)
        if outcome != "abandoned":
            self._close_insertion(sequence, state)
        self._end_fetch(state.fetch)
        if outcome == "preempted":
            state.fetch.reset_lookup()
        elif outcome == "ended":
            self._failures.attempt("commits", lambda: state.end_turn(self._prefix_cache.conversations), None)
            if sequence.cache is not None:
                self._failures.attempt("commits", lambda: self._pin_prompt(sequence), None)

    def take_over(self, failed: PrefixLookup, sequences: SequenceTable) -> None:
        """Continue with the sequences of a core whose entry table has failed. Running sequences keep the KV that they
        read and leave nothing in the new cache; waiting sequences find it empty."""
        for sequence in sequences.all:
            before = failed._states[sequence.id]
            before.fetch.withdraw_lookup()
            read = [] if before.insertion is None else [run.span for run in before.insertion.lease.ranges]
            if spans := (*failed._orphaned_spans.get(sequence.id, ()), *read):
                self._orphaned_spans[sequence.id] = spans
            self.track_sequence(sequence)
            state = self._states[sequence.id]
            state.pauses, state.has_started, state.turn = before.pauses, before.has_started, before.turn
        for sequence in sequences.running.values():
            self._states[sequence.id].insertion = self._prefix_cache.insert_detached(Lease(ReuseClass.FRESH))

    def _close_insertion(self, sequence: Sequence, state: _PrefixState) -> None:
        insertion = state.insertion
        if insertion is None or sequence.cache is None:
            return
        has_computed = sequence.cache.num_tokens > sequence.cache.start
        self._commit(sequence, state, has_checkpoint=self._needs_checkpoints and has_computed)
        self._failures.attempt_or_break("commits", insertion.close, None)
        state.insertion = None

    def _pin_prompt(self, sequence: Sequence) -> None:
        """Set the pin that a request asks for. A preempted sequence makes space instead."""
        request = sequence.request
        if request.pin is None or sequence.unpinned_reason or sequence.num_computed < len(request.prompt) - 1:
            return
        pinned = request.prompt[: request.pin.num_tokens]
        term = _pin_term(request, request.pin, self._prefix_cache.table.max_bytes)
        self._prefix_cache.pins.pin_until(pinned, request.salt, term)

    # Commits: one that fails detaches the insertion.

    def _commit(
        self, sequence: Sequence, state: _PrefixState, *, has_checkpoint: bool, is_prompt_end: bool = False
    ) -> None:
        insertion, cache = state.insertion, sequence.cache
        if insertion is None or cache is None:
            return

        def commit() -> None:
            # A pending step may have computed a token that the reply never got. It is left out, and so is a
            # checkpoint, because the state has seen that token.
            ids = sequence.ids()
            num_tokens = min(cache.num_tokens, len(ids))
            checkpoint = take_checkpoint(cache) if has_checkpoint and num_tokens == cache.num_tokens else None
            insertion.commit(ids[:num_tokens], checkpoint, is_end=is_prompt_end)

        self._insert(insertion, commit)

    def _record_growth(self, state: _PrefixState, num_tokens: int) -> None:
        insertion = state.insertion
        if insertion is not None:
            self._insert(insertion, lambda: insertion.has_grown(num_tokens))

    def _insert(self, insertion: Insertion, operation: Callable[[], None]) -> None:
        def run() -> bool:
            operation()
            return True

        if not self._failures.attempt("commits", run, otherwise=False):
            insertion.detach()


def _round_up_to_block(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _seal_segments(cache: SequenceCache, kv_format: KvFormat, num_tokens: int, window: RawWindow) -> None:
    """Encode the KV buffer of a sequence that fits in memory only when encoded, as soon as `num_tokens` are raw, up to
    the end of a codec's group. The tokens of `window` stay raw."""
    if kv_format.plan is None or cache.unsealed_tokens < num_tokens:
        return
    end = cache.num_tokens - window.recent_tokens
    recent = window.recent_tokens + end % GROUP_TOKENS
    cache.encode_past(kv_format.plan.pairs, RawWindow(window.first_tokens, recent))


def _pin_term(request: Request, pin: PinRequest, max_bytes: int) -> Term:
    return Term(_pin_name(request), pin.ttl_s, pin.quota.of(max_bytes))


def _pin_name(request: Request) -> str:
    if request.session:
        return f"session {request.session}"
    first = np.array(request.prompt[:NAMING_TOKENS], np.int32)
    return f"begins {hashlib.sha256(first.tobytes()).hexdigest()}"
