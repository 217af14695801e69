"""Rounds in turns, medians, files that leave the page cache, tables and JSON of the benchmarks."""

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

Progress = Callable[[str], None]  # hears what is measured next

MIB = 1 << 20


def silent(_: str) -> None:
    """For callers that show no progress."""


@dataclass(frozen=True)
class Figure:
    """One row of results, or all of them."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def in_turns(cases: Mapping[str, Callable[[], T]], rounds: int, progress: Progress = silent) -> dict[str, list[T]]:
    """What each case gave in each round."""
    found: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(rounds):
        # The case that goes last may find the machine warmer: take turns at that too.
        for name in list(cases) if number % 2 == 0 else reversed(list(cases)):
            progress(f"{name}, round {number + 1}")
            found[name].append(cases[name]())
    return found


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of the rounds' ratios: what slows a whole round down cancels out."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def leave_page_cache(files: Iterable[Path]) -> None:
    """So that they are read from the disk. Not every system can be asked for it."""
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
    """A table. `columns`: the name, the format and the value of each. A value that is text takes the format's width
    alone, as the name does."""
    widths = [re.sub(r"(?<=\d)\D.*", "", form) for _, form, _ in columns]
    lines = ["".join(format(name, width) for (name, _, _), width in zip(columns, widths, strict=True))]
    for row in rows:
        values = [(value(row), form) for _, form, value in columns]
        placed = zip(values, widths, strict=True)
        lines.append("".join(format(v, width if isinstance(v, str) else form) for (v, form), width in placed).rstrip())
    return "\n".join([*lines, *notes])
