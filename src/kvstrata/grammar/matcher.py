"""Where one reply stands in its grammar. Touched by one thread at a time.

Knows the tokens of its reply by their place in it: it takes each once and in order, or raises.
"""

from __future__ import annotations

import re

from llguidance import LLMatcher

MAX_REASON_CHARS = 500
# llguidance adds the state of its parser, or a backtrace.
_DETAILS = re.compile(r"\n?<(state|backtrace|non-verbose/).*", re.DOTALL)
_DEAD_END = ("NoExtension", "NoExtensionBias")


class Matcher:
    def __init__(self, native: LLMatcher, num_tokens: int, after: tuple[int, ...] = ()) -> None:
        """`num_tokens`: bits of its masks. `after`: ids that come in a row before the grammar begins; none: it begins
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
        """Why it cannot go on; empty: it can."""
        return shortened(reason_of(self._native))

    def consume(self, place: int, token: int) -> None:
        """The token at `place` in the reply. One that the grammar does not allow makes an `error`."""
        if place != self.num_consumed:
            raise RuntimeError(f"a grammar that has taken {self.num_consumed} tokens was given number {place}")
        self.num_consumed += 1
        if self.has_begun:
            self._native.consume_token(token)
        else:
            self._last = (*self._last, token)[-len(self._after) :]
            self.has_begun = self._last == self._after


def reason_of(native: LLMatcher) -> str:
    """What llguidance says is wrong, as far as a client needs it."""
    if not native.is_error():
        return ""
    reason = _DETAILS.sub("", native.get_error()).strip()
    if reason in _DEAD_END:
        return "no text can match it"
    return reason


def shortened(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."
