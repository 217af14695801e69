"""Bits for K and V of each layer that lose least together, from what each loses alone. Pure.

Losses are taken to add up. Everything begins with the most bits; the step down that loses least for each byte comes
first, until the rest fits. A last step may free too much: then bits go back where they bring most and still fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True)
class Choice(Generic[K]):
    """K or V of one layer."""

    key: K
    num_values: int  # of a token
    losses: Mapping[int, float]  # by bits


def allot(choices: Sequence[Choice[K]], budget_bits: int) -> dict[K, int]:
    """The bits of each, so that a token takes at most `budget_bits`; the fewest of all where that cannot be."""
    by_key = {choice.key: choice for choice in choices}
    bits = {choice.key: max(choice.losses) for choice in choices}
    need = sum(by_key[key].num_values * each for key, each in bits.items()) - budget_bits
    while need > 0 and (downs := [step for key in bits if (step := _down(by_key[key], bits[key])) is not None]):
        step = min(downs, key=lambda step: step.price)
        bits[step.key] = step.lower
        need -= step.num_bits
    while ups := [step for key in bits if (step := _up(by_key[key], bits[key])) and step.num_bits <= -need]:
        step = max(ups, key=lambda step: step.price)
        bits[step.key] = step.higher
        need += step.num_bits
    return bits


@dataclass(frozen=True)
class _Step(Generic[K]):
    key: K
    lower: int
    higher: int
    num_bits: int  # of a token, that are between them
    price: float  # what each of them loses


def _down(choice: Choice[K], bits: int) -> _Step[K] | None:
    lower = max((each for each in choice.losses if each < bits), default=None)
    return None if lower is None else _between(choice, lower, bits)


def _up(choice: Choice[K], bits: int) -> _Step[K] | None:
    higher = min((each for each in choice.losses if each > bits), default=None)
    return None if higher is None else _between(choice, bits, higher)


def _between(choice: Choice[K], lower: int, higher: int) -> _Step[K]:
    num_bits = choice.num_values * (higher - lower)
    return _Step(choice.key, lower, higher, num_bits, (choice.losses[lower] - choice.losses[higher]) / num_bits)
