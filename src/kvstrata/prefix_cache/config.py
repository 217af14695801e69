"""Cache settings as plain values; imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvstrata.layers.raw_window import RawWindow

if TYPE_CHECKING:
    from kvstrata.codecs.base import Codec

# after-reply  soon after each reply, so that a crash or a power cut loses running requests only
# at-eviction  under memory pressure, and at shutdown
DiskWrite = Literal["after-reply", "at-eviction"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision of new spans, and of the KV of running sequences."""

    k: Codec | None = None  # codec of keys in new spans; None: raw
    v: Codec | None = None  # codec of values
    min_quantize_tokens: int = 256  # shorter sequences stay raw: a codec's overhead exceeds its gain
    encodes_running: bool = False  # encode running sequences too
    first_raw_tokens: int = RawWindow.first_tokens  # of a running sequence: first tokens that stay raw
    recent_raw_tokens: int = RawWindow.recent_tokens  # of a running sequence: newest tokens that stay raw
    archives_planes: bool = True  # write planes to the disk before a step-down drops them
    gathers: bool = False  # combine the small planes of layers with equal codecs into rows of one array
    apart: frozenset[int] = frozenset()  # layers with more bits than the others; they are not combined


@dataclass(frozen=True)
class PrecisionFloors:
    """Fewest bits that a step-down may leave."""

    k_bits: int = 4
    v_bits: int = 4


@dataclass(frozen=True)
class LadderConfig:
    """Triggers and limits of step-downs."""

    by_pressure: bool = False  # step down under memory pressure
    by_length: tuple[tuple[int, Codec], ...] = ()  # (tokens, codec): precision of longer sequences
    floors: PrecisionFloors = field(default_factory=PrecisionFloors)


@dataclass(frozen=True)
class CacheConfig:
    """Limits and policies of the prefix cache."""

    hot_bytes: int  # maximum for cached spans
    disk_write: DiskWrite = "after-reply"
    max_arrays: int | None = None  # maximum that MLX may allocate for cached spans; None: no limit
    max_checkpoints: int = 8  # maximum on the path from the first token to the end of a span
    ttl_s: float | None = None  # entries unused for longer expire; None: never
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    ladder: LadderConfig = field(default_factory=LadderConfig)
