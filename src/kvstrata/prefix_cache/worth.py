"""What a stored leaf is worth, per byte: how soon it will be used again, and what it would cost to compute it again.

Pure: values in, values out; time is an argument. Knows no tree, no arrays and no budget.

How soon: prompts are of few kinds, and each kind comes back in its own time. A person reads for a minute before the
next turn, a tool answers in seconds, what a template rewrote never comes back. `Reuse` measures this from what
happened: for each kind the chance of a use by age (Kaplan-Meier: what has not come back yet counts for the ages it has
reached). From that comes the most uses per second that keeping it can bring, over all times to give up (Gittins' index
of that kind at that age). LRU is the special case where the chance falls with age alone; small stores lose with it,
because everything is pushed out just before it would be used.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class ReuseClass(IntEnum):
    """By the request that used it last: was most of its prompt known before?"""

    FRESH = 0  # no
    CONTINUED = 1  # yes: a further turn, a repetition
    LEFT_FRESH = 2  # what is left of a FRESH one after another prompt took a different way in the middle of it
    LEFT_CONTINUED = 3

    @property
    def left(self) -> ReuseClass:
        return (
            ReuseClass.LEFT_CONTINUED
            if self in (ReuseClass.CONTINUED, ReuseClass.LEFT_CONTINUED)
            else ReuseClass.LEFT_FRESH
        )


@dataclass(frozen=True)
class PrefillCost:
    """What it costs to compute a token: the same for all, and attention, which grows with the position.

    By arithmetic a model of 7 B doubles its cost at about 30k tokens. With that weight, long prompts that lie idle push
    out short ones that are in use: on the traces fewer tokens were found, and less prefill was saved (docs/replay.md).
    So the default counts the position lightly: it decides between leaves that are otherwise alike.
    """

    attention_tokens: int = 1 << 22  # position at which attention costs as much as the rest

    def per_token(self, position: float) -> float:
        return 1.0 + position / self.attention_tokens


class AwaitedUse(NamedTuple):
    """One use that `Reuse` waits for the end of."""

    kind: ReuseClass
    number: int


# Ages in buckets of half an octave, from half a second to about a week: below and above nothing depends on them.
FIRST_EDGE_S = 0.5

NUM_BUCKETS = 42

EDGES_S: Floats = np.concatenate(([0.0], FIRST_EDGE_S * 2.0 ** (np.arange(NUM_BUCKETS) / 2)))

INNER_EDGES_S: tuple[float, ...] = tuple(EDGES_S[1:-1].tolist())

# Without measurements the same share comes back in every bucket, so the chance per second falls with age: LRU.
PRIOR_SHARE = 0.1

# The first bucket is wider than each of the next three: with the share of one, the youngest would be worth less than
# what is a little older. It has the share of three.
PRIOR_HAZARD: Floats = np.array([1 - (1 - PRIOR_SHARE) ** 3, *[PRIOR_SHARE] * (NUM_BUCKETS - 1)])

PRIOR_WEIGHT = 20.0

MAX_HAZARD = 0.95

# Giving up comes after beginning.
ENDS_LATER = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS), dtype=np.bool_))

MIN_TRIM = 8


class Reuse:
    """Learns from the last `window` uses of each kind. After every use the next one is awaited."""

    def __init__(self, window: int = 4096, refresh_every: int = 128) -> None:
        # One row after the other for each kind: writing one place takes half the time with a single index.
        size = len(ReuseClass) * window
        self._window = window
        self._refresh_every = refresh_every
        self._opened_s: Floats = np.zeros(size)
        self._closed_s: Floats = np.full(size, np.inf)
        self._is_reused = np.zeros(size, dtype=np.bool_)
        self._weight: Floats = np.zeros(size)
        self._first_bucket = np.repeat(NUM_BUCKETS * np.arange(len(ReuseClass)), window)
        self._num_opened = [0] * len(ReuseClass)
        self._until_refresh = 0
        self._density: list[list[float]] = []
        self.refresh(0.0)

    def opened(self, kind: ReuseClass, weight: float, now_s: float) -> AwaitedUse:
        number = self._num_opened[kind]
        slot = kind * self._window + number % self._window
        self._num_opened[kind] = number + 1
        self._opened_s[slot] = now_s
        self._closed_s[slot] = np.inf
        self._is_reused[slot] = False
        self._weight[slot] = weight
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self.refresh(now_s)
        return AwaitedUse(kind, number)

    def reused(self, awaited: AwaitedUse, weight: float, now_s: float) -> None:
        if self._is_remembered(awaited):
            slot = awaited.kind * self._window + awaited.number % self._window
            self._closed_s[slot] = now_s
            self._is_reused[slot] = True
            self._weight[slot] = weight

    def forgotten(self, awaited: AwaitedUse, now_s: float) -> None:
        """The history does not notice a use after this."""
        if self._is_remembered(awaited):
            self._closed_s[awaited.kind * self._window + awaited.number % self._window] = now_s

    def _is_remembered(self, awaited: AwaitedUse) -> bool:
        return self._num_opened[awaited.kind] - awaited.number <= self._window

    def density(self, kind: ReuseClass, age_s: float) -> float:
        """Uses per second that keeping it can bring, at best."""
        return self._density[kind][bucket(age_s)]

    def refresh(self, now_s: float) -> None:
        self._until_refresh = self._refresh_every
        ages = np.minimum(self._closed_s, now_s) - self._opened_s
        buckets = np.minimum(np.searchsorted(EDGES_S, ages, side="left") - 1, NUM_BUCKETS - 1).clip(0)
        where = buckets + self._first_bucket
        # One use is one observation, however many tokens it has: the weights are relative to their mean.
        weight = self._weight * (np.count_nonzero(self._weight) / max(1.0, self._weight.sum()))
        used = _by_bucket(where[self._is_reused], weight[self._is_reused])
        ended = _by_bucket(where, weight)
        overall = hazard(used.sum(0), ended.sum(0), PRIOR_HAZARD)
        self._density = best_rate(hazard(used, ended, overall)).tolist()


def bucket(age_s: float) -> int:
    # bisect, not numpy: for one number it is ten times as fast, and every choice asks for a dozen.
    return bisect_left(INNER_EDGES_S, age_s)


def _by_bucket(where: NDArray[np.int64], weight: Floats) -> Floats:
    """Weights added up, a row for each kind."""
    return np.bincount(where, weight, NUM_BUCKETS * len(ReuseClass)).astype(np.float64).reshape(-1, NUM_BUCKETS)


def hazard(used: Floats, ended: Floats, prior: Floats) -> Floats:
    """The chance of a use in each bucket (last axis), for what has reached it. `ended` counts all whose age ends in the
    bucket, `used` those of them that ended by a use; the others leave it half-way on average."""
    reached = _sums_from_the_end(ended)
    exposed = np.maximum(reached - (ended - used) / 2, used)
    return np.minimum((used + PRIOR_WEIGHT * prior) / (exposed + PRIOR_WEIGHT), MAX_HAZARD)


def best_rate(chance: Floats) -> Floats:
    """From each bucket (last axis) on: the most uses per second, over all buckets at whose end one may give up."""
    alive = np.ones_like(chance)
    alive[..., 1:] = np.cumprod(1 - chance, axis=-1)[..., :-1]
    # Sums from the end, so that what few entries reach keeps its digits.
    uses = _sums_from_the_end(alive * chance)
    seconds = _sums_from_the_end(alive * np.diff(EDGES_S) * (1 - chance / 2))
    num_uses = uses[..., :, None] - _without_first(uses)[..., None, :]
    num_seconds = seconds[..., :, None] - _without_first(seconds)[..., None, :]
    return np.divide(num_uses, num_seconds, out=np.zeros_like(num_uses), where=ENDS_LATER).max(axis=-1)


def _sums_from_the_end(values: Floats) -> Floats:
    return np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]


def _without_first(sums: Floats) -> Floats:
    return np.concatenate((sums[..., 1:], np.zeros_like(sums[..., :1])), axis=-1)


def kept_tokens(num_tokens: int, need_tokens: int, quantum_tokens: int) -> int:
    """How much of a leaf stays when `need_tokens` must go. A trim copies what stays, so it drops at least an eighth:
    then all copies together are at most seven times as long as the leaf was. Measured on first halves of the traces:
    half instead of an eighth costs 0.003 to 0.011 of hit rate, whole leaves up to 0.065; a sixteenth wins nothing."""
    drop = max(need_tokens, math.ceil(num_tokens / MIN_TRIM))
    return max(num_tokens - drop, 0) // quantum_tokens * quantum_tokens
