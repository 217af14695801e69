"""What an engine has beside its model and its memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.remote.options import RemoteOptions
from kvstrata.store.watching import Watcher


@dataclass(frozen=True)
class Outside:
    disk: DiskOptions | None = None  # None: what memory has no room for is gone
    files: Files | None = None  # how the disk's files are read and written; None: as the system does
    remote: RemoteOptions | None = None  # None: nothing is shared with other servers
    watcher: Watcher | None = None  # who is told what memory holds
