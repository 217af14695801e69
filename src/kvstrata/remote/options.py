"""What can be set about the remote tier, with its defaults: declared here and nowhere else. Plain values.

Imports nothing heavy: `config.py` takes its defaults from here before a command has loaded anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.remote.url import RemoteUrl


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
