"""Sizes as people write them: 8GiB, 500MB and 20%."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvstrata.errors import ConfigError

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)")
SIZE_EXAMPLES = "Write it like 8GiB, 500MB, 1.5GB, 1048576 or 20%"


@dataclass(frozen=True)
class Size:
    """A number of bytes, or a percentage of something that is not known yet."""

    num_bytes: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> Size:
        match = SIZE_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"'{text}' is not a size. {SIZE_EXAMPLES}.")
        number, unit = float(match[1]), match[2]
        if unit == "%":
            return cls._of_percent(number, text)
        if unit.upper() not in UNITS:
            raise ConfigError(f"'{text}' is not a size: the unit '{unit}' is unknown. {SIZE_EXAMPLES}.")
        return cls(num_bytes=int(number * UNITS[unit.upper()]))

    @classmethod
    def _of_percent(cls, number: float, text: str) -> Size:
        if not 0 < number <= 100:
            raise ConfigError(f"'{text}' is not a share: it must be above 0% and at most 100%, for example 20%.")
        return cls(percent=number)

    def of(self, total_bytes: int, most_bytes: int | None = None) -> int:
        """In bytes, where a percentage is of `total_bytes`, and not more than `most_bytes`."""
        if self.num_bytes is not None:
            return self.num_bytes
        share = int(total_bytes * (self.percent or 0.0) / 100)
        return share if most_bytes is None else min(share, most_bytes)

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.num_bytes is None else format_bytes(self.num_bytes)


def format_bytes(num_bytes: float, digits: int | None = None, *, whole_from: float = math.inf) -> str:
    """Return a size with `digits` decimals, like `1.5 MiB`, or, without `digits`, as short as settings are written:
    8GiB, 1.465MiB, 17B. `Size.parse` reads both. From `whole_from` on a number has no decimals."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if abs(num_bytes) >= 1024**power:
            value = num_bytes / 1024**power
            if digits is None:
                return f"{value:.4g}{letter}iB"
            return f"{value:.{0 if abs(value) >= whole_from else digits}f} {letter}iB"
    return f"{num_bytes:.0f}B" if digits is None else f"{num_bytes:.0f} B"
