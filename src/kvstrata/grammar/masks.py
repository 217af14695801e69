"""Which tokens may come next in each row of a batch, all rows in one call. Knows no logits and no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from kvstrata.grammar.matcher import Matcher

NO_TOKEN = "the model has no token for what must come next"


@dataclass(frozen=True)
class Allowed:
    tokens: NDArray[np.bool_] | None = None  # [rows, vocab]; None: all, in every row
    failures: dict[int, str] = field(default_factory=dict)  # by row: why its grammar cannot go on; all are allowed


class Masks:
    @cached_property
    def _executor(self) -> LLExecutor:
        """Its threads start with the first grammar."""
        return LLExecutor()

    def fill(self, matchers: Sequence[Matcher | None], vocab_size: int) -> Allowed:
        """`vocab_size`: number of logits. Rows without a matcher, and those whose grammar has not begun, are free."""
        begun = [(row, matcher) for row, matcher in enumerate(matchers) if matcher is not None and matcher.has_begun]
        failures = {row: error for row, matcher in begun if (error := matcher.error)}
        sound = [(row, matcher) for row, matcher in begun if row not in failures]
        if not sound:
            return Allowed(None, failures)
        allowed = self._bits(sound, len(matchers), vocab_size)
        for row, matcher in sound:
            if error := matcher.error or ("" if allowed[row].any() else NO_TOKEN):
                failures[row] = error
                allowed[row] = True
        return Allowed(allowed, failures)

    def _bits(self, matchers: list[tuple[int, Matcher]], num_rows: int, vocab_size: int) -> NDArray[np.bool_]:
        num_tokens = max(vocab_size, max(matcher.num_tokens for _, matcher in matchers))
        bits = allocate_token_bitmask(num_rows, num_tokens)  # all are allowed
        if len(matchers) == 1:
            ((row, matcher),) = matchers
            fill_next_token_bitmask(matcher.native, bits, row)
        else:
            fill_next_token_bitmask_par(self._executor, [(matcher.native, row) for row, matcher in matchers], bits)
        return np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
