"""Gets a model from the Hugging Face hub. HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always mean.

Knows huggingface_hub and its errors; knows nothing of what is in a model.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvstrata.errors import ModelError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def fetch(name: str) -> Path:
    """The folder of the hub's model `name`; at once when it is already here."""
    check_id(name)
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(_snapshot(name))
    except GatedRepoError as error:
        raise ModelError(f"{name} is gated. Ask for access on its hub page, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"The hub has no model {name}, or it is private. Check the name, or set HF_TOKEN") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(_unreachable(name, error)) from error


def fetched(name: str) -> Path:
    """The same, of what is here already: the hub is not asked."""
    check_id(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(f"{name} is not on this machine. Next: kvstrata pull {name}") from error


def check_id(name: str) -> None:
    """Raise ModelError for what cannot be a hub's id."""
    if not HUB_ID.fullmatch(name):
        raise ModelError(
            f"There is no model folder {name}. Check the path, or give a hub id such as "
            "mlx-community/Qwen3-0.6B-4bit; without a name kvstrata uses its default model"
        )


def _snapshot(name: str) -> str:
    import httpx
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    # Python files are for remote code, which is never run.
    patterns = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern != "*.py"]
    try:
        return snapshot_download(name, allow_patterns=patterns)
    except httpx.HTTPError as error:
        raise OSError(str(error)) from error


def _unreachable(name: str, error: Exception) -> str:
    line = " ".join(str(error).split())[:300]
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return f"{name} is not in the local hub cache and HF_HUB_OFFLINE is set. Unset it, or give a model folder"
    return f"{name} could not be got from the hub ({line}). Check the network, or give a model folder"
