"""What to do where MLX cannot run: on Linux its wheel has no back-end of its own, and one must be chosen.

Knows how this Python was set up: by pip, uv or pipx. Changes nothing.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from kvstrata.backend.machine import mlx_backend


def missing_backend() -> str | None:
    """A sentence with the command that mends it; None: MLX has a back-end here."""
    if mlx_backend() != "none":
        return None
    extra, other = "kvstrata[cpu]", "kvstrata[cuda13] if there is an NVIDIA GPU"
    if shutil.which("nvidia-smi"):
        extra, other = "kvstrata[cuda13]", "kvstrata[cuda12] for an older driver, kvstrata[cpu] for no GPU"
    return f"MLX has no back-end on this machine yet. Install one: {install_command(extra)}   ({other})"


def install_command(requirement: str, prefix: Path | None = None) -> str:
    """How a package is added beside this one. kvstrata itself is there already, so only what an extra names comes."""
    prefix = prefix or Path(sys.prefix)
    quoted = shlex.quote(requirement)
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx inject {prefix.name} {quoted}"
    if (prefix / "uv-receipt.toml").is_file() or not any(prefix.glob("lib/python*/site-packages/pip")):
        return f"uv pip install --python {shlex.quote(str(prefix))} {quoted}"
    return f"{shlex.quote(sys.executable)} -m pip install {quoted}"
