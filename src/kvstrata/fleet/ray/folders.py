"""Exclusive folders for the replicas of a machine: each takes the first one that is not locked.

After a restart replicas take the same folders again, so the blocks in them are reused.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from kvstrata.errors import ConfigError

MAX_FOLDERS = 1024


def take_folder(parent: Path) -> tuple[Path, Callable[[], None]]:
    """Lock a folder and return it with a function that releases it. The lock also ends with the process. Raises
    ConfigError."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(MAX_FOLDERS):
            fd = os.open(parent / f"replica-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            return parent / f"replica-{number}", lambda fd=fd: os.close(fd)
    except OSError as error:
        raise ConfigError(f"--disk-cache-dir {parent} cannot be used: {error}. Choose another folder.") from error
    raise ConfigError(f"--disk-cache-dir {parent}: all of its {MAX_FOLDERS} folders are in use. Choose another folder.")
