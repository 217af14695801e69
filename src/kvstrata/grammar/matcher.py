"""Position of a reply in its grammar, and the masks of allowed tokens for a batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

MAX_REASON_CHARS = 500
# llguidance adds the state of its parser, or a backtrace.
_DETAILS = re.compile(r"\n?<(state|backtrace|non-verbose/).*", re.DOTALL)
NO_TOKEN = "the model has no token for what must come next"
_DEAD_END = ("NoExtension", "NoExtensionBias")


class Matcher:
    """Position of one reply in its grammar. Used by one thread at a time, it takes each token once and in order."""

    def __init__(self, native: LLMatcher, num_tokens: int, after: tuple[int, ...] = ()) -> None:
        """`num_tokens`: bits of its masks. `after`: consecutive ids after which the grammar begins; none: it begins
        with the first token."""
        self._native = native
        self.num_tokens = num_tokens
        self._after = after
        self._last: tuple[int, ...] = ()  # of the tokens before it began
        self.has_begun = not after
        self.num_consumed = 0  # tokens of the reply

    @property
    def native(self) -> LLMatcher:
        return self._native

    @property
    def error(self) -> str:
        """The reason why no further token is possible; empty while one is."""
        return shortened(reason_of(self._native))

    def consume(self, place: int, token: int) -> None:
        """Consume the token at `place` in the reply. A token that the grammar does not allow sets `error`."""
        if place != self.num_consumed:
            raise RuntimeError(f"a grammar that has taken {self.num_consumed} tokens was given number {place}")
        self.num_consumed += 1
        if self.has_begun:
            self._native.consume_token(token)
        else:
            self._last = (*self._last, token)[-len(self._after) :]
            self.has_begun = self._last == self._after


def reason_of(native: LLMatcher) -> str:
    """Return llguidance's error without details of its parser; empty when there is none."""
    if not native.is_error():
        return ""
    reason = _DETAILS.sub("", native.get_error()).strip()
    if reason in _DEAD_END:
        return "no text can match it"
    return reason


def shortened(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."


@dataclass(frozen=True)
class AllowedTokens:
    tokens: NDArray[np.bool_] | None = None  # [rows, vocab]; None: all, in every row
    failures: dict[int, str] = field(default_factory=dict)  # by row: why its grammar cannot go on; all are allowed


class TokenMasks:
    """Masks for the rows of a batch, filled in one call. Knows no logits and no requests."""

    @cached_property
    def _executor(self) -> LLExecutor:
        """The executor, whose threads start with the first grammar."""
        return LLExecutor()

    def fill(self, matchers: Sequence[Matcher | None], vocab_size: int) -> AllowedTokens:
        """Return the allowed tokens of each row. Rows without a matcher, or whose grammar has not begun, are free.

        `vocab_size`: number of logits."""
        begun = [(row, matcher) for row, matcher in enumerate(matchers) if matcher is not None and matcher.has_begun]
        failures = {row: error for row, matcher in begun if (error := matcher.error)}
        sound = [(row, matcher) for row, matcher in begun if row not in failures]
        if not sound:
            return AllowedTokens(None, failures)
        allowed = self._bits(sound, len(matchers), vocab_size)
        for row, matcher in sound:
            if error := matcher.error or ("" if allowed[row].any() else NO_TOKEN):
                failures[row] = error
                allowed[row] = True
        return AllowedTokens(allowed, failures)

    def _bits(self, matchers: list[tuple[int, Matcher]], num_rows: int, vocab_size: int) -> NDArray[np.bool_]:
        num_tokens = max(vocab_size, max(matcher.num_tokens for _, matcher in matchers))
        bits = allocate_token_bitmask(num_rows, num_tokens)  # all are allowed
        if len(matchers) == 1:
            ((row, matcher),) = matchers
            fill_next_token_bitmask(matcher.native, bits, row)
        else:
            fill_next_token_bitmask_par(self._executor, [(matcher.native, row) for row, matcher in matchers], bits)
        return np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
