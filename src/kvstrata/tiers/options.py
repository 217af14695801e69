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
    reserve_bytes: int = 1 << 30  # of the volume, left free for other programs
    queue_bytes: int = 256 << 20  # of blocks not yet written, at most
    daily_write_bytes: int = 0  # 0: no limit
    ttl_s: float | None = None  # unused blocks are deleted after this time; None: only for lack of space
    wait_s: float = 5.0  # longest wait of a request for the writing of blocks that memory evicts; 0: it does not wait
    flush_s: float = 30.0  # for blocks that are not written when the server ends
    # Read and not yet used, at most: half a second of a fast disk, and several blocks of any model. The prefix cache
    # holds as much again in arrays. A small KV budget lowers it.
    read_ahead_bytes: int = 128 << 20
    num_readers: int = 2
    first_pause_s: float = 5.0  # after a fault of the disk; each further one is twice as long
    # Share of one core for writing, while no flush or close waits and at most a quarter of the queue is full: tens of
    # megabytes a second, which is more KV than a model computes on such a core.
    writer_share: float = 0.05
    checksum: Checksum | None = None  # None: the one that is faster on this machine


@dataclass(frozen=True)
class RemoteOptions:
    url: RemoteUrl
    secret_file: Path | None = field(default=None, repr=False)
    precision: str = "planes:8"  # of all blocks there; in their names
    ttl_s: float = 7 * 86_400.0  # unused blocks are deleted after this time; 0: only for lack of space
    daily_write_bytes: int = 0  # by this server; 0: no limit
    max_block_bytes: int = 1 << 30  # of the tensors of one block: a larger one is not read
    queue_bytes: int = 128 << 20  # of blocks not yet written, at most
    read_ahead_bytes: int = 128 << 20  # read and not yet used, at most
    num_readers: int = 3
    first_pause_s: float = 1.0  # after a fault; each further one is twice as long
    longest_pause_s: float = 60.0
    flush_s: float = 5.0  # for queued blocks when the server ends
