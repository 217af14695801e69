"""Real agents through `kvstrata launch`, each with settings of its user that lead elsewhere: slow, as test_agents.py.

Ours have to win, and the user's have to be there afterwards, byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.agents import clients
from tests.agents.clients import NOWHERE, Start
from tests.agents.errand import CHECK, COMMAND, TASK, edits, errand, thinks
from tests.agents.forced import CONTEXT_TOKENS, serving
from tests.agents.test_agents import BASH, DESCRIBED, assert_done

pytestmark = pytest.mark.slow

KEY = "the-key-of-the-server"
THEIRS = "another-model"
# As people name models: what agents part names by is in it.
OURS = 'some-org/A model\'s "4B":high'
# Each as the agent's user could have it: another server, which does not answer, another model and another key.
CLAUDE = {"env": {"ANTHROPIC_BASE_URL": NOWHERE, "ANTHROPIC_AUTH_TOKEN": "theirs"}, "model": THEIRS}
OPENCODE = {
    "$schema": "https://opencode.ai/config.json",  # it writes this line itself where it is missing
    "model": f"elsewhere/{THEIRS}",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "elsewhere": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{NOWHERE}/v1", "apiKey": "theirs"},
            "models": {THEIRS: {}},
        }
    },
}
PI_MODEL = {"id": THEIRS, "contextWindow": 4096, "maxTokens": 128}
PI_MODELS = {
    "providers": {
        "elsewhere": {"baseUrl": NOWHERE, "api": "openai-completions", "apiKey": "theirs", "models": [PI_MODEL]}
    }
}
PI = {"defaultProvider": "elsewhere", "defaultModel": THEIRS}
CODEX = f"""
model = "{THEIRS}"
model_provider = "elsewhere"
model_context_window = 4096

[model_providers.elsewhere]
name = "elsewhere"
base_url = "{NOWHERE}/v1"
wire_api = "responses"
"""
AIDER = f"model: openai/{THEIRS}\nopenai-api-base: {NOWHERE}/v1\nopenai-api-key: theirs\nanalytics: false\n"


@dataclass(frozen=True)
class Case:
    start: Start
    tool: str = ""  # the agent's own that runs a command; none: it has no tools
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "claude": Case(
        Start(
            "claude",
            ["--allowedTools", "Bash", "-p"],
            {"CLAUDE_CODE_MAX_RETRIES": "0"},
            {".claude/settings.json": json.dumps(CLAUDE)},
        ),
        "Bash",
        DESCRIBED,
    ),
    "codex": Case(
        Start(
            "codex",
            ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
            files={".codex/config.toml": CODEX},
        ),
        "exec_command",
        {"cmd": COMMAND},
    ),
    "opencode": Case(
        Start(
            "opencode",
            ["run", "--auto"],
            {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
            {".config/opencode/opencode.json": json.dumps(OPENCODE)},
        ),
        "bash",
        DESCRIBED,
    ),
    "pi": Case(
        Start(
            "pi",
            ["--no-session", "-p"],
            {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            {".pi/agent/models.json": json.dumps(PI_MODELS), ".pi/agent/settings.json": json.dumps(PI)},
        ),
        "bash",
        BASH,
    ),
    "aider": Case(
        Start(
            "aider",
            [
                *("--edit-format", "whole", "--yes-always", "--no-git", "--no-pretty", "--no-fancy-input"),
                *("--no-check-update", "--no-show-release-notes", "--auto-test", "--test-cmd", CHECK, "--message"),
            ],
            files={".aider.conf.yml": AIDER},
        )
    ),
}


def require(name: str) -> None:
    if not (clients.COMMANDS / name).exists():
        pytest.skip(f"{name} is not installed: make agents")


@pytest.mark.parametrize("name", CASES)
def test_an_agent_runs_an_errand_for_our_server(name: str, tmp_path: Path) -> None:
    require(name)
    case = CASES[name]
    script = errand(case.tool, case.arguments, thinks) if case.tool else edits(thinks)
    start = replace(case.start, variables={**case.start.variables, "KVSTRATA_API_KEY": KEY})
    with serving(script, api_key=[KEY], served_model_name=OURS) as forced:
        ended = clients.launch(start, forced.served.url, TASK, tmp_path)
    assert_done(ended, tmp_path)
    assert len(forced.said) >= 2
    for file, text in start.files.items():
        assert (tmp_path / "home" / file).read_text() == text
    # What is temporary is in its home here.
    assert not list((tmp_path / "home").glob("kvstrata-*"))


def test_claude_code_knows_the_context(tmp_path: Path) -> None:
    """It tells what it believes in without asking the model."""
    require("claude")
    with serving(edits(thinks)) as forced:
        ended = clients.launch(Start("claude", ["-p"]), forced.served.url, "/context", tmp_path)
    assert f"/ {CONTEXT_TOKENS / 1000:.1f}k" in ended.out, ended.all
    assert not forced.said
