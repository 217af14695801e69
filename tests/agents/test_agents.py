"""Real agents against a real server whose model is forced to make one call: slow, and only those that are installed.

`make agents` installs them, and `pytest -m slow tests/agents` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.agents import clients
from tests.agents.clients import Agent, Ended, Where, run
from tests.agents.errand import CHECK, COMMAND, CONTENT, FILE, LAST, TASK, edits, errand
from tests.agents.forced import CONTEXT_TOKENS, NAME, Forced, serving

pytestmark = pytest.mark.slow

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BASH = {"command": COMMAND}
DESCRIBED = {**BASH, "description": "Run the errand"}


@dataclass(frozen=True)
class Case:
    agent: Agent
    wire: str
    tool: str  # the agent's own that runs a command
    arguments: dict[str, Any]


CASES = {
    "pi-chat": Case(clients.pi("openai-completions"), CHAT, "bash", BASH),
    "pi-messages": Case(clients.pi("anthropic-messages"), MESSAGES, "bash", BASH),
    "pi-responses": Case(clients.pi("openai-responses"), RESPONSES, "bash", BASH),
    "opencode": Case(clients.opencode, CHAT, "bash", DESCRIBED),
    "claude": Case(clients.claude, MESSAGES, "Bash", DESCRIBED),
    "codex": Case(clients.codex, RESPONSES, "exec_command", {"cmd": COMMAND}),
}


def send(forced: Forced, agent: Agent, folder: Path, *more: str) -> Ended:
    start = agent(Where(forced.served.url, NAME, CONTEXT_TOKENS))
    if not (clients.COMMANDS / start.command).exists():
        pytest.skip(f"{start.command} is not installed: make agents")
    return run(replace(start, arguments=[*more, *start.arguments]), TASK, folder)


def assert_done(ended: Ended, folder: Path) -> None:
    made = folder / "work" / FILE
    assert made.exists(), ended.all
    assert made.read_text() == CONTENT, ended.all
    assert LAST in ended.out, ended.all
    assert ended.code == 0, ended.all


@pytest.mark.parametrize("name", CASES)
def test_an_agent_runs_an_errand(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with serving(errand(case.tool, case.arguments)) as forced:
        ended = send(forced, case.agent, tmp_path)
    assert_done(ended, tmp_path)
    assert_prefix_stays(forced, case.tool)


def test_aider_edits_and_mends(tmp_path: Path) -> None:
    with serving(edits) as forced:
        ended = send(forced, clients.aider, tmp_path, "--auto-test", "--test-cmd", CHECK)
    assert_done(ended, tmp_path)
    assert len(forced.said) == 2, ended.all


def assert_prefix_stays(forced: Forced, tool: str) -> None:
    """The prompt with the result begins with the whole prompt before it, so that nothing of it is computed again."""
    first, second = (said.ids for said in forced.said if tool in said.prompt.tool_names)
    assert second[: len(first)] == first
