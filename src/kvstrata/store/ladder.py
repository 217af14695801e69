"""Which spans step down when memory runs short: pure, values in, moves out.

Everything goes down one rung before anything goes down the next: 8 bits cost next to nothing, 4 bits a little, so a
cold conversation at 2 bits beside a warm one at full precision is the worst of choices. On a rung V goes before K,
which matters more, and the coldest before the warmer. What is below a rung already, or would fall below a floor, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

RUNGS = (8, 4, 2)
# Shares of the budget: above the first it begins, down to the second it goes on, so that it does not saw.
HIGH = 0.85
LOW = 0.75


@dataclass(frozen=True)
class Floors:
    k_bits: int = 4
    v_bits: int = 4


@dataclass(frozen=True)
class Held(Generic[T]):
    """A span that may step down."""

    id: T
    k_bits: int  # of planes 8, 4 or 2; more for what is raw; 0 for what cannot step down
    v_bits: int
    num_tokens: int
    used_s: float


@dataclass(frozen=True)
class Move(Generic[T]):
    id: T
    k_bits: int
    v_bits: int


def step_down(
    spans: Sequence[Held[T]], need_bytes: float, floors: Floors, token_bytes: Callable[[int, int], float]
) -> list[Move[T]]:
    """The fewest moves, in this order, that free so much; all that there are if they do not. `token_bytes` tells what a
    token takes with so many bits for K and for V. No layer need follow them: a move that frees nothing is none."""
    left = {span.id: span for span in sorted(spans, key=lambda span: span.used_s)}
    moves: dict[T, Move[T]] = {}
    for bits in RUNGS:
        for side in ("v", "k"):
            for id_, span in left.items():
                if need_bytes <= 0:
                    return list(moves.values())
                lowered = _lower(span, side, bits, floors)
                before, after = (token_bytes(each.k_bits, each.v_bits) for each in (span, lowered))
                freed_bytes = span.num_tokens * (before - after)
                if freed_bytes > 0:
                    need_bytes -= freed_bytes
                    left[id_] = lowered
                    moves[id_] = Move(id_, lowered.k_bits, lowered.v_bits)
    return list(moves.values())


def _lower(span: Held[T], side: str, bits: int, floors: Floors) -> Held[T]:
    if side == "k":
        return replace(span, k_bits=bits) if span.k_bits > bits >= floors.k_bits else span
    return replace(span, v_bits=bits) if span.v_bits > bits >= floors.v_bits else span


def parse_lengths(text: str) -> tuple[tuple[int, str], ...]:
    """'16k=planes:8,64k=planes:4' -> ((16384, 'planes:8'), (65536, 'planes:4')). Raises ValueError with the reason."""
    steps = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        length, equals, name = part.partition("=")
        number = length.strip().lower().removesuffix("k")
        if not equals or not number.isdecimal() or not name.strip():
            raise ValueError(f"'{part}' is not a step. Write it like 16k=planes:8,64k=planes:4")
        steps.append((int(number) * (1024 if length.strip().lower().endswith("k") else 1), name.strip()))
    if steps != sorted(steps) or len({tokens for tokens, _ in steps}) < len(steps):
        raise ValueError(f"'{text}': the lengths must grow from step to step")
    return tuple(steps)
