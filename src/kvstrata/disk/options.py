"""What can be set about the disk tier, with its defaults: declared here and nowhere else. Plain values.

Imports nothing heavy: `config.py` takes its defaults from here before a command has loaded anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstrata.disk.checksum import Checksum


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
