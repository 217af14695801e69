"""Step-down policy: chooses which spans step down, by the memory that is short or by the length of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.spans.live import sealable_tokens
from kvstrata.spans.plan import Plan
from kvstrata.store.entry import Entry
from kvstrata.store.leaves import Leaves
from kvstrata.store.options import LadderOptions
from kvstrata.store.precision.ladder import HIGH, LOW, Bits, Ladder, Move, Standing
from kvstrata.store.precision.target import Precision
from kvstrata.store.shelf import Shelf

PlanOf = Callable[[Codec, Codec], Plan]  # from a K and a V precision


@dataclass(frozen=True)
class StepDown:
    """Decision that an entry is to be stored under a lower plan. The caller applies it (`Rewriting.step_down`)."""

    entry: Entry
    plan: Plan


class Pressure:
    def __init__(
        self,
        shelf: Shelf,
        leaves: Leaves,
        precision: Precision,
        plan_of: PlanOf,
        options: LadderOptions,
    ) -> None:
        self._shelf = shelf
        self._leaves = leaves
        self._precision = precision
        self._plan_of = plan_of
        self._options = options
        self._by_length = [(tokens, plan_of(codec, codec)) for tokens, codec in options.by_length]
        self._sizes: dict[Bits, float] = {}  # bytes of a token
        self._ladder: Ladder[Entry] = Ladder(options.floors, self._token_bytes)
        self._changed = shelf.journal.reader(self._ladder.discard)
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
        for entry in self._changed.take():
            if entry.span.layers:
                self._ladder.put(entry, self._standing(entry))
            else:
                self._ladder.discard(entry)

    def for_length(self, entries: Iterable[Entry], num_tokens: int) -> list[StepDown]:
        """Choose among the entries of a sequence that has so many tokens now."""
        plans = [plan for tokens, plan in self._by_length if num_tokens >= tokens]
        if not plans:
            return []
        # A longer one that shares it may have taken it further down.
        return [StepDown(entry, plans[-1]) for entry in entries if self._precision.lowers(entry, plans[-1])]

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
