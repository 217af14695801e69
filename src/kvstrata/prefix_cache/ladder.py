"""The ladder: chooses the spans that step down when memory is short. Pure: values in, moves out.

All spans step down to 8 bits before any of them steps down to 4, and to 4 before 2: 8 bits cost next to nothing and 4
bits a little, so the worst choice is an unused conversation at 2 bits beside a recent one at full precision. At each
number of bits V goes before K, because K matters more, and the least recently used span goes first. A span stays where
it has fewer bits already, or would fall below a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kvstrata.codecs.base import Codec
from kvstrata.codecs.registry import parse
from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.eviction_order import TimeQueue

T = TypeVar("T", bound=Hashable)

STEP_BITS = (8, 4, 2)

# Shares of the memory limit: stepping down begins above `HIGH` and goes on down to `LOW`, so that it does not restart
# with every span.
HIGH = 0.85

LOW = 0.75


@dataclass(frozen=True)
class Bits:
    """Bits of a span's keys and values: 8, 4 or 2 with planes, more where raw, 0 where they cannot step down."""

    k: int
    v: int


@dataclass(frozen=True)
class SpanPrecision:
    """Bits, length and last use of a span that may step down."""

    bits: Bits
    num_tokens: int
    used_s: float


@dataclass(frozen=True)
class LadderMove(Generic[T]):
    """A span's bits before and after all its steps of one choice."""

    id: T
    before: Bits
    after: Bits


class Ladder(Generic[T]):
    """Spans by their bits, the least recently used first. The cost of a choice grows with its moves, not with the
    number of spans.

    `floors` are the fewest bits that a move may leave. `token_bytes` returns the bytes of a token in the given bits.
    Layers may keep more bits than a move gives them; a move that frees nothing is not made.
    """

    def __init__(self, floors: Bits, token_bytes: Callable[[Bits], float]) -> None:
        self._floors = floors
        self._token_bytes = token_bytes
        self._spans: dict[T, SpanPrecision] = {}
        self._queues: dict[Bits, TimeQueue[T]] = {}

    def put_span(self, id_: T, span: SpanPrecision) -> None:
        """Add a span, or replace it after a use or a change."""
        self.discard_span(id_)
        if span.num_tokens > 0:
            self._spans[id_] = span
            self._queues.setdefault(span.bits, TimeQueue()).put(id_, span.used_s, 0)

    def discard_span(self, id_: T) -> None:
        """Remove a span, if it is there."""
        span = self._spans.pop(id_, None)
        if span is not None:
            self._queues[span.bits].discard(id_)
            if not len(self._queues[span.bits]):
                del self._queues[span.bits]

    def choose(self, need_bytes: float) -> list[LadderMove[T]]:
        """Return the fewest moves, in order, that free `need_bytes`, or all possible moves where they free less. The
        spans count as moved from now on."""
        moves: dict[T, LadderMove[T]] = {}
        for lower in self._steps():
            while need_bytes > 0 and (id_ := self._least_recent(lower)) is not None:
                span = self._spans[id_]
                after = lower(span.bits)
                need_bytes -= span.num_tokens * (self._token_bytes(span.bits) - self._token_bytes(after))
                moves[id_] = LadderMove(id_, moves[id_].before if id_ in moves else span.bits, after)
                self.put_span(id_, replace(span, bits=after))
        return list(moves.values())

    def _steps(self) -> Iterator[Callable[[Bits], Bits]]:
        """Yield the steps in their order, each as a function of a span's bits."""
        for step in STEP_BITS:
            if step >= self._floors.v:
                yield lambda bits, step=step: replace(bits, v=min(bits.v, step))
            if step >= self._floors.k:
                yield lambda bits, step=step: replace(bits, k=min(bits.k, step))

    def _least_recent(self, lower: Callable[[Bits], Bits]) -> T | None:
        """Return the least recently used span of which a step frees bytes."""
        frees = [bits for bits in self._queues if self._token_bytes(lower(bits)) < self._token_bytes(bits)]
        ends = [id_ for bits in frees if (id_ := self._queues[bits].oldest()) is not None]
        return min(ends, key=lambda id_: self._spans[id_].used_s, default=None)


def parse_lengths(text: str) -> tuple[tuple[int, Codec], ...]:
    """Parse '16k=planes:8,64k=planes:4': the format of sequences from each length on. Raises ConfigError with the
    reason."""
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
