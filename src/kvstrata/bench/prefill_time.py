"""How many tokens a server computed, told by the time that its first token took.

Unseen prompts of several lengths give the time of n tokens: a + b n + c n^2, where c is attention over what came
before. A prompt of n tokens of which m are computed behind n - m cached ones takes a + b m + c (n^2 - (n - m)^2), which
is solved for m. What a server does besides (waiting for others, reading a disk) counts as computed, so only requests
that had the server for themselves are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from kvstrata.errors import KvstrataError


@dataclass(frozen=True)
class PrefillTime:
    fixed_s: float  # a
    token_s: float  # b
    pair_s: float  # c

    def seconds(self, num_tokens: int, computed: float) -> float:
        reused = num_tokens - computed
        return self.fixed_s + self.token_s * computed + self.pair_s * (num_tokens**2 - reused**2)

    def computed_tokens(self, num_tokens: int, took_s: float) -> int:
        """Of a prompt of so many tokens, from 0 to all of them."""
        left_s = took_s - self.fixed_s
        if left_s <= 0:
            return 0
        if left_s >= self.seconds(num_tokens, num_tokens) - self.fixed_s:
            return num_tokens
        # c m^2 - (b + 2 c n) m + left = 0: the smaller root, in the form that a small c does not spoil.
        slope = self.token_s + 2 * self.pair_s * num_tokens
        return round(2 * left_s / (slope + math.sqrt(slope**2 - 4 * self.pair_s * left_s)))


Sample = tuple[int, float]  # tokens of an unseen prompt, seconds to its first token


def fit(samples: Sequence[Sample]) -> PrefillTime:
    """Least squares of the relative error, with no part below zero."""
    if len({length for length, _ in samples}) < 2:
        raise KvstrataError("Prompts of two lengths at least are needed to tell computed tokens from time")
    lengths = np.array([length for length, _ in samples], dtype=np.float64)
    took = np.array([seconds for _, seconds in samples])
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / took[:, None]
    best, least = np.zeros(3), np.inf
    # With three parts, trying every subset is the whole search for the best one without a negative.
    for chosen in [c for size in (1, 2, 3) for c in combinations(range(3), size) if c != (0,)]:
        found, _, rank, _ = np.linalg.lstsq(columns[:, chosen], np.ones_like(took), rcond=None)
        error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
        if rank == len(chosen) and (found >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[list(chosen)] = found
    return PrefillTime(*map(float, best))
