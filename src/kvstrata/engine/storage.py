"""What becomes of KV that was computed. Plain values; the store's own defaults are in store/options.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.engine.limits import MARK_EVERY_TOKENS
from kvstrata.spans.convert import RAW
from kvstrata.spans.plan import EDGE
from kvstrata.store.options import DiskWrite, Floors, LadderOptions, PrecisionOptions, StoreOptions


@dataclass(frozen=True)
class Storage(PrecisionOptions):
    """`gathers` and `apart` follow from the machine and the model's layers: engine/make.py sets them."""

    k: Codec = RAW[0]  # precision of stored keys
    v: Codec = RAW[1]
    edge_layers: int = 0  # so many first and last attention layers
    edge: Codec = EDGE  # are stored like this instead
    dynamic: bool = LadderOptions.by_pressure  # precision steps down as memory fills up,
    floor_k_bits: int = Floors.k_bits  # not below this
    floor_v_bits: int = Floors.v_bits
    dynamic_at: tuple[tuple[int, Codec], ...] = ()  # (tokens, precision): longer sequences step down
    hot_bytes: int | None = None  # most that stored KV takes in memory; None: what running sequences leave
    disk_write: DiskWrite = StoreOptions.disk_write
    ttl_s: float | None = None  # what no request used for so long goes; None: it stays while there is room
    max_marks: int = StoreOptions.max_marks  # resume points that a stored conversation keeps, in models that need them
    mark_every_tokens: int = MARK_EVERY_TOKENS  # of a long prompt, in such models
