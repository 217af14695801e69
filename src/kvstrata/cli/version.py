"""`kvstrata version`: the versions for a bug report. Imports no MLX, so it works where MLX does not."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from kvstrata import __version__
from kvstrata.platform.device import mlx_backend

PACKAGES = ("mlx", "mlx-lm")


def version(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout and nothing else.")] = False,
) -> None:
    """Show the versions of kvstrata, MLX, mlx-lm and Python, and MLX's back-end."""
    facts = {
        "kvstrata": __version__,
        **{name: _installed(name) for name in PACKAGES},
        "back-end": mlx_backend(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<10}{value}")


def _installed(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"
