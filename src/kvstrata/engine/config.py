"""Engine settings as plain values: limits of what runs, storage of KV, and what lies outside the engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.prefix_cache.config import CacheConfig, DiskWrite, LadderConfig, PrecisionConfig, PrecisionFloors
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.remote.options import RemoteOptions
from kvstrata.spans.convert import RAW
from kvstrata.spans.plan import EDGE

# Of a long prompt, between two points that models with window or recurrent layers can be resumed at.
CHECKPOINT_EVERY_TOKENS = 4096


@dataclass(frozen=True)
class EngineLimits:
    max_running: int = 16  # sequences that hold KV
    max_waiting: int = 256  # requests past those; then QueueFull
    shares_queue: bool = False  # no owner takes more than half of the places that other owners leave
    context_tokens: int | None = None  # None: what the model was made for
    prefill_chunk_tokens: int | None = None  # None: from the speed that is measured
    prefill_share: float = 0.5  # of the time, that prompts may take while streams run
    max_kv_size: int | None = None  # tokens that a sequence keeps at most: the first few and the newest; None: all
    buffer_step_tokens: int = 2048  # room for the reply is added in steps of this
    memory_bytes: int | None = None  # weights, KV and scratch; None: 75 % of the device's memory
    wired_bytes: int = 0  # that macOS must not page out; 0: it decides
    slice_s: float = 0.005  # of work on stored KV between two decode steps

    @property
    def num_places(self) -> int:
        """Requests that run or wait at once."""
        return self.max_running + self.max_waiting


def half_of_places(num_places: int) -> int:
    """Half of what is left, so that the next one finds a place too."""
    return (num_places + 1) // 2


@dataclass(frozen=True)
class KvConfig(PrecisionConfig):
    """`gathers` and `apart` follow from the machine and the model's layers: engine/make.py sets them."""

    k: Codec = RAW[0]  # precision of stored keys
    v: Codec = RAW[1]
    edge_layers: int = 0  # so many first and last attention layers
    edge: Codec = EDGE  # are stored like this instead
    dynamic: bool = LadderConfig.by_pressure  # precision steps down as memory fills up,
    floor_k_bits: int = PrecisionFloors.k_bits  # not below this
    floor_v_bits: int = PrecisionFloors.v_bits
    dynamic_at: tuple[tuple[int, Codec], ...] = ()  # (tokens, precision): longer sequences step down
    hot_bytes: int | None = None  # most that stored KV takes in memory; None: what running sequences leave
    disk_write: DiskWrite = CacheConfig.disk_write
    ttl_s: float | None = None  # what no request used for so long goes; None: it stays while there is room
    max_checkpoints: int = (
        CacheConfig.max_checkpoints
    )  # resume points that a stored conversation keeps, in models that need them
    checkpoint_every_tokens: int = CHECKPOINT_EVERY_TOKENS  # of a long prompt, in such models


@dataclass(frozen=True)
class TierConfig:
    disk: DiskOptions | None = None  # None: what memory has no room for is gone
    files: Files | None = None  # how the disk's files are read and written; None: as the system does
    remote: RemoteOptions | None = None  # None: nothing is shared with other servers
    watcher: CacheListener | None = None  # who is told what memory holds
