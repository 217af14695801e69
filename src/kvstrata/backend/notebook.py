"""Small JSON files in the cache folder: what was found out once and would take long to find out again.

A file that cannot be read is empty, and one that cannot be written only makes the next start slower.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvstrata.backend.folders import cache_root


def read_notes(name: str) -> dict[str, Any]:
    try:
        value = json.loads(_path(name).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_notes(name: str, notes: dict[str, Any]) -> None:
    """Published by rename. Of two processes the later wins; what the other found out is found out once more."""
    target = _path(name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f"{name}-", delete=False) as file:
            json.dump(notes, file)
        os.replace(file.name, target)
    except OSError:
        return


def _path(name: str) -> Path:
    return cache_root() / f"{name}.json"
