"""The command `kvstrata`: one module for each sub-command, imported when it is called, so that --help is fast.

This module has the list of commands, the output of errors, and `kvstrata version`, which imports no MLX: it works where
MLX does not. A command's module has a function of the command's name or, for a group of commands, a Typer called `app`.
To add one: write the module, add its line to COMMANDS.
"""

from __future__ import annotations

import importlib
import json
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvstrata.errors import KvstrataError
from kvstrata.printable import printable

COMMANDS: Mapping[str, str] = {
    "serve": "Serve a model to OpenAI clients.",
    "chat": "Chat with a running server.",
    "launch": "Start a coding agent that uses a running server.",
    "top": "Watch a running server's cache.",
    "cache": "Show and change the cache of a running server.",
    "ray": "Serve replicas of a model on Ray Serve.",
    "pull": "Download a model, so that serving it starts at once.",
    "plan": "Show how many tokens and conversations will fit, before anything is loaded.",
    "doctor": "Show this machine's capabilities, causes of slowness, and the next step.",
    "bench": "Measure this machine, or any server, beside an alternative.",
    "service": "Print a unit of systemd or launchd that keeps a server running.",
    "version": "Show the versions of kvstrata, MLX, mlx-lm and Python.",
}
HELP_NAMES = {"help_option_names": ["-h", "--help"]}
VERSION_PACKAGES = ("mlx", "mlx-lm")


class Commands(TyperGroup):
    """Group that lists commands by name and imports only the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name else listed, rest


class Command(TyperCommand):
    """Command that answers an unknown option with similar ones, or with the option that lists all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = [flag for each in self.get_params(ctx) for flag in (*each.opts, *each.secondary_opts)]
        own = args[: args.index("--")] if "--" in args else args
        given = (word.partition("=")[0] for word in own if word.startswith("--"))
        unknown = next((flag for flag in given if flag not in known), None)
        if unknown is not None:
            alike = get_close_matches(unknown, known, n=3, cutoff=0.75)
            every = "--help-all" if "--help-all" in known else "--help"
            hint = f"Did you mean {' or '.join(alike)}?" if alike else f"See: {ctx.command_path} {every}"
            ctx.fail(f"There is no option {unknown}. {hint}")
        return super().parse_args(ctx, args)


def load_command(name: str) -> Any:
    """Import the module of a command and return the command."""
    if name == "version":
        return _single_command(name, version)
    module = importlib.import_module(f"kvstrata.cli.{name}")
    group = getattr(module, "app", None)
    return _single_command(name, getattr(module, name)) if group is None else get_command(group)


def _single_command(name: str, function: Callable[..., Any]) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name=name, cls=Command, context_settings=HELP_NAMES)(function)
    return get_command(alone)


def version(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout and nothing else.")] = False,
) -> None:
    """Show the versions of kvstrata, MLX, mlx-lm and Python, and MLX's back-end."""
    from kvstrata import __version__
    from kvstrata.platform.device import mlx_backend

    facts = {
        "kvstrata": __version__,
        **{name: _installed(name) for name in VERSION_PACKAGES},
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


app = typer.Typer(
    name="kvstrata",
    cls=Commands,
    help="A local LLM server on MLX whose KV cache is managed memory.",
    epilog="Start with: kvstrata serve    then, in another terminal: kvstrata chat",
    no_args_is_help=True,
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


def started_as() -> str:
    """Return the command that started this process, for messages that users copy into a shell.

    It is `kvstrata` where the shell finds this installation under that name, else the path to its script.
    """
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{_shell_path(Path(sys.executable))} -m kvstrata"
    if script.name != "kvstrata" or not script.is_file():
        return "kvstrata"
    on_path = shutil.which("kvstrata")
    if on_path is not None and Path(on_path).samefile(script):
        return "kvstrata"
    return _shell_path(script)


def _shell_path(path: Path) -> str:
    """Return a path for a shell, relative where it is below the working folder."""
    path = path.absolute()
    below = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(below))


def main() -> None:
    """Run the command line. Errors of kvstrata are printed as one message with exit code 1; wrong usage exits with
    2."""
    try:
        app(prog_name="kvstrata")  # also for python -m kvstrata: shell completion depends on it
    except KvstrataError as error:
        # A message may quote a server or a file.
        print(f"kvstrata: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)
    except ImportError:
        from kvstrata.platform.device import missing_backend

        if (advice := missing_backend()) is None:
            raise
        print(f"kvstrata: {advice}", file=sys.stderr)
        sys.exit(1)
