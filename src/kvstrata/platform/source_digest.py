"""Digest of source code, for files whose content depends on the code that wrote them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from blake3 import blake3

SUFFIXES = (".py", ".cuh", ".h")


@cache
def source_digest(folder: Path) -> str:
    """Return a digest of all modules and kernel texts in a folder and its subfolders."""
    digest = blake3()
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            digest.update(path.read_bytes())
    return digest.hexdigest()
