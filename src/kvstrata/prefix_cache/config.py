"""Cache settings as plain values; imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvstrata.kv.raw_window import RawWindow

if TYPE_CHECKING:
    from kvstrata.codecs.base import Codec

# after_reply  soon after each reply, so that a crash or a power cut loses running requests only
# on_evict  under memory pressure, and at shutdown
DiskWrite = Literal["after_reply", "on_evict"]


@dataclass(frozen=True)
class CacheConfig:
    """Users' settings of the prefix cache."""

    k: Codec | None = None  # codec of keys in new spans; None: raw
    v: Codec | None = None  # codec of values
    min_quantize_tokens: int = 256  # shorter sequences stay raw: a codec's overhead exceeds its gain
    encodes_running: bool = False  # encode running sequences too
    first_raw_tokens: int = RawWindow.first_tokens  # of a running sequence: first tokens that stay raw
    recent_raw_tokens: int = RawWindow.recent_tokens  # of a running sequence: newest tokens that stay raw
    dynamic: bool = False  # precision steps down under memory pressure
    floor_bits: int = 4  # fewest bits that keys and values step down to
    dynamic_at: tuple[tuple[int, Codec], ...] = ()  # (tokens, codec): longer sequences step down to this codec
    archives_planes: bool = True  # write planes to the disk before a step-down drops them
    disk_write: DiskWrite = "after_reply"
    ttl_s: float | None = None  # entries unused for longer expire; None: never
    max_checkpoints: int = 8  # on the path from the first token to the end of a span, in models that need them


@dataclass(frozen=True)
class CacheLimits:
    """Limits of the prefix cache, by the machine and the model."""

    max_bytes: int  # of all cached spans and checkpoints
    max_arrays: int | None = None  # that MLX may allocate for them; None: any number
