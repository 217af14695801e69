"""Engine settings as plain values: limits, KV cache, and tiers."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.codecs.base import Codec
from kvstrata.kv.precision_plan import RAW
from kvstrata.prefix_cache.config import CacheConfig
from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.options import DiskOptions, RemoteOptions

# Tokens between two state checkpoints of a long prompt, in models with window or recurrent layers.
CHECKPOINT_EVERY_TOKENS = 4096

# Requests that may wait, for each sequence that may run.
WAITING_PER_SEQUENCE = 16


@dataclass(frozen=True)
class EngineLimits:
    """Limits of requests, prefill and memory."""

    max_running: int = 16  # sequences that hold KV
    max_waiting: int = WAITING_PER_SEQUENCE * max_running  # requests beyond them; further requests get QueueFull
    shares_queue: bool = False  # an owner takes at most half of the places that other owners leave
    context_tokens: int | None = None  # None: the context of the model
    prefill_chunk_tokens: int | None = None  # None: chosen from the measured speed
    prefill_share: float = 0.5  # most of the time that prompts may take while streams run
    max_kv_size: int | None = None  # most tokens that a sequence keeps: the first few and the newest; None: all
    buffer_step_tokens: int = 2048  # growth of a KV buffer for the reply
    memory_bytes: int | None = None  # weights, KV and scratch; None: 75 % of the device's memory
    wired_bytes: int = 0  # memory that macOS must not page out; 0: macOS decides
    slice_s: float = 0.005  # background work between two decode steps

    @property
    def num_places(self) -> int:
        """Most requests that run or wait at once."""
        return self.max_running + self.max_waiting

    def longest_context(self, model_tokens: int) -> int:
        """Return the longest context that is served of a model with a context of `model_tokens`."""
        return min(self.context_tokens or model_tokens, model_tokens)


def half_of_places(num_places: int) -> int:
    """Return half of the places, rounded up, so that an owner that comes later still gets one."""
    return (num_places + 1) // 2


@dataclass(frozen=True)
class KvConfig(CacheConfig):
    """Settings of the KV cache: settings of the prefix cache, and settings that become limits and plans of a model."""

    k: Codec = RAW[0]  # codec of cached keys
    v: Codec = RAW[1]  # codec of cached values
    hot_bytes: int | None = None  # most memory for cached KV; None: all that running sequences leave
    checkpoint_every_tokens: int = CHECKPOINT_EVERY_TOKENS  # of a long prompt, in models that need checkpoints


@dataclass(frozen=True)
class TierConfig:
    """Tiers below memory, and a listener for changes of the cache."""

    disk: DiskOptions | None = None  # None: evicted entries are lost
    files: Filesystem | None = None  # file operations of the disk tier; None: those of the system
    remote: RemoteOptions | None = None  # None: no tier is shared with other servers
    listener: CacheListener | None = None  # is informed of entries in memory
