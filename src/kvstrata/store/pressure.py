"""Steps spans down when memory runs short, before anything is thrown away: the ladder at work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstrata.codecs.base import Codec
from kvstrata.codecs.planes import PlanesCodec
from kvstrata.codecs.raw import RawCodec
from kvstrata.spans.plan import Plan
from kvstrata.store.entry import Entry
from kvstrata.store.ladder import HIGH, LOW, Floors, Held, step_down
from kvstrata.store.precision import Precision
from kvstrata.store.shelf import Shelf

PlanOf = Callable[[str, str], Plan]  # from the names of a K and a V precision


@dataclass(frozen=True)
class LadderOptions:
    by_pressure: bool = False  # step down as memory fills up
    by_length: tuple[tuple[int, str], ...] = ()  # (tokens, precision): longer sequences are stored so
    floors: Floors = field(default_factory=Floors)


class Pressure:
    def __init__(
        self,
        shelf: Shelf,
        plan_of: PlanOf,
        options: LadderOptions,
        precision: Precision,
        review: Callable[[Entry], None],
    ) -> None:
        self._shelf = shelf
        self._plan_of = plan_of
        self._options = options
        self._precision = precision
        self._review = review  # has an entry brought to its target, in time
        self._by_length = [(tokens, plan_of(name, name)) for tokens, name in options.by_length]
        self.num_steps = 0
        self._in_vain_bytes = 0  # with so much in use there was nothing left to step down

    def relieve(self, used_bytes: int, limit_bytes: int) -> None:
        """Ahead of need. Begins late and goes on for a while, so that it does not saw."""
        if used_bytes <= HIGH * limit_bytes:
            self._in_vain_bytes = 0
        elif used_bytes > self._in_vain_bytes:
            before = self.num_steps
            self.make_room(int(used_bytes - LOW * limit_bytes))
            self._in_vain_bytes = used_bytes if self.num_steps == before else 0

    def make_room(self, need_bytes: int) -> None:
        """Let spans step down until so much would be free, as far as the floors allow."""
        if not self._options.by_pressure or need_bytes <= 0:
            return
        held = [self._held(entry) for entry in self._shelf.entries if entry.span.layers]
        for move in step_down(held, need_bytes, self._options.floors):
            self._lower(move.id, self._plan_of(_name(move.k_bits), _name(move.v_bits)))

    def grown(self, entries: set[Entry], num_tokens: int) -> None:
        """A sequence that holds these has so many tokens now."""
        plans = [plan for tokens, plan in self._by_length if num_tokens >= tokens]
        for entry in entries if plans else ():
            if entry.target is None or entry.target.k != plans[-1].k:
                self._lower(entry, plans[-1])

    def _lower(self, entry: Entry, plan: Plan) -> None:
        entry.target, entry.goes_up = plan, False
        self.num_steps += 1
        self._review(entry)

    def _held(self, entry: Entry) -> Held[Entry]:
        layer = entry.span.layers[0]
        dtype = entry.span.layout.flat()[layer].dtype
        k, v = entry.target.pairs[layer] if entry.target else entry.span.pairs(layer)[-1]
        k_bits, v_bits = _bits(k, 8 * dtype.size), _bits(v, 8 * dtype.size)
        kv_bytes = self._movable_bytes(entry)
        k_bytes = kv_bytes * k_bits // max(1, k_bits + v_bits)
        used_s = math.inf if entry.is_running else self._shelf.used_s(entry)
        return Held(entry, k_bits, v_bits, k_bytes, kv_bytes - k_bytes, used_s)

    def _movable_bytes(self, entry: Entry) -> int:
        """What of it takes fewer bytes in fewer bits: what it has, when all that waits is done."""
        if entry.is_running:
            return entry.span.sealable_bytes(self._precision.options.window)
        return self._precision.expected_bytes(entry)


def _bits(codec: Codec, raw_bits: int) -> int:
    if isinstance(codec, RawCodec):
        return raw_bits
    # Another family would have to be decoded and encoded again, at a loss: it stays.
    return codec.bits if isinstance(codec, PlanesCodec) else 0


def _name(bits: int) -> str:
    return f"planes:{bits}" if bits <= 8 else "raw"
