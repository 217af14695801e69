"""`kvstrata ray`: configuration for replicas on Ray Serve, which Ray's own commands deploy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.settings_options import given, with_settings
from kvstrata.config import load as load_settings
from kvstrata.errors import ConfigError
from kvstrata.fleet.ray.deploy import Scale, deploy_text
from kvstrata.tiers.remote.url import parse_url

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Serve replicas of a model on Ray Serve.")


@app.callback()
def _group() -> None:
    """Keep `config` a sub-command: without a callback Typer would make it the app itself."""


@app.command()
@with_settings(without=["model"])
def config(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="As for kvstrata serve.", show_default="the default model, SmolLM2-135M-Instruct"),
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(help="Number of replicas, or MIN-MAX: as many as waiting requests need.", metavar="number"),
    ] = "1-2",
    cpus: Annotated[
        float, typer.Option(help="CPUs of each replica, as Ray counts them.", min=0, metavar="number")
    ] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of each replica.", min=0, metavar="number")] = 0.0,
    **flags: Any,
) -> None:
    """Print a configuration for `serve run`, `serve deploy` or KubeRay.

    Settings are those of `kvstrata serve`, and every replica gets them. Each has a folder of its own in
    --disk-cache-dir; --remote-cache is what they share. Keys belong into a file (--api-key-file), the password of a
    store into a variable: 'redis://:${STORE_PASSWORD}@cache:6379/0'.
    """
    values = {name: _absolute(value) for name, value in given(context, {"model": model, **flags}).items()}
    settings = load_settings(flags=values)
    if settings.api_key or settings.admin_key:
        raise ConfigError("A key would stand in this configuration for all to read. Use --api-key-file FILE.")
    if "remote_cache" in values and parse_url(values["remote_cache"]).has_plain_password:
        raise ConfigError(
            "The password in --remote-cache would stand in this configuration for all to read. Name a variable in its "
            "place, as in --remote-cache 'redis://:${STORE_PASSWORD}@cache:6379/0', and set it on every node."
        )
    least, most = _numbers(replicas)
    typer.echo(deploy_text(settings, values, Scale(least, most, cpus, gpus)), nl=False)
    if importlib.util.find_spec("ray") is None:
        typer.echo("Ray is not installed here. Next: pip install 'kvstrata[ray]'", err=True)


def _numbers(text: str) -> tuple[int, int]:
    least, mark, most = text.partition("-")
    if least.isdigit() and (most.isdigit() if mark else not most) and 1 <= int(least) <= int(most or least):
        return int(least), int(most or least)
    raise ConfigError(f"--replicas {text}: give a number such as 2, or two such as 1-4.")


def _absolute(value: Any) -> Any:
    """Make a path absolute, because replicas start in folders of their own."""
    if isinstance(value, str) and (value.startswith((".", "~")) or Path(value).exists()):
        return str(Path(value).expanduser().resolve())
    return value
