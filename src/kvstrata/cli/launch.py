"""`kvstrata launch`: starts a coding agent with settings, visible only to it, that point it at a running server.

This module asks the server for its model and runs the process; `agents.py` has the settings of each agent. Files go to
a temporary folder that is deleted when the agent ends. The key is passed in a variable: other users of the machine may
read arguments, and the folder may outlive this process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvstrata.cli.agents import AGENTS, Agent, AgentServer, AgentStart
from kvstrata.cli.http_client import DEFAULT_URL, Key, Url, connect
from kvstrata.errors import KvstrataError

NO_KEY = "none"  # a server without keys accepts any; agents require one
SHOWN_FOLDER = Path("TEMPORARY")
SHOWN_KEY = "<hidden>"


def launch(
    agent: Annotated[
        Literal["claude", "codex", "opencode", "pi", "aider"],
        typer.Argument(metavar="agent", help="claude, codex, opencode, pi or aider. It must be installed."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGUMENTS", help="Arguments for the agent, passed on unchanged.", show_default=False
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Show the variables, files and command that would be used; start nothing.")
    ] = False,
) -> None:
    """Start a coding agent that uses a running server (kvstrata serve, in another terminal).

    The agent gets the address, model and context for this start only; its own settings stay unchanged.

    For example: kvstrata launch claude    or: kvstrata launch codex -- exec "Say hello"
    """
    chosen = AGENTS[agent]
    server = ask_server(url, api_key)
    added = arguments or []
    if print_only:
        start = chosen.start(server, SHOWN_FOLDER)
        typer.echo(shown(start, [chosen.command, *start.arguments, *added]))
        return
    program = find_program(chosen)
    with laid_out(chosen, server) as start:
        variables = environment(start, os.environ, api_key)
        code = run([program, *start.arguments, *added], variables)
    raise typer.Exit(code)


def ask_server(url: str, api_key: str | None) -> AgentServer:
    with connect(url, api_key) as remote:
        models = remote.ask("GET", "/v1/models")
        props = remote.ask("GET", "/props")
    try:
        name, of_model = models["data"][0]["id"], props["model"]
        server = AgentServer(
            url.rstrip("/"), _usable(name), int(of_model["context_tokens"]), bool(of_model["thinking"])
        )
    except (LookupError, TypeError, ValueError):
        raise KvstrataError(f"{url} answers, but not like this version of kvstrata. Check --url.") from None
    return server


def _usable(name: str) -> str:
    """Refuse a model name that variables and arguments cannot hold."""
    if not name or "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise KvstrataError("No agent can be given this model's name. Serve it with another: --served-model-name NAME")
    return name


def find_program(agent: Agent) -> str:
    found = shutil.which(agent.command)
    if found is None:
        raise KvstrataError(f"{agent.title} is not installed: there is no '{agent.command}'. Try: {agent.install}")
    return found


@contextmanager
def laid_out(agent: Agent, server: AgentServer) -> Iterator[AgentStart]:
    """Write an agent's files to a temporary folder and yield its start parameters."""
    with tempfile.TemporaryDirectory(prefix="kvstrata-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        start = agent.start(server, folder)
        for file, text in start.files.items():
            (folder / file).write_text(text, encoding="utf-8")
        yield start


def environment(start: AgentStart, own: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    kept = {name: value for name, value in own.items() if name not in start.unset}
    return {**kept, **start.variables, start.key_variable: api_key or NO_KEY}


def run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command, passing on signals, and return its exit code as a shell reports it."""
    children: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _frame: Any) -> None:
        # The terminal sends Ctrl-C to both processes; the agent decides what it does.
        if children and number != signal.SIGINT:
            children[0].send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        children.append(subprocess.Popen(command, env=variables))
        code = children[0].wait()
    except OSError as error:
        raise KvstrataError(f"{command[0]} does not start: {error.strerror}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def shown(start: AgentStart, command: Sequence[str]) -> str:
    """Return the start as shell commands, with the key hidden."""
    lines = [f"unset {name}" for name in start.unset]
    lines += [f"export {name}={shell_word(value)}" for name, value in start.variables.items()]
    lines.append(f"export {start.key_variable}={SHOWN_KEY}")
    for name, text in start.files.items():
        lines += ["", f"# {SHOWN_FOLDER / name}", text.rstrip("\n")]
    return "\n".join([*lines, "", " ".join(map(shell_word, command))])


def shell_word(text: str) -> str:
    """Quote a word for a shell, on one line and with control characters escaped."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_shell_character, text)) + "'"


def _shell_character(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
