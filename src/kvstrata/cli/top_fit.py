"""How the rows of a terminal are shared among sections, and what a line of so many cells looks like. Pure: knows
numbers and characters, no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Wish:
    """Rows that a section would take. With fewer than `least` it is left out; `first` ones are served first."""

    wanted: int
    least: int
    first: int = 0


def share_rows(height: int, wishes: Sequence[Wish]) -> list[int]:
    """Rows for each, in their order: never more than `height` in all, nor more than is wanted."""
    given = [0] * len(wishes)
    left = height
    order = sorted(range(len(wishes)), key=lambda place: wishes[place].first)
    for place in order:
        least = min(wishes[place].least, wishes[place].wanted)
        if least <= left:
            given[place] = least
            left -= least
    # One more for each in turn, so that none starves while another is full.
    while left > 0 and (hungry := [place for place in order if 0 < given[place] < wishes[place].wanted]):
        for place in hungry[:left]:
            given[place] += 1
        left -= min(left, len(hungry))
    return given


def spark(series: Sequence[float | None], top: float | None = None) -> str:
    """A bar for each value, from 0 to `top`; left out: the largest. What is not known is a blank."""
    most = top or max((value for value in series if value is not None), default=0.0)
    return "".join(" " if value is None else _level(value, most) for value in series)


def _level(value: float, most: float) -> str:
    share = min(1.0, value / most) if most > 0 else 0.0
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]


def cells_of(parts: Mapping[str, float], whole: float, width: int) -> dict[str, int]:
    """How many of `width` cells each part takes, where `whole` takes all. What is there is seen: at least one cell."""
    cells: dict[str, int] = {}
    left = width
    for name, size in parts.items():
        if size > 0 and left > 0:
            cells[name] = min(left, max(1, round(width * size / max(whole, 1e-9))))
            left -= cells[name]
    return cells
