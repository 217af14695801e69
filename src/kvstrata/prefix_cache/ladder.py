"""Which spans step down when memory runs short: pure, values in, moves out.

Everything goes down one rung before anything goes down the next: 8 bits cost next to nothing, 4 bits a little, so a
cold conversation at 2 bits beside a warm one at full precision is the worst of choices. On a rung V goes before K,
which matters more, and the coldest before the warmer. What is below a rung already, or would fall below a floor, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse
from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.config import PrecisionFloors
from kvstrata.prefix_cache.eviction_order import LeafQueue

T = TypeVar("T", bound=Hashable)

STEP_BITS = (8, 4, 2)

# Shares of the budget: above the first it begins, down to the second it goes on, so that it does not saw.
HIGH = 0.85

LOW = 0.75


@dataclass(frozen=True)
class Bits:
    """Of a span: planes 8, 4 or 2; more for what is raw; 0 for what cannot step down."""

    k: int
    v: int


@dataclass(frozen=True)
class SpanPrecision:
    """Where a span that may step down stands."""

    bits: Bits
    num_tokens: int
    used_s: float


@dataclass(frozen=True)
class LadderMove(Generic[T]):
    id: T
    before: Bits
    after: Bits


class Ladder(Generic[T]):
    """Spans by their bits, the coldest first. A choice costs the moves that it makes, however many spans there are.

    `token_bytes` tells what a token takes with so many bits. No layer need follow them: a move that frees nothing is
    none.
    """

    def __init__(self, floors: PrecisionFloors, token_bytes: Callable[[Bits], float]) -> None:
        self._floors = floors
        self._token_bytes = token_bytes
        self._spans: dict[T, SpanPrecision] = {}
        self._queues: dict[Bits, LeafQueue[T]] = {}

    def put_span(self, id_: T, span: SpanPrecision) -> None:
        """Also where it is known, and was used or has changed."""
        self.discard_span(id_)
        if span.num_tokens > 0:
            self._spans[id_] = span
            self._queues.setdefault(span.bits, LeafQueue()).put(id_, span.used_s, 0)

    def discard_span(self, id_: T) -> None:
        """Nothing happens where it is not known."""
        span = self._spans.pop(id_, None)
        if span is not None:
            self._queues[span.bits].discard(id_)
            if not len(self._queues[span.bits]):
                del self._queues[span.bits]

    def choose(self, need_bytes: float) -> list[LadderMove[T]]:
        """The fewest moves, in order, that free so much; all that there are if they do not. The spans count as moved
        from now on."""
        moves: dict[T, LadderMove[T]] = {}
        for lower in self._steps():
            while need_bytes > 0 and (id_ := self._coldest(lower)) is not None:
                span = self._spans[id_]
                after = lower(span.bits)
                need_bytes -= span.num_tokens * (self._token_bytes(span.bits) - self._token_bytes(after))
                moves[id_] = LadderMove(id_, moves[id_].before if id_ in moves else span.bits, after)
                self.put_span(id_, replace(span, bits=after))
        return list(moves.values())

    def _steps(self) -> Iterator[Callable[[Bits], Bits]]:
        """What one step does to bits, in the order of the steps."""
        for rung in STEP_BITS:
            if rung >= self._floors.v_bits:
                yield lambda bits, rung=rung: replace(bits, v=min(bits.v, rung))
            if rung >= self._floors.k_bits:
                yield lambda bits, rung=rung: replace(bits, k=min(bits.k, rung))

    def _coldest(self, lower: Callable[[Bits], Bits]) -> T | None:
        """Of those that a step would free something of."""
        frees = [bits for bits in self._queues if self._token_bytes(lower(bits)) < self._token_bytes(bits)]
        ends = [id_ for bits in frees if (id_ := self._queues[bits].oldest()) is not None]
        return min(ends, key=lambda id_: self._spans[id_].used_s, default=None)


def parse_lengths(text: str) -> tuple[tuple[int, Codec], ...]:
    """'16k=planes:8,64k=planes:4': from so many tokens on, so. Raises ConfigError with the reason."""
    steps = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        length, equals, name = part.partition("=")
        number = length.strip().lower().removesuffix("k")
        if not equals or not number.isdecimal() or not name.strip():
            raise ConfigError(f"'{part}' is not a step. Write it like 16k=planes:8,64k=planes:4")
        steps.append((int(number) * (1024 if length.strip().lower().endswith("k") else 1), parse(name.strip())))
    lengths = [tokens for tokens, _ in steps]
    if lengths != sorted(set(lengths)):
        raise ConfigError(f"'{text}': the lengths must grow from step to step")
    return tuple(steps)
