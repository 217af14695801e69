"""Precision policy: the format of each entry, and which entries step down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.kv.gather import gather_some, has_to_gather
from kvstrata.kv.layout import LayerSpec, Layout
from kvstrata.kv.precision_plan import CodecPair, PrecisionPlan, raw_plan
from kvstrata.kv.raw_window import RawWindow
from kvstrata.kv.transcode import (
    LayerTranscoder,
    are_checkpoints_transcoded,
    becomes,
    encodable_tokens,
    encode_live,
    has_to_encode,
    is_transcoded,
    transcode_checkpoints,
)
from kvstrata.prefix_cache.config import CacheConfig, CacheLimits
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.entry_table import EntryTable
from kvstrata.prefix_cache.jobs import Job
from kvstrata.prefix_cache.ladder import HIGH, LOW, Bits, Ladder, LadderMove, SpanPrecision


class PrecisionPolicy:
    """Decides which plan each entry is brought to, and makes the jobs that do it."""

    def __init__(self, layout: Layout, target: PrecisionPlan, config: CacheConfig, limits: CacheLimits) -> None:
        self.layout = layout
        self._raw = raw_plan(layout)
        self.target = target  # plan of new spans
        self.config = config
        self.gathers = limits.max_arrays is not None  # the small planes of several layers into one array
        self.raw_window = RawWindow(config.first_raw_tokens, config.recent_raw_tokens)  # of running sequences
        self._token_bytes_of: dict[CodecPair, float] = {}

    def pending_plan(self, entry: Entry) -> PrecisionPlan | None:
        """Return the plan that an entry has to be brought to now; None: the entry stays as it is."""
        if entry.is_stuck:
            return None
        span, wanted = entry.span, self.target_plan(entry)
        if entry.is_running:
            return wanted if self._has_to_seal(entry, wanted) else None
        is_done = all(is_transcoded(span, i, wanted.pairs[i], upward=entry.is_upward) for i in span.layers)
        is_done = is_done and are_checkpoints_transcoded(span, wanted)
        return None if is_done and not (self.gathers and has_to_gather(span)) else wanted

    def target_plan(self, entry: Entry) -> PrecisionPlan:
        """Return the plan that an entry should be under, or below; for a running entry, the plan of its sealed part."""
        if entry.target is not None:
            return entry.target.plan
        if (entry.is_running or entry.num_leases) and not self.config.encodes_running:
            # The owner and the readers continue over the values that they began with.
            return self._raw
        is_long = entry.sequence_tokens >= self.config.min_quantize_tokens
        return self.target if entry.is_running or is_long else self._raw

    def was_short(self, entry: Entry) -> bool:
        """Whether an entry stays raw unless a longer sequence resumes from it."""
        return entry.target is None and entry.span.end < self.config.min_quantize_tokens

    def final_codecs(self, entry: Entry) -> dict[int, list[CodecPair]]:
        """Return the codecs that each layer has when the pending work on an entry is done."""
        wanted, specs = self.target_plan(entry).pairs, self.layout.flat()
        return {i: [_lower(pair, wanted[i], specs[i]) for pair in entry.span.codec_pairs(i)] for i in entry.span.layers}

    def lowers(self, entry: Entry, plan: PrecisionPlan) -> bool:
        """Whether a plan takes bits from an entry's final codecs."""
        specs = self.layout.flat()
        return any(
            _lower(pair, plan.pairs[layer], specs[layer]) != pair
            for layer, pairs in self.final_codecs(entry).items()
            for pair in pairs
        )

    def pending_bytes(self, entry: Entry) -> int:
        """Return how many bytes the work on an entry is about to free. A running sequence keeps the bytes that its
        entry frees, so they do not count."""
        if entry.is_running:
            return 0
        wanted_bytes = self._token_bytes(self.target_plan(entry)) * entry.span.num_tokens
        return max(0, int(entry.nbytes - entry.span.checkpoint_bytes - wanted_bytes))

    def target_token_bytes(self) -> float:
        """Return the bytes of a token in new spans."""
        return self._token_bytes(self.target)

    def _token_bytes(self, plan: PrecisionPlan) -> float:
        # Plans are many, and the codec pairs that they are made from are few.
        codecs = plan.k, plan.v
        if codecs not in self._token_bytes_of:
            self._token_bytes_of[codecs] = plan.token_bytes(self.layout)
        return self._token_bytes_of[codecs]

    def _has_to_seal(self, entry: Entry, plan: PrecisionPlan) -> bool:
        """Whether a running entry has enough new tokens to be encoded, or sealed tokens that have to step down."""
        span, window = entry.span, self.raw_window
        return not plan.is_raw and any(has_to_encode(span, i, plan.pairs[i], window) for i in span.layers)

    def job(self, entry: Entry, plan: PrecisionPlan) -> Job:
        """Make the job that brings an entry to a plan."""
        if not entry.is_running:
            return self._transcode(entry, plan)
        sealed_to = None if entry.target is None else entry.target.sealed_to
        return self._seal(entry, plan, entry.span.written_end if sealed_to is None else sealed_to)

    def _seal(self, entry: Entry, plan: PrecisionPlan, up_to: int) -> Job:
        # All layers are sealed up to the same token, whatever the owner writes between the job's steps.
        span = entry.span
        for layer in span.layers:
            yield from encode_live(span, layer, plan.pairs[layer], self.raw_window, up_to=up_to)
            yield

    def _transcode(self, entry: Entry, plan: PrecisionPlan) -> Job:
        for layer in entry.span.layers:
            transcoding = LayerTranscoder(layer, plan.pairs[layer])
            while transcoding.advance(entry.span, upward=entry.is_upward):
                yield
            yield
        yield from transcode_checkpoints(entry.span, plan)
        while self.gathers and gather_some(entry.span):
            yield


