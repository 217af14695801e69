"""How each agent is started, without a person, against a server of ours: what docs/connect.md tells people to do, by
settings of its own or by `kvstrata launch`.

Knows the agents' settings. Does not know what they are asked. An agent gets a home and a folder of its own, no variable
of this process, and a proxy that nobody listens at for whatever is not on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kvstrata

COMMANDS = Path(__file__).parents[2] / ".agents" / "bin"
SOURCE = Path(kvstrata.__file__).parents[1]
LAUNCH = (sys.executable, "-c", "from kvstrata.cli import main; main()", "launch")
LIMIT_S = 240
NOWHERE = "http://127.0.0.1:9"  # the port that throws away what it gets: nobody listens there
_PROXIES = {name: NOWHERE for both in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (both, both.lower())}
_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    **_PROXIES,
}


@dataclass(frozen=True)
class Where:
    """What an agent has to know of the server."""

    url: str  # without /v1
    model: str
    context_tokens: int


@dataclass(frozen=True)
class Start:
    command: str  # in COMMANDS
    arguments: list[str]  # what to do comes after them
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # of its home


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return f"exit {self.code}\n--- out\n{self.out}\n--- err\n{self.err}"


Agent = Callable[[Where], Start]


def run(start: Start, task: str, folder: Path) -> Ended:
    """In `folder`/work, which is empty at first, with `folder`/home as its home."""
    return _run([str(COMMANDS / start.command), *start.arguments, task], start, folder)


def talk(start: Start, lines: Sequence[str], folder: Path) -> Ended:
    """The same, for one that is told what to do line by line."""
    return _run(
        [str(COMMANDS / start.command), *start.arguments], start, folder, "".join(f"{each}\n" for each in lines)
    )


def launch(start: Start, url: str, task: str, folder: Path) -> Ended:
    """The same by `kvstrata launch`. What `start` has is for its user, and knows nothing of the server."""
    command = [*LAUNCH, start.command, "--url", url, "--", *start.arguments, task]
    path = {"PATH": f"{COMMANDS}{os.pathsep}{_ENVIRONMENT['PATH']}", "PYTHONPATH": str(SOURCE)}
    return _run(command, replace(start, variables={**path, **start.variables}), folder)


def _run(command: list[str], start: Start, folder: Path, told: str = "") -> Ended:
    home, work = folder / "home", folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    for name, text in start.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    home.mkdir(exist_ok=True)
    hears: dict[str, Any] = {"input": told} if told else {"stdin": subprocess.DEVNULL}
    done = subprocess.run(
        command,
        cwd=work,
        env={**_ENVIRONMENT, "HOME": str(home), "TMPDIR": str(home), **start.variables},
        **hears,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def pi(api: str) -> Agent:
    """`api`: openai-completions, openai-responses or anthropic-messages."""

    def start(where: Where) -> Start:
        # Its Anthropic client adds /v1 itself.
        url = where.url if api == "anthropic-messages" else f"{where.url}/v1"
        model = {"id": where.model, "contextWindow": where.context_tokens, "maxTokens": 8192, "reasoning": True}
        provider = {"baseUrl": url, "api": api, "apiKey": "none", "models": [model]}
        return Start(
            "pi",
            ["--provider", "kvstrata", "--model", where.model, "--no-session", "-p"],
            {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            {".pi/agent/models.json": json.dumps({"providers": {"kvstrata": provider}})},
        )

    return start


def opencode(where: Where) -> Start:
    limits = {"context": where.context_tokens, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{where.url}/v1", "apiKey": "none"},
        "models": {where.model: {"limit": limits}},
    }
    config = {"provider": {"kvstrata": provider}, "autoupdate": False, "share": "disabled"}
    return Start(
        "opencode",
        ["run", "--auto", "--model", f"kvstrata/{where.model}"],
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        {".config/opencode/opencode.json": json.dumps(config)},
    )


def aider(where: Where) -> Start:
    # Without it aider asks for a list of models that is not on this machine, and knows no limit.
    limits = {"max_input_tokens": where.context_tokens, "litellm_provider": "openai", "mode": "chat"}
    return Start(
        "aider",
        [
            *("--model", f"openai/{where.model}", "--openai-api-base", f"{where.url}/v1", "--openai-api-key", "none"),
            *("--edit-format", "whole", "--yes-always", "--no-git", "--no-pretty", "--no-fancy-input"),
            *("--no-check-update", "--no-show-release-notes", "--analytics-disable"),
            "--message",
        ],
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {".aider.model.metadata.json": json.dumps({f"openai/{where.model}": limits})},
    )


def claude(where: Where) -> Start:
    return Start(
        "claude",
        ["--allowedTools", "Bash", "--model", where.model, "-p"],
        {
            "ANTHROPIC_BASE_URL": where.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(where.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def codex(where: Where) -> Start:
    config = f"""
        model = "{where.model}"
        model_provider = "kvstrata"
        model_context_window = {where.context_tokens}

        [analytics]
        enabled = false

        [model_providers.kvstrata]
        name = "kvstrata"
        base_url = "{where.url}/v1"
        wire_api = "responses"
    """
    return Start(
        "codex",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        files={".codex/config.toml": config},
    )
