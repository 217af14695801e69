"""What each entry should be stored as, and the jobs that bring it there.

New spans follow the target. A change that a client asked for gives entries a target of their own, which holds for those
that run too; without it the values under a running sequence do not change.
"""

from __future__ import annotations

from kvstrata.layers.kinds import LayerSpec, Layout
from kvstrata.layers.raw_window import RawWindow
from kvstrata.layers.sequence import Pair
from kvstrata.spans.convert import becomes
from kvstrata.spans.gather import gather_some, has_to_gather
from kvstrata.spans.live import has_to_seal, sealing, written_end
from kvstrata.spans.plan import Plan, raw_plan
from kvstrata.spans.rewrite import LayerRewrite, is_under, marks_are_under, rewriting_marks
from kvstrata.store.entry import Entry
from kvstrata.store.options import PrecisionOptions
from kvstrata.store.precision.mover import Job


class Precision:
    def __init__(self, layout: Layout, target: Plan, options: PrecisionOptions) -> None:
        self.layout = layout
        self._raw = raw_plan(layout)
        self.target = target  # of new spans
        self.options = options
        self.window = RawWindow(options.first_raw_tokens, options.recent_raw_tokens)  # of running sequences
        self._sizes: dict[Pair, float] = {}  # bytes of a token

    def plan_for(self, entry: Entry) -> Plan | None:
        """What it should be stored as now; None: as it is."""
        if entry.is_stuck:
            return None
        span, wanted = entry.span, self.wanted(entry)
        if entry.is_running:
            return wanted if self._has_to_seal(entry, wanted) else None
        done = all(is_under(span, i, wanted.pairs[i], upward=entry.goes_up) for i in span.layers)
        done = done and marks_are_under(span, wanted)
        return None if done and not (self.options.gathers and has_to_gather(span, self.options.apart)) else wanted

    def wanted(self, entry: Entry) -> Plan:
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
        wanted, specs = self.wanted(entry).pairs, self.layout.flat()
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
        wanted_bytes = self._token_bytes(self.wanted(entry)) * entry.span.num_tokens
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
        return self._seal(entry, plan) if entry.is_running else self._rewrite(entry, plan)

    def _seal(self, entry: Entry, plan: Plan) -> Job:
        # All layers up to the same token, whatever comes while the job waits for its next turn.
        span, up_to = entry.span, written_end(entry.span) if entry.asked_at is None else entry.asked_at
        entry.asked_at = None
        for layer in span.layers:
            yield from sealing(span, layer, plan.pairs[layer], self.window, up_to=up_to)
            yield

    def _rewrite(self, entry: Entry, plan: Plan) -> Job:
        for layer in entry.span.layers:
            rewriting = LayerRewrite(layer, plan.pairs[layer])
            while rewriting.advance(entry.span, upward=entry.goes_up):
                yield
            yield
        yield from rewriting_marks(entry.span, plan)
        while self.options.gathers and gather_some(entry.span, self.options.apart):
            yield


def _lower(pair: Pair, wanted: Pair, spec: LayerSpec) -> Pair:
    k, v = becomes(pair[0], wanted[0], spec.k_dim, spec.dtype), becomes(pair[1], wanted[1], spec.v_dim, spec.dtype)
    return k, v
