"""What a store is told when it is made. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstrata.store.precision.pressure import LadderOptions
from kvstrata.store.precision.target import PrecisionOptions


@dataclass(frozen=True)
class StoreOptions:
    hot_bytes: int  # most that stored spans may take
    write_through: bool = False  # to the disk at once, not when memory runs short
    max_arrays: int | None = None  # that MLX may have allocated for stored spans; None: any number
    max_marks: int = 8  # on the way from the first token to the end of a span
    ttl_s: float | None = None  # what no request used for so long goes
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    ladder: LadderOptions = field(default_factory=LadderOptions)
