"""Distribution of a terminal's rows among sections, and of a line's cells among values. Pure: knows numbers and
characters, no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Wish:
    """Rows that a section wants. With fewer than `least` it is left out; smaller values of `first` are served first."""

    wanted: int
    least: int
    first: int = 0


def share_rows(height: int, wishes: Sequence[Wish]) -> list[int]:
    """Return the rows of each section in order: at most `height` in all, and none more than it wants."""
    given = [0] * len(wishes)
    left = height
    order = sorted(range(len(wishes)), key=lambda place: wishes[place].first)
    for place in order:
        least = min(wishes[place].least, wishes[place].wanted)
        if least <= left:
            given[place] = least
            left -= least
    # Add one row to each in turn, so that none starves.
    while left > 0 and (hungry := [place for place in order if 0 < given[place] < wishes[place].wanted]):
        for place in hungry[:left]:
            given[place] += 1
        left -= min(left, len(hungry))
    return given


def spark(series: Sequence[float | None], top: float | None = None) -> str:
    """Return a bar for each value, from 0 to `top`, by default the largest value. Unknown values are blank."""
    most = top or max((value for value in series if value is not None), default=0.0)
    return "".join(" " if value is None else _level(value, most) for value in series)


def _level(value: float, most: float) -> str:
    share = min(1.0, value / most) if most > 0 else 0.0
    return LEVELS[min(len(LEVELS) - 1, int(share * len(LEVELS)))]


def cells_of(parts: Mapping[str, float], whole: float, width: int) -> dict[str, int]:
    """Return the cells of each part if `whole` takes `width`. A part that is not empty gets at least one cell."""
    cells: dict[str, int] = {}
    left = width
    for name, size in parts.items():
        if size > 0 and left > 0:
            cells[name] = min(left, max(1, round(width * size / max(whole, 1e-9))))
            left -= cells[name]
    return cells
