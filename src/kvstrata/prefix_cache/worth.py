"""Eviction worth: the value per byte of keeping a leaf, from its expected reuse and the cost of recomputing it.

Pure: values in, values out; time is an argument. The module knows no tree, no arrays and no budget.

Expected reuse: requests fall into few reuse classes, and each class has its own time to the next use. A person reads
for a minute before the next turn, a tool answers in seconds, KV behind a rewritten message is never used again. `Reuse`
measures this: for each class the chance of a use by age (Kaplan-Meier: leaves not reused yet count for the ages that
they have reached). The highest use rate that keeping a leaf can bring follows from it, over all times to give up
(Gittins index of that class at that age). LRU is the special case where the chance depends on age alone; it does badly
in small caches, because they evict everything shortly before it would be used.
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
    """Class of a node by the request that used it last, and by whether a later request diverged inside it."""

    FRESH = 0  # most of the prompt was new
    CONTINUED = 1  # most of the prompt was known: a further turn, a repetition
    LEFT_FRESH = 2  # the rest of a FRESH node after another prompt diverged inside it
    LEFT_CONTINUED = 3  # the rest of a CONTINUED node

    @property
    def left(self) -> ReuseClass:
        """Class of the lower half when a request uses only the upper half of a node."""
        return (
            ReuseClass.LEFT_CONTINUED
            if self in (ReuseClass.CONTINUED, ReuseClass.LEFT_CONTINUED)
            else ReuseClass.LEFT_FRESH
        )


@dataclass(frozen=True)
class PrefillCost:
    """Cost of computing a token: a constant, and attention, which grows with the position.

    By arithmetic the cost of a 7B model doubles at about 30k tokens. With that weight, long idle prompts evict short
    active ones: on the traces both the hit rate and the saved prefill fell (docs/replay.md). The default therefore
    weighs the position lightly: it decides between leaves that are otherwise equal.
    """

    attention_tokens: int = 1 << 22  # position at which attention costs as much as the rest

    def per_token(self, position: float) -> float:
        return 1.0 + position / self.attention_tokens


class AwaitedUse(NamedTuple):
    """Handle of a use whose next use `Reuse` awaits."""

    reuse_class: ReuseClass
    number: int


# Age buckets of half an octave, from half a second to about a week. Nothing depends on ages below or above.
FIRST_EDGE_S = 0.5

NUM_BUCKETS = 42

EDGES_S: Floats = np.concatenate(([0.0], FIRST_EDGE_S * 2.0 ** (np.arange(NUM_BUCKETS) / 2)))

INNER_EDGES_S: tuple[float, ...] = tuple(EDGES_S[1:-1].tolist())

# Without measurements every bucket has the same share of reuse, so the chance per second falls with age: LRU.
PRIOR_SHARE = 0.1

# The first bucket is wider than each of the next three. With the share of a single bucket, the youngest leaves would be
# worth less than slightly older ones, so it has the share of three.
PRIOR_HAZARD: Floats = np.array([1 - (1 - PRIOR_SHARE) ** 3, *[PRIOR_SHARE] * (NUM_BUCKETS - 1)])

PRIOR_WEIGHT = 20.0

MAX_HAZARD = 0.95

# A leaf can be given up only in its present bucket or later.
ENDS_LATER = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS), dtype=np.bool_))

MIN_TRIM = 8


class Reuse:
    """Reuse statistics over the last `window` uses of each class. Every use opens an observation of the next one."""

    def __init__(self, window: int = 4096, refresh_every: int = 128) -> None:
        # One flat array with a row for each class: writing with a single index takes half the time.
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

    def opened(self, reuse_class: ReuseClass, weight: float, now_s: float) -> AwaitedUse:
        """Record a use and begin to await the next one."""
        number = self._num_opened[reuse_class]
        slot = reuse_class * self._window + number % self._window
        self._num_opened[reuse_class] = number + 1
        self._opened_s[slot] = now_s
        self._closed_s[slot] = np.inf
        self._is_reused[slot] = False
        self._weight[slot] = weight
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self.refresh(now_s)
        return AwaitedUse(reuse_class, number)

    def reused(self, awaited: AwaitedUse, weight: float, now_s: float) -> None:
        """Record that an awaited use happened."""
        if self._is_remembered(awaited):
            slot = awaited.reuse_class * self._window + awaited.number % self._window
            self._closed_s[slot] = now_s
            self._is_reused[slot] = True
            self._weight[slot] = weight

    def forgotten(self, awaited: AwaitedUse, now_s: float) -> None:
        """End an observation without a use: the history forgot the node and cannot notice a later use."""
        if self._is_remembered(awaited):
            self._closed_s[awaited.reuse_class * self._window + awaited.number % self._window] = now_s

    def _is_remembered(self, awaited: AwaitedUse) -> bool:
        return self._num_opened[awaited.reuse_class] - awaited.number <= self._window

    def density(self, reuse_class: ReuseClass, age_s: float) -> float:
        """Return the highest rate of uses per second that keeping a leaf of this class and age can bring."""
        return self._density[reuse_class][bucket(age_s)]

    def refresh(self, now_s: float) -> None:
        """Recompute the use rates from the recorded uses."""
        self._until_refresh = self._refresh_every
        ages = np.minimum(self._closed_s, now_s) - self._opened_s
        buckets = np.minimum(np.searchsorted(EDGES_S, ages, side="left") - 1, NUM_BUCKETS - 1).clip(0)
        where = buckets + self._first_bucket
        # A use is one observation, however many tokens it has: weights are relative to their mean.
        weight = self._weight * (np.count_nonzero(self._weight) / max(1.0, self._weight.sum()))
        used = _by_bucket(where[self._is_reused], weight[self._is_reused])
        ended = _by_bucket(where, weight)
        overall = hazard(used.sum(0), ended.sum(0), PRIOR_HAZARD)
        self._density = best_rate(hazard(used, ended, overall)).tolist()


def bucket(age_s: float) -> int:
    """Return the number of the bucket of an age."""
    # For a single number bisect is ten times as fast as numpy, and every choice looks up a dozen.
    return bisect_left(INNER_EDGES_S, age_s)


def _by_bucket(where: NDArray[np.int64], weight: Floats) -> Floats:
    """Sum weights by bucket, a row for each class."""
    return np.bincount(where, weight, NUM_BUCKETS * len(ReuseClass)).astype(np.float64).reshape(-1, NUM_BUCKETS)


def hazard(used: Floats, ended: Floats, prior: Floats) -> Floats:
    """Return the chance of a use in each bucket (last axis), given that a leaf has reached the bucket.

    `ended` counts the observations that end in a bucket, `used` the part of them that ended by a use. The other
    observations leave a bucket half-way on average.
    """
    reached = _suffix_sums(ended)
    exposed = np.maximum(reached - (ended - used) / 2, used)
    return np.minimum((used + PRIOR_WEIGHT * prior) / (exposed + PRIOR_WEIGHT), MAX_HAZARD)


def best_rate(chance: Floats) -> Floats:
    """Return the highest use rate from each bucket (last axis) on, over all later buckets at whose end to give up."""
    alive = np.ones_like(chance)
    alive[..., 1:] = np.cumprod(1 - chance, axis=-1)[..., :-1]
    # Sums run from the end, so that buckets that few entries reach keep their precision.
    uses = _suffix_sums(alive * chance)
    seconds = _suffix_sums(alive * np.diff(EDGES_S) * (1 - chance / 2))
    num_uses = uses[..., :, None] - _without_first(uses)[..., None, :]
    num_seconds = seconds[..., :, None] - _without_first(seconds)[..., None, :]
    return np.divide(num_uses, num_seconds, out=np.zeros_like(num_uses), where=ENDS_LATER).max(axis=-1)


def _suffix_sums(values: Floats) -> Floats:
    return np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]


def _without_first(sums: Floats) -> Floats:
    return np.concatenate((sums[..., 1:], np.zeros_like(sums[..., :1])), axis=-1)


def kept_tokens(num_tokens: int, need_tokens: int, quantum_tokens: int) -> int:
    """Return how many tokens of a leaf stay when at least `need_tokens` must be evicted.

    A trim copies the remaining tokens, so it drops at least an eighth: all copies together are then at most seven times
    as long as the leaf was. Measured on the first halves of the traces: half instead of an eighth costs 0.003 to 0.011
    of hit rate, whole leaves up to 0.065; a sixteenth gains nothing.
    """
    drop = max(need_tokens, math.ceil(num_tokens / MIN_TRIM))
    return max(num_tokens - drop, 0) // quantum_tokens * quantum_tokens
