"""Stop strings in a text that arrives in pieces.

The matcher works on characters, not on tokens. The stop string that is complete first wins, and the longest one where
several end at the same character; so the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stopped:
    """Outcome of one piece of text."""

    text: str  # safe to show
    stop: str = ""  # the stop string that was found; empty: none yet
    rest: str = ""  # text after the stop string in this piece

    @property
    def stopped(self) -> bool:
        return self.stop != ""


class StopMatcher:
    """Matcher that holds back the longest end of the text that a stop string could begin with, and no more."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops) if stop]
        self._firsts = {progress.stop[0] for progress in self._progress}
        self._held = ""
        self._stop = ""

    @property
    def holds(self) -> bool:
        """Whether text is held back that a stop string may begin with."""
        return bool(self._held)

    def add(self, text: str) -> Stopped:
        if self._stop:
            return Stopped("", self._stop, text)
        if not self._held and self._firsts.isdisjoint(text):
            return Stopped(text)  # the common case: no stop string begins here
        for end, character in enumerate(text, start=1):
            complete = [progress.stop for progress in self._progress if progress.advance(character)]
            if complete:
                return self._cut(text, end, max(complete, key=len))
        return self._show(text)

    def finish(self) -> str:
        """Return the text held back, when the text ends without a stop string. Later text begins anew."""
        held, self._held = self._held, ""
        for progress in self._progress:
            progress.matched = 0
        return held

    def _show(self, text: str) -> Stopped:
        whole = self._held + text
        shown = len(whole) - max(progress.matched for progress in self._progress)
        self._held = whole[shown:]
        return Stopped(whole[:shown])

    def _cut(self, text: str, end: int, stop: str) -> Stopped:
        before = self._held + text[:end]
        self._held, self._stop = "", stop
        return Stopped(before[: -len(stop)], stop, text[end:])


class _Progress:
    """Length of the beginning of a stop string that the text ends with (Knuth-Morris-Pratt, linear in the text)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallbacks(stop)

    def advance(self, character: str) -> bool:
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched]
        if self.stop[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self.stop)


def _fallbacks(stop: str) -> list[int]:
    """Return, for each length, the longest proper prefix of `stop` that its first `length` characters end with."""
    table = [0, 0]
    matched = 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = table[matched]
        if stop[matched] == character:
            matched += 1
        table.append(matched)
    return table
