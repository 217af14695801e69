"""Precision policy: the format of each entry, and which entries step down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.layers.raw_window import RawWindow
from kvstrata.layers.sequence import Pair
from kvstrata.prefix_cache.config import LadderConfig, PrecisionConfig
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable, EvictionCandidates
from kvstrata.prefix_cache.jobs import Job
from kvstrata.prefix_cache.ladder import HIGH, LOW, Bits, Ladder, LadderMove, SpanPrecision
from kvstrata.spans.convert import becomes
from kvstrata.spans.gather import gather_some, has_to_gather
from kvstrata.spans.live import has_to_seal, sealable_tokens, sealing, written_end
from kvstrata.spans.plan import Plan, raw_plan
from kvstrata.spans.rewrite import LayerRewrite, is_under, marks_are_under, rewriting_marks


class PrecisionPolicy:
    def __init__(self, layout: Layout, target: Plan, options: PrecisionConfig) -> None:
        self.layout = layout
        self._raw = raw_plan(layout)
        self.target = target  # of new spans
        self.options = options
        self.window = RawWindow(options.first_raw_tokens, options.recent_raw_tokens)  # of running sequences
        self._sizes: dict[Pair, float] = {}  # bytes of a token

    def pending_plan(self, entry: Entry) -> Plan | None:
        """What it should be stored as now; None: as it is."""
        if entry.is_stuck:
            return None
        span, wanted = entry.span, self.target_plan(entry)
        if entry.is_running:
            return wanted if self._has_to_seal(entry, wanted) else None
        done = all(is_under(span, i, wanted.pairs[i], upward=entry.is_upward) for i in span.layers)
        done = done and marks_are_under(span, wanted)
        return None if done and not (self.options.gathers and has_to_gather(span, self.options.apart)) else wanted

    def target_plan(self, entry: Entry) -> Plan:
        """What it should be stored as, or lower; of a running one what is to be encoded."""
        if entry.target is not None:
            return entry.target
        if (entry.is_running or entry.num_leases) and not self.options.live:
            # Its owner and its readers go on over the values that they began with.
            return self._raw
        is_long = entry.sequence_tokens >= self.options.min_quantize_tokens
        return self.target if entry.is_running or is_long else self._raw

    def was_short(self, entry: Entry) -> bool:
        """Whether an entry stays raw unless a longer sequence goes on from it."""
        return entry.target is None and entry.span.end < self.options.min_quantize_tokens

    def expected(self, entry: Entry) -> dict[int, list[Pair]]:
        """The codecs that each layer is under when the work on it is done."""
        wanted, specs = self.target_plan(entry).pairs, self.layout.flat()
        return {i: [_lower(pair, wanted[i], specs[i]) for pair in entry.span.pairs(i)] for i in entry.span.layers}

    def lowers(self, entry: Entry, plan: Plan) -> bool:
        """Whether a plan takes bits from what it is expected to have."""
        specs = self.layout.flat()
        return any(
            _lower(pair, plan.pairs[layer], specs[layer]) != pair
            for layer, pairs in self.expected(entry).items()
            for pair in pairs
        )

    def pending_bytes(self, entry: Entry) -> int:
        """What work on it is about to free. Of a running sequence nothing: that is its own."""
        if entry.is_running:
            return 0
        wanted_bytes = self._token_bytes(self.target_plan(entry)) * entry.span.num_tokens
        return max(0, int(entry.nbytes - entry.span.mark_bytes - wanted_bytes))

    def target_token_bytes(self) -> float:
        """Of a token that is stored from now on."""
        return self._token_bytes(self.target)

    def _token_bytes(self, plan: Plan) -> float:
        # There are many plans, and few pairs that they are made from.
        asked = plan.k, plan.v
        if asked not in self._sizes:
            self._sizes[asked] = plan.token_bytes(self.layout)
        return self._sizes[asked]

    def _has_to_seal(self, entry: Entry, plan: Plan) -> bool:
        """A running sequence: whether enough has come to be encoded, or what is encoded has to step down."""
        span, window = entry.span, self.window
        return not plan.is_raw and any(has_to_seal(span, i, plan.pairs[i], window) for i in span.layers)

    def job(self, entry: Entry, plan: Plan) -> Job:
        if not entry.is_running:
            return self._rewrite(entry, plan)
        return self._seal(entry, plan, written_end(entry.span) if entry.sealed_to is None else entry.sealed_to)

    def _seal(self, entry: Entry, plan: Plan, up_to: int) -> Job:
        # All layers up to the same token, whatever comes while the job waits for its next turn.
        span = entry.span
        for layer in span.layers:
            yield from sealing(span, layer, plan.pairs[layer], self.window, up_to=up_to)
            yield

    def _rewrite(self, entry: Entry, plan: Plan) -> Job:
        for layer in entry.span.layers:
            rewriting = LayerRewrite(layer, plan.pairs[layer])
            while rewriting.advance(entry.span, upward=entry.is_upward):
                yield
            yield
        yield from rewriting_marks(entry.span, plan)
        while self.options.gathers and gather_some(entry.span, self.options.apart):
            yield


def _lower(pair: Pair, wanted: Pair, spec: LayerSpec) -> Pair:
    k, v = becomes(pair[0], wanted[0], spec.k_dim, spec.dtype), becomes(pair[1], wanted[1], spec.v_dim, spec.dtype)
    return k, v


PlanOf = Callable[[Codec, Codec], Plan]  # from a K and a V precision


@dataclass(frozen=True)
class StepDown:
    """Decision that an entry is to be stored under a lower plan. The caller applies it (`Rewriting.step_down`)."""

    entry: Entry
    plan: Plan


class StepDownPolicy:
    def __init__(
        self,
        shelf: EntryTable,
        leaves: EvictionCandidates,
        precision: PrecisionPolicy,
        plan_of: PlanOf,
        options: LadderConfig,
    ) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._precision = precision
        self._plan_of = plan_of
        self._options = options
        self._by_length = [(tokens, plan_of(codec, codec)) for tokens, codec in options.by_length]
        self._sizes: dict[Bits, float] = {}  # bytes of a token
        self._ladder: Ladder[Entry] = Ladder(options.floors, self._token_bytes)
        self._changed = shelf.dirty_sets.new_dirty_set(self._ladder.discard_span)
        self._in_vain_bytes = 0  # with so much in use there was nothing left to step down

    def choose_early(self, used_bytes: int, limit_bytes: int) -> list[StepDown]:
        """Choose ahead of need. Begins late and goes on for a while, so that it does not saw."""
        if used_bytes <= HIGH * limit_bytes:
            self._in_vain_bytes = 0
            return []
        if used_bytes <= self._in_vain_bytes:
            return []
        chosen = self.choose(int(used_bytes - LOW * limit_bytes))
        self._in_vain_bytes = 0 if chosen else used_bytes
        return chosen

    def choose(self, need_bytes: int) -> list[StepDown]:
        """Choose spans until so much would be free, as far as the floors allow. They count as lower from now on."""
        if not self._options.by_pressure or need_bytes <= 0:
            return []
        self._look()
        return [StepDown(move.id, self._plan_after(move)) for move in self._ladder.choose(need_bytes)]

    def _look(self) -> None:
        """Where the entries stand that have changed."""
        for entry in self._changed.drain():
            if entry.span.layers:
                self._ladder.put_span(entry, self._standing(entry))
            else:
                self._ladder.discard_span(entry)

    def for_length(self, entries: Iterable[Entry], num_tokens: int) -> list[StepDown]:
        """Choose among the entries of a sequence that has so many tokens now."""
        plans = [plan for tokens, plan in self._by_length if num_tokens >= tokens]
        if not plans:
            return []
        # A longer one that shares it may have taken it further down.
        return [StepDown(entry, plans[-1]) for entry in entries if self._precision.lowers(entry, plans[-1])]

    def _standing(self, entry: Entry) -> SpanPrecision:
        specs = self._precision.layout.flat()
        layers = [(8 * specs[i].dtype.size, pairs) for i, pairs in self._precision.expected(entry).items()]
        # Layers at the edges keep more bits: the others tell how far it has stepped down.
        bits = Bits(
            k=min(max(_bits(k, raw_bits) for k, _ in pairs) for raw_bits, pairs in layers),
            v=min(max(_bits(v, raw_bits) for _, v in pairs) for raw_bits, pairs in layers),
        )
        if entry.is_running:
            return SpanPrecision(bits, sealable_tokens(entry.span, self._precision.window), math.inf)
        return SpanPrecision(bits, entry.span.num_tokens, self._leaves.last_use_s(entry))

    def _plan_after(self, move: LadderMove[Entry]) -> Plan:
        wanted = self._precision.target_plan(move.id)
        k = wanted.k if move.after.k == move.before.k else _codec(move.after.k)
        v = wanted.v if move.after.v == move.before.v else _codec(move.after.v)
        return self._plan_of(k, v)

    def _token_bytes(self, bits: Bits) -> float:
        """What cannot step down counts like raw: only differences matter."""
        if bits not in self._sizes:
            self._sizes[bits] = self._plan_of(_codec(bits.k), _codec(bits.v)).token_bytes(self._precision.layout)
        return self._sizes[bits]


def _bits(codec: Codec, raw_bits: int) -> int:
    if isinstance(codec, RawCodec):
        return raw_bits
    # Another family would have to be decoded and encoded again, at a loss: it stays.
    return codec.bits if isinstance(codec, PlanesCodec) else 0


def _codec(bits: int) -> Codec:
    return PlanesCodec(bits) if 0 < bits <= 8 else RawCodec()
