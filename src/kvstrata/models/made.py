"""Model folders that kvstrata makes: written beside their place, checked, and published whole by a rename.

A crash or a second process leaves either no folder or a whole one. A marker in it says what it was made from.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstrata.errors import ModelError
from kvstrata.models.files import check_folder, read_json

MARKER = "kvstrata.json"


def damage_of(folder: Path, made_from: Mapping[str, Any]) -> str:
    """What is wrong with the folder, or nothing. Sizes and headers only: cheap enough for every start."""
    try:
        marker = read_json(folder / MARKER)
        if any(marker.get(name) != value for name, value in made_from.items()):
            return "it was made by another version of kvstrata, or from another file"
        for name, size in dict(marker.get("file_bytes", {})).items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != size:
                return f"{name} is missing or not as long as it was"
        check_folder(folder)
    except (ModelError, OSError) as error:
        return str(error)
    return ""


def make_folder(folder: Path, made_from: Mapping[str, Any], what: str, make: Callable[[Path, Path], None]) -> None:
    """`make` gets a folder for what it needs meanwhile, and the one to fill. `what` names the model in messages."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
            making, made = Path(name), Path(name) / "made"
            made.mkdir()
            make(making, made)
            check_folder(made)
            sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
            (made / MARKER).write_text(json.dumps({**made_from, "file_bytes": sizes}, indent=2) + "\n")
            _publish(made, folder, made_from)
    # MLX reports a failed write as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{what} could not be written to {folder.parent}: {error}. "
            "Make room there, or set KVSTRATA_HOME to another folder"
        ) from error


def _publish(made: Path, folder: Path, made_from: Mapping[str, Any]) -> None:
    if not damage_of(folder, made_from):
        return  # another process was faster
    with contextlib.suppress(FileNotFoundError):
        folder.rename(made.with_name("replaced"))
    try:
        made.rename(folder)
    except OSError:
        if damage_of(folder, made_from):
            raise


def check_disk(folder: Path, needed_bytes: int, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"Not enough disk space for {what} in {folder}: {free / 1e6:.0f} MB free, "
            f"{needed_bytes / 1e6:.0f} MB needed while it is converted. "
            "Make room, or set KVSTRATA_HOME to another folder"
        )
