"""Files with keys and secrets: read only where no other user of the machine can read or write them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OPEN_TO_ALL = stat.S_IROTH | stat.S_IWOTH


class OpenToAll(Exception):
    """Every user can read or write the file."""


def read_private(path: Path) -> bytes:
    """Return what is in the file. Raises OSError and OpenToAll."""
    with path.expanduser().open("rb") as file:
        # Of the file that is open: one of that name may be another by now.
        if os.fstat(file.fileno()).st_mode & OPEN_TO_ALL:
            raise OpenToAll
        return file.read()
