"""Where kvstrata keeps what it can make again: models, libraries, checksums. Knows no file formats."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """KVSTRATA_HOME, else the user's cache folder. Not created here."""
    if home := os.environ.get("KVSTRATA_HOME"):
        return Path(home).expanduser().absolute()
    # Imported late: it costs as much as the rest of `import kvstrata`.
    from platformdirs import user_cache_path

    return user_cache_path("kvstrata", appauthor=False)


def make_writable(folder: Path) -> None:
    """Create a folder for its owner alone, unless it is there, and write to it once. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"kvstrata")
        probe.flush()
