"""Finds a model folder by its name: a folder, a GGUF file, a hub id, or nothing for the default model. Loads nothing.

A model of the Hugging Face hub is fetched at a commit that is remembered, so it changes only when its user asks.
HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have their usual meanings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ModelError
from kvstrata.models import default_model
from kvstrata.models.download import say
from kvstrata.models.folder import check_folder
from kvstrata.platform.files import read_notes, write_notes


@dataclass(frozen=True)
class FoundModel:
    """Model folder and the name under which it is served."""

    name: str  # what /v1/models shows
    folder: Path


def find_model(name_or_path: str | None) -> FoundModel:
    """Return the model of a name. Downloads a missing model, and converts a GGUF file once. Raises ModelError."""
    if name_or_path is None:
        return FoundModel(default_model.NAME, default_model.ensure_default_model())
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return FoundModel(path.resolve().name, path.resolve())
    if path.suffix == ".gguf":
        from kvstrata.models.gguf.convert import folder_of

        return FoundModel(path.stem, folder_of(path))
    if name_or_path == default_model.NAME:
        return FoundModel(default_model.NAME, default_model.ensure_default_model())
    model = HubModel.parse(name_or_path)
    return FoundModel(model.repo, fetch_hub_model(model))


def check_model_name(name_or_path: str | None) -> None:
    """Raise ModelError where a name can lead to no model: the folder or file is missing or not whole. Asks no hub."""
    if name_or_path is None or name_or_path == default_model.NAME:
        return
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        check_folder(path)
    elif path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"There is no file {path}. Check the path.")
    else:
        HubModel.parse(name_or_path)


def find_local_model(name_or_path: str | None) -> FoundModel:
    """Return a model that is on this machine; nothing is downloaded or converted.

    The folder is the GGUF file when that is not converted yet. Raises ModelError with the command that gets a missing
    model."""
    path = Path(name_or_path or default_model.NAME).expanduser()
    if name_or_path is not None and path.is_dir():
        return FoundModel(path.resolve().name, path.resolve())
    if path.suffix == ".gguf":
        from kvstrata.models.gguf.convert import converted

        return FoundModel(path.stem, converted(path) or path)
    if name_or_path is None or name_or_path == default_model.NAME:
        if not default_model.has_default_model():
            raise ModelError("The default model is not on this machine. Next: kvstrata pull")
        return FoundModel(default_model.NAME, default_model.default_folder())
    model = HubModel.parse(name_or_path)
    return FoundModel(model.repo, find_fetched(model))


HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
COMMITS = "hub-commits"  # notes: the commit of each name that was fetched


@dataclass(frozen=True)
class HubModel:
    """A model of the hub as its user names it: `REPO` or `REPO@REVISION`."""

    repo: str
    revision: str | None  # a branch, a tag or a commit; None: the main branch

    @classmethod
    def parse(cls, name: str) -> HubModel:
        """Return the hub model of a name. Raises ModelError for a name that is no hub id."""
        found = HUB_ID.fullmatch(name)
        if found is None:
            raise ModelError(
                f"There is no model folder {name}. Check the path, or give a hub id such as "
                "mlx-community/Qwen3-0.6B-4bit; without a name kvstrata uses its default model"
            )
        return cls(found["repo"], found["revision"])

    @property
    def name(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The commit that is named, or that was remembered; None: the hub has not been asked yet."""
        if self.revision is not None and COMMIT.fullmatch(self.revision):
            return self.revision
        noted = read_notes(COMMITS).get(self.name)
        return noted if isinstance(noted, str) and COMMIT.fullmatch(noted) else None


def fetch_hub_model(model: HubModel, *, renew: bool = False) -> Path:
    """Return the model's folder, at the commit that was fetched first. The hub is asked only for what is not here.
    `renew`: ask it for the newest commit, and remember that. Raises ModelError."""
    from huggingface_hub import HfApi, snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    # Python files are for remote code, which is never run.
    patterns = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern != "*.py"]
    known = model.commit
    with _hub_errors_told(model):
        commit = known
        if renew:
            commit = HfApi().model_info(model.repo, revision=model.revision).sha
        elif known is None:
            # What the hub's own cache knows counts where the hub cannot be reached.
            commit = HfApi().resolve_revision(model.repo, revision=model.revision).resolved
        folder = snapshot_download(model.repo, revision=commit, allow_patterns=patterns)
    if commit is not None and commit != known:
        write_notes(COMMITS, {**read_notes(COMMITS), model.name: commit})
        say(f"{model.name} is served at commit {commit}. For a newer one: kvstrata pull --renew {model.name}")
    return Path(folder)


def find_fetched(model: HubModel) -> Path:
    """Return the folder of a model that is on this machine; the hub is not asked. Raises ModelError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.repo, revision=model.commit or model.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ModelError(f"{model.name} is not on this machine. Next: kvstrata pull {model.name}") from error


@contextmanager
def _hub_errors_told(model: HubModel) -> Iterator[None]:
    import httpx2
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    name = model.repo
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(f"{name} is gated. Ask for access on its hub page, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"The hub has no model {name}, or it is private. Check the name, or set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{name} has no revision {model.revision or model.commit} on the hub. Name another one, or take the "
            f"newest: kvstrata pull --renew {name}"
        ) from error
    except (OSError, ValueError, RuntimeError, RevisionResolutionError, httpx2.HTTPError) as error:
        raise ModelError(_unreachable(name, error)) from error


def _unreachable(name: str, error: Exception) -> str:
    line = " ".join(str(error).split())[:300]
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return f"{name} is not in the local hub cache and HF_HUB_OFFLINE is set. Unset it, or give a model folder"
    return f"{name} could not be got from the hub ({line}). Check the network, or give a model folder"
