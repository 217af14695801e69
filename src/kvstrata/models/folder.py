"""Model folders: checks that read no weights, and publication of folders that kvstrata makes.

Each error names the next step. A folder is written beside its place, checked, and published by a rename: a crash or a
second process leaves either no folder or a whole one. A marker in it says what it was made from.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstrata.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MARKER = "kvstrata.json"


def check_folder(folder: Path) -> None:
    """Raise ModelError for a folder that cannot be a whole model."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder {folder}. Check the path, or get a model: kvstrata pull")
    if not isinstance(read_json(folder / "config.json").get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type, so kvstrata cannot run it. Get it again")
    _check_tokenizer(folder)
    for path in weight_files(folder):
        check_safetensors(path)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that mlx-lm reads. Raises ModelError when the index names a file that is missing."""
    index = folder / "model.safetensors.index.json"
    named = set(read_json(index).get("weight_map", {}).values()) if index.exists() else set()
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names. Get the model again")
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder} has no model*.safetensors. Get a model in MLX's or Hugging Face's safetensors format "
            "(mlx_lm.convert makes one)"
        )
    return files


def check_safetensors(path: Path) -> None:
    """Raise ModelError unless the header is whole and the file ends where the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length_bytes = file.read(8)
        header_bytes = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is damaged (no safetensors header). Delete it and get the model again")
        ends = _tensor_ends(path, file.read(header_bytes))
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{path} is damaged: {size} bytes where {expected} belong. Delete it and get the model again")


def _tensor_ends(path: Path, header: bytes) -> list[int]:
    try:
        entries = json.loads(header)
        return [int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path} is damaged (its header cannot be read). Delete it and get the model again") from error


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path.parent} has no {path.name}, so it is not a model folder. Give the folder that holds config.json"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is damaged ({error}). Get the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged (not a JSON object). Get the model again")
    return value


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES) and not any(folder.glob("*.tiktoken")):
        raise ModelError(
            f"{folder} has no tokenizer. Put the model's tokenizer.json and tokenizer_config.json beside its weights"
        )


def damage_of(folder: Path, made_from: Mapping[str, Any]) -> str:
    """Return the damage of a folder as text, empty if there is none. Reads sizes and headers only."""
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
    """Make and publish a folder. `make` gets a scratch folder and the folder to fill; `what` is for messages."""
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