def _lower(pair: CodecPair, wanted: CodecPair, spec: LayerSpec) -> CodecPair:
    k, v = becomes(pair[0], wanted[0], spec.k_dim, spec.dtype), becomes(pair[1], wanted[1], spec.v_dim, spec.dtype)
    return k, v


PlanOf = Callable[[Codec, Codec], PrecisionPlan]  # from the codec of K and the codec of V


@dataclass(frozen=True)
class StepDown:
    """Decision that an entry is brought to a lower plan. The caller applies it with `Transcoder.step_down`."""

    entry: Entry
    plan: PrecisionPlan


class StepDownPolicy:
    """Chooses the entries that step down: under memory pressure, and as their sequences grow. Changes no entry."""

    def __init__(self, table: EntryTable, precision: PrecisionPolicy, plan_of: PlanOf) -> None:
        config = precision.config
        self._candidates = table.candidates
        self._precision = precision
        self._plan_of = plan_of
        self._is_dynamic = config.dynamic
        self._plans_by_length = [(tokens, plan_of(codec, codec)) for tokens, codec in config.dynamic_at]
        self._token_bytes_of: dict[Bits, float] = {}
        self._ladder: Ladder[Entry] = Ladder(Bits(config.floor_bits, config.floor_bits), self._token_bytes)
        self._changed = table.dirty_sets.new_dirty_set(self._ladder.discard_span)
        self._exhausted_bytes = 0  # bytes in use when nothing was left to step down: retry only above them

    def choose_early(self, used_bytes: int, limit_bytes: int) -> list[StepDown]:
        """Choose ahead of need, from `HIGH` of the limit on and down to `LOW`, so that steps do not come one by one."""
        if used_bytes <= HIGH * limit_bytes:
            self._exhausted_bytes = 0
            return []
        if used_bytes <= self._exhausted_bytes:
            return []
        chosen = self.choose(int(used_bytes - LOW * limit_bytes))
        self._exhausted_bytes = 0 if chosen else used_bytes
        return chosen

    def choose(self, need_bytes: int) -> list[StepDown]:
        """Choose entries until their steps free `need_bytes`, as far as the floors allow. The chosen entries count as
        lower from now on."""
        if not self._is_dynamic or need_bytes <= 0:
            return []
        self.update_ladder()
        return [StepDown(move.id, self._plan_after(move)) for move in self._ladder.choose(need_bytes)]

    def update_ladder(self) -> None:
        """Bring the ladder up to date with the entries that have changed."""
        for entry in self._changed.drain():
            if entry.span.layers:
                self._ladder.put_span(entry, self._precision_of(entry))
            else:
                self._ladder.discard_span(entry)

    def for_length(self, entries: Iterable[Entry], num_tokens: int) -> list[StepDown]:
        """Choose among the entries of a sequence that has grown to `num_tokens`."""
        plans = [plan for tokens, plan in self._plans_by_length if num_tokens >= tokens]
        if not plans:
            return []
        # A longer sequence that shares an entry may have taken it further down.
        return [StepDown(entry, plans[-1]) for entry in entries if self._precision.lowers(entry, plans[-1])]

    def _precision_of(self, entry: Entry) -> SpanPrecision:
        specs = self._precision.layout.flat()
        layers = [(8 * specs[i].dtype.size, pairs) for i, pairs in self._precision.final_codecs(entry).items()]
        # A layer may have more bits than the others, which show how far the span has stepped down.
        bits = Bits(
            k=min(max(_bits(k, raw_bits) for k, _ in pairs) for raw_bits, pairs in layers),
            v=min(max(_bits(v, raw_bits) for _, v in pairs) for raw_bits, pairs in layers),
        )
        if entry.is_running:
            return SpanPrecision(bits, encodable_tokens(entry.span, self._precision.raw_window), math.inf)
        return SpanPrecision(bits, entry.span.num_tokens, self._candidates.last_use_s(entry))

    def _plan_after(self, move: LadderMove[Entry]) -> PrecisionPlan:
        wanted = self._precision.target_plan(move.id)
        k = wanted.k if move.after.k == move.before.k else _codec(move.after.k)
        v = wanted.v if move.after.v == move.before.v else _codec(move.after.v)
        return self._plan_of(k, v)

    def _token_bytes(self, bits: Bits) -> float:
        """Return the bytes of a token. A side that cannot step down counts as raw: only differences matter."""
        if bits not in self._token_bytes_of:
            plan = self._plan_of(_codec(bits.k), _codec(bits.v))
            self._token_bytes_of[bits] = plan.token_bytes(self._precision.layout)
        return self._token_bytes_of[bits]


def _bits(codec: Codec, raw_bits: int) -> int:
    if isinstance(codec, RawCodec):
        return raw_bits
    # A codec of another family would have to be decoded and encoded again, at a loss: its span stays.
    return codec.bits if isinstance(codec, PlanesCodec) else 0


def _codec(bits: int) -> Codec:
    return PlanesCodec(bits) if 0 < bits <= 8 else RawCodec()
