"""Settings and defaults of the tiers. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.tiers.block_file import Checksum
from kvstrata.tiers.remote.url import RemoteUrl


@dataclass(frozen=True)
class DiskOptions:
    directory: Path
    limit_bytes: int
    reserve_bytes: int = 1 << 30  # of the volume, that are left to others
    queue_bytes: int = 256 << 20  # on their way to the disk
    daily_write_bytes: int = 0  # 0: no limit
    second_touch: bool = False  # write only what was asked for twice
    ttl_s: float | None = None  # a block that no request used for so long goes; None: it stays while there is room
    wait_s: float = 5.0  # most that a request waits until blocks that memory lets go are written; 0: it does not wait
    flush_s: float = 30.0  # for what is not written yet when the server ends
    # Read and not yet used, at most: half a second of a fast disk, and several blocks of any model. The store holds as
    # much again in arrays. A small budget for KV lowers it.
    read_ahead_bytes: int = 128 << 20
    num_readers: int = 2
    first_pause_s: float = 5.0  # after a fault of the disk; each further one is twice as long
    # Of one core, for writing while no flush or close waits and the queue is not a quarter full: tens of megabytes a
    # second, which is more than a model that computes on such a core makes.
    writer_share: float = 0.05
    checksum: Checksum | None = None  # None: the one that is faster on this machine


@dataclass(frozen=True)
class RemoteOptions:
    url: RemoteUrl
    secret_file: Path | None = field(default=None, repr=False)
    precision: str = "planes:8"  # of all blocks there; in their names
    ttl_s: float = 7 * 86_400.0  # a block that no server used for so long goes; 0: it stays while there is room
    daily_write_bytes: int = 0  # by this server; 0: no limit
    max_block_bytes: int = 1 << 30  # of the tensors of one block: what is larger is not read
    second_touch: bool = False  # write only what was asked for twice
    queue_bytes: int = 128 << 20  # on their way there
    read_ahead_bytes: int = 128 << 20  # read and not yet used, at most
    num_readers: int = 3
    first_pause_s: float = 1.0  # after a fault; each further one is twice as long
    longest_pause_s: float = 60.0
    flush_s: float = 5.0  # for what is queued when the server ends
