"""`kvstrata service print`: a unit of systemd or launchd that keeps a server running. Prints, and changes nothing.

Knows both formats and a server's needs: time to finish its replies, and open files.
"""

from __future__ import annotations

import math
import os
import plistlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvstrata.config import Settings

OPEN_FILES = 65536
RESTART_S = 5
MIN_FLUSH_S = 30.0  # as in server/options.py, which imports MLX
STOP_SPARE_S = 15  # on top of the time for replies and the disk cache
LABEL = "local.kvstrata"
# Variables that locate models and settings: a service starts without the user's shell.
VARIABLES = ("KVSTRATA_HOME", "KVSTRATA_CONFIG", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
NEXT = {
    "systemd": (
        "Next: save this as ~/.config/systemd/user/kvstrata.service, then\n"
        "  systemctl --user daemon-reload && systemctl --user enable --now kvstrata\n"
        "To run it while you are logged out: loginctl enable-linger. Its log: journalctl --user -u kvstrata"
    ),
    "launchd": (
        f"Next: save this as ~/Library/LaunchAgents/{LABEL}.plist, then\n"
        f"  launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/{LABEL}.plist\n"
        "Its log: ~/Library/Logs/kvstrata.log"
    ),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


class Manager(StrEnum):
    systemd = "systemd"
    launchd = "launchd"


@dataclass(frozen=True)
class Unit:
    command: tuple[str, ...]
    folder: Path  # base of relative paths in the flags
    environment: dict[str, str]
    stop_s: int  # time allowed for stopping


@app.callback()
def _root() -> None:
    """Print a unit of systemd or launchd that keeps a server running."""


@app.command(name="print", context_settings={"help_option_names": ["-h", "--help"]})
def print_unit(
    manager: Annotated[Manager, typer.Argument(help="Service manager of this machine.")],
    flags: Annotated[
        list[str] | None, typer.Argument(help="Model and flags of kvstrata serve, after --.", metavar="[-- FLAGS]")
    ] = None,
) -> None:
    """Print a unit with the chosen flags, as in: kvstrata service print systemd -- --port 9000 --disk-cache-dir ~/kv

    The next steps are printed on stderr.
    """
    unit = make_unit(flags or [])
    typer.echo(systemd(unit) if manager is Manager.systemd else launchd(unit), nl=False)
    typer.echo(NEXT[manager.value], err=True)
    if any(word.split("=")[0] in ("--api-key", "--admin-key") for word in unit.command):
        typer.echo("A key stands in the unit, for all to read. Better: --api-key-file, --admin-key-file", err=True)


def make_unit(flags: Sequence[str]) -> Unit:
    """Return the unit for these flags. Raises what `kvstrata serve` would raise for them."""
    settings = _settings(flags)
    flush_s = max(settings.drain_timeout_s, MIN_FLUSH_S)
    environment = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    stop_s = math.ceil(settings.drain_timeout_s + flush_s) + STOP_SPARE_S
    return Unit((*_program(), "serve", *flags), Path.cwd(), environment, stop_s)


def _settings(flags: Sequence[str]) -> Settings:
    from kvstrata.cli import load_command
    from kvstrata.config import load

    context = load_command("serve").make_context("kvstrata serve", list(flags))
    given = {name: value for name, value in context.params.items() if name in _given(context)}
    return load(given.pop("config", None), given)


def _given(context: typer.Context) -> set[str]:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _program() -> tuple[str, ...]:
    script = Path(sys.prefix, "bin", "kvstrata")
    return (str(script),) if script.is_file() else (sys.executable, "-m", "kvstrata")


def systemd(unit: Unit) -> str:
    pairs = (f"{name}={value}" for name, value in unit.environment.items())
    environment = "".join(f"Environment={_quoted(pair)}\n" for pair in pairs)
    # A dollar sign begins a variable in command lines only.
    command = " ".join(_quoted(word).replace("$", "$$") for word in unit.command)
    return f"""\
[Unit]
Description=kvstrata, a local LLM server
After=network.target

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={_escaped(str(unit.folder))}
{environment}Restart=on-failure
RestartSec={RESTART_S}
TimeoutStopSec={unit.stop_s}
LimitNOFILE={OPEN_FILES}
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def _escaped(text: str) -> str:
    """Escape %, which begins a specifier in systemd units."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    is_plain = escaped and not set(escaped) & set(" \t'\"\\;#")
    return escaped if is_plain else f'"{escaped}"'


def launchd(unit: Unit) -> str:
    log = str(Path.home() / "Library" / "Logs" / "kvstrata.log")
    facts = {
        "Label": LABEL,
        "ProgramArguments": list(unit.command),
        "WorkingDirectory": str(unit.folder),
        "EnvironmentVariables": unit.environment,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": unit.stop_s,
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "ProcessType": "Interactive",  # launchd throttles other types in favour of foreground apps
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps({name: value for name, value in facts.items() if value != {}}, sort_keys=False).decode()
