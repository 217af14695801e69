"""Checks of a model folder that cost no reading of weights, each with the next step in its message.

Knows the files of a Hugging Face model folder and the safetensors header. Loads nothing.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from kvstrata.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def check_folder(folder: Path) -> None:
    """Raises ModelError for a folder that cannot be a whole model."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder {folder}. Check the path, or get a model: kvstrata pull")
    if not isinstance(read_json(folder / "config.json").get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} names no model_type, so kvstrata cannot run it. Get it again")
    _check_tokenizer(folder)
    for path in weight_files(folder):
        check_safetensors(path)


def weight_files(folder: Path) -> list[Path]:
    """The files that mlx-lm reads; all that the index names must be among them."""
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
    """The header must be whole and the file must end where the header says."""
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
