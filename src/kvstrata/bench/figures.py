"""Helpers of the benchmarks: alternating rounds, medians, dropping files from the page cache, tables and JSON."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

Progress = Callable[[str], None]  # called with the name of the next measurement

MIB = 1 << 20


def silent(_: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Figure:
    """A row of results, or a set of rows."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def in_turns(cases: Mapping[str, Callable[[], T]], rounds: int, progress: Progress = silent) -> dict[str, list[T]]:
    """Run the cases alternately and return each one's results by round."""
    found: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(rounds):
        # The last case may find the machine warmer, so reverse the order every other round.
        for name in list(cases) if number % 2 == 0 else reversed(list(cases)):
            progress(f"{name}, round {number + 1}")
            found[name].append(cases[name]())
    return found


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios, in which a slowdown of a whole round cancels out."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def leave_page_cache(files: Iterable[Path]) -> None:
    """Drop files from the page cache so that they are read from the disk. Does nothing where the system cannot do
    it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def lay_out(rows: Iterable[T], columns: Sequence[tuple[str, str, Callable[[T], object]]], *notes: str) -> str:
    """Return a table. `columns` holds the name, format and value of each column. Text uses only the width of the
    format, as the column's name does."""
    widths = [re.sub(r"(?<=\d)\D.*", "", form) for _, form, _ in columns]
    lines = ["".join(format(name, width) for (name, _, _), width in zip(columns, widths, strict=True))]
    for row in rows:
        values = [(value(row), form) for _, form, value in columns]
        placed = zip(values, widths, strict=True)
        lines.append("".join(format(v, width if isinstance(v, str) else form) for (v, form), width in placed).rstrip())
    return "\n".join([*lines, *notes])
