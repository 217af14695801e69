"""Where kvstrata keeps what it can make again: models, libraries, checksums. Knows no file formats."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """KVSTRATA_HOME, else the user's cache folder. Not created here."""
    if home := os.environ.get("KVSTRATA_HOME"):
        return Path(home).expanduser().absolute()
    # Imported late: it costs as much as the rest of `import kvstrata`.
    from platformdirs import user_cache_path

    return user_cache_path("kvstrata", appauthor=False)
