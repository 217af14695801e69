"""Cache settings as plain values; imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvstrata.layers.raw_window import RawWindow

if TYPE_CHECKING:
    from kvstrata.codecs.base import Codec

# after-reply  soon after a reply has ended, so that a crash or a power cut loses only the turns that run
# at-eviction  when memory runs short, and when the server ends
DiskWrite = Literal["after-reply", "at-eviction"]


@dataclass(frozen=True)
class PrecisionConfig:
    k: Codec | None = None  # of new spans; None: raw
    v: Codec | None = None
    min_quantize_tokens: int = 256  # shorter sequences stay raw: their overhead exceeds what is saved
    live: bool = False  # running sequences are encoded too,
    first_raw_tokens: int = RawWindow.first_tokens  # but for their first
    recent_raw_tokens: int = RawWindow.recent_tokens  # and newest tokens
    archives_planes: bool = True  # to the disk, what stepping down takes away
    gathers: bool = False  # planes of layers that are stored alike become rows of one array,
    apart: frozenset[int] = frozenset()  # but for these layers, which keep more bits than the others


@dataclass(frozen=True)
class PrecisionFloors:
    k_bits: int = 4
    v_bits: int = 4


@dataclass(frozen=True)
class LadderConfig:
    by_pressure: bool = False  # step down as memory fills up
    by_length: tuple[tuple[int, Codec], ...] = ()  # (tokens, precision): longer sequences are stored so
    floors: PrecisionFloors = field(default_factory=PrecisionFloors)


@dataclass(frozen=True)
class CacheConfig:
    hot_bytes: int  # most that stored spans may take
    disk_write: DiskWrite = "after-reply"
    max_arrays: int | None = None  # that MLX may have allocated for stored spans; None: any number
    max_checkpoints: int = 8  # on the way from the first token to the end of a span
    ttl_s: float | None = None  # what no request used for so long goes
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    ladder: LadderConfig = field(default_factory=LadderConfig)
