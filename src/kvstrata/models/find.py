"""From what the user typed to a model folder: a folder, a GGUF file, a hub id, or nothing for the default model. Loads
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ModelError
from kvstrata.models import default
from kvstrata.models.files import check_folder
from kvstrata.models.hub import HubModel, fetch, fetched


@dataclass(frozen=True)
class Found:
    name: str  # what /v1/models shows
    folder: Path


def find(name_or_path: str | None) -> Found:
    """Downloads what is not here, and converts a GGUF file when it is first asked for. Raises ModelError."""
    if name_or_path is None:
        return Found(default.NAME, default.get_default())
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return Found(path.resolve().name, path.resolve())
    if path.suffix == ".gguf":
        from kvstrata.models.gguf.folder import folder_of

        return Found(path.stem, folder_of(path))
    if name_or_path == default.NAME:
        return Found(default.NAME, default.get_default())
    model = HubModel.parse(name_or_path)
    return Found(model.repo, fetch(model))


def check_named(name_or_path: str | None) -> None:
    """Raise ModelError where a name can lead to no model: the folder or file is missing or not whole. Asks no hub."""
    if name_or_path is None or name_or_path == default.NAME:
        return
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        check_folder(path)
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"There is no file {path}. Check the path.")
    else:
        HubModel.parse(name_or_path)


def find_here(name_or_path: str | None) -> Found:
    """What is on this machine: nothing is downloaded, nothing converted. The folder is a GGUF file where that was not
    converted yet. Raises ModelError with the command that gets what is missing."""
    path = Path(name_or_path or default.NAME).expanduser()
    if name_or_path is not None and path.is_dir():
        return Found(path.resolve().name, path.resolve())
    if path.suffix == ".gguf":
        from kvstrata.models.gguf.folder import converted

        return Found(path.stem, converted(path) or path)
    if name_or_path is None or name_or_path == default.NAME:
        if not default.default_is_whole():
            raise ModelError("The default model is not on this machine. Next: kvstrata pull")
        return Found(default.NAME, default.default_folder())
    model = HubModel.parse(name_or_path)
    return Found(model.repo, fetched(model))
