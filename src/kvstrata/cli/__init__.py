"""The command `kvstrata`: one module for each sub-command, imported when it is called, so that --help answers at once.

Knows which commands there are and how an error is shown. A module has a function by the command's name, or, where the
command has commands of its own, a Typer called `app`. To add one: write the module, add its line to COMMANDS.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvstrata.errors import KvstrataError

COMMANDS: Mapping[str, str] = {
    "serve": "Serve a model to OpenAI clients.",
    "chat": "Chat with a running server.",
    "launch": "Start a coding agent that uses a running server.",
    "top": "Watch a running server's cache.",
    "cache": "See and change what a running server has cached.",
    "ray": "Serve replicas of a model on Ray Serve.",
    "pull": "Get a model, so that serving it starts at once.",
    "doctor": "Show what this machine offers, what is slow, and the next step.",
    "bench": "Measure this machine, beside an honest opponent.",
}
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """Lists the commands by name and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name else listed, rest


def load_command(name: str) -> Any:
    module = importlib.import_module(f"kvstrata.cli.{name}")
    own = getattr(module, "app", None)
    if own is None:
        own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        own.command(name=name, context_settings=HELP_NAMES)(getattr(module, name))
    return get_command(own)


app = typer.Typer(
    name="kvstrata",
    cls=Commands,
    help="A local LLM server on MLX whose KV cache is managed memory.",
    epilog="Start with: kvstrata serve    then, in another terminal: kvstrata chat",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvstrata import __version__

        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    del version


for _name, _summary in COMMANDS.items():
    app.command(name=_name, help=_summary)(lambda: None)


def main() -> None:
    """Errors of ours are one clear line and exit code 1; wrong usage is 2."""
    try:
        app()
    except KvstrataError as error:
        print(f"kvstrata: {error}", file=sys.stderr)
        sys.exit(1)
