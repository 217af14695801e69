"""Steps spans down when memory runs short, before anything is thrown away: the ladder at work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.spans.live import sealable_tokens
from kvstrata.spans.plan import Plan
from kvstrata.store.entry import Entry
from kvstrata.store.leaves import Leaves
from kvstrata.store.options import LadderOptions
from kvstrata.store.precision.ladder import HIGH, LOW, Bits, Ladder, Move, Standing
from kvstrata.store.precision.rewriting import Rewriting
from kvstrata.store.shelf import Shelf

PlanOf = Callable[[Codec, Codec], Plan]  # from a K and a V precision


class Pressure:
    def __init__(
        self,
        shelf: Shelf,
        leaves: Leaves,
        rewriting: Rewriting,
        plan_of: PlanOf,
        options: LadderOptions,
        counters: Counter[str],
    ) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._rewriting = rewriting
        self._precision = rewriting.precision
        self._plan_of = plan_of
        self._options = options
        self._counters = counters
        self._by_length = [(tokens, plan_of(codec, codec)) for tokens, codec in options.by_length]
        self._sizes: dict[Bits, float] = {}  # bytes of a token
        self._ladder: Ladder[Entry] = Ladder(options.floors, self._token_bytes)
        self._changed = shelf.journal.reader(self._ladder.discard)
        self._in_vain_bytes = 0  # with so much in use there was nothing left to step down

    def relieve(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need. Begins late and goes on for a while, so that it does not saw."""
        if used_bytes <= HIGH * limit_bytes:
            self._in_vain_bytes = 0
        elif used_bytes > self._in_vain_bytes:
            num_moves = self.make_room(int(used_bytes - LOW * limit_bytes))
            self._in_vain_bytes = 0 if num_moves else used_bytes

    def make_room(self, need_bytes: int) -> int:
        """Let spans step down until so much would be free, as far as the floors allow. Tells how many do."""
        if not self._options.by_pressure or need_bytes <= 0:
            return 0
        self._look()
        moves = self._ladder.choose(need_bytes)
        for move in moves:
            self._lower(move.id, self._plan_after(move))
        return len(moves)

    def _look(self) -> None:
        """Where the entries stand that have changed."""
        for entry in self._changed.take():
            if entry.span.layers:
                self._ladder.put(entry, self._standing(entry))
            else:
                self._ladder.discard(entry)

    def grown(self, entries: set[Entry], num_tokens: int) -> None:
        """A sequence that holds these has so many tokens now."""
        plans = [plan for tokens, plan in self._by_length if num_tokens >= tokens]
        for entry in entries if plans else ():
            # A longer one that shares it may have taken it further down.
            if self._precision.lowers(entry, plans[-1]):
                self._lower(entry, plans[-1])

    def _lower(self, entry: Entry, plan: Plan) -> None:
        entry.target, entry.goes_up = plan, False
        self._counters["stepped_down_spans"] += 1
        self._rewriting.review(entry)

    def _standing(self, entry: Entry) -> Standing:
        specs = self._precision.layout.flat()
        layers = [(8 * specs[i].dtype.size, pairs) for i, pairs in self._precision.expected(entry).items()]
        # Layers at the edges keep more bits: the others tell how far it has stepped down.
        bits = Bits(
            k=min(max(_bits(k, raw_bits) for k, _ in pairs) for raw_bits, pairs in layers),
            v=min(max(_bits(v, raw_bits) for _, v in pairs) for raw_bits, pairs in layers),
        )
        if entry.is_running:
            return Standing(bits, sealable_tokens(entry.span, self._precision.window), math.inf)
        return Standing(bits, entry.span.num_tokens, self._leaves.used_s(entry))

    def _plan_after(self, move: Move[Entry]) -> Plan:
        wanted = self._precision.wanted(move.id)
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
