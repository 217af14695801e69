"""Real agents against a real server whose model is forced to make one call: slow, and only those that are installed.

`make agents` installs them, and `pytest -m slow tests/agents` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvstrata.text.tokenizer import encode_rendered
from tests.agents import clients
from tests.agents.clients import Agent, Ended, Where, run
from tests.agents.errand import (
    CHECK,
    COMMAND,
    CONTENT,
    FILE,
    LAST,
    SECRET,
    TASK,
    Think,
    edits,
    errand,
    thinks,
    thinks_not,
)
from tests.agents.forced import CONTEXT_TOKENS, END, NAME, Forced, forced_model, serving

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


thinking_or_not = pytest.mark.parametrize("think", [thinks_not, thinks], ids=["plain", "thinking"])


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


@thinking_or_not
@pytest.mark.parametrize("name", CASES)
def test_an_agent_runs_an_errand(name: str, think: Think, tmp_path: Path) -> None:
    case = CASES[name]
    with serving(errand(case.tool, case.arguments, think)) as forced:
        ended = send(forced, case.agent, tmp_path)
    assert_done(ended, tmp_path)
    assert SECRET not in ended.out, ended.all
    assert_history_stays(forced, case.tool)


@thinking_or_not
def test_aider_edits_and_mends(think: Think, tmp_path: Path) -> None:
    with serving(edits(think)) as forced:
        ended = send(forced, clients.aider, tmp_path, "--auto-test", "--test-cmd", CHECK)
    assert_done(ended, tmp_path)
    assert len(forced.said) == 2, ended.all
    # aider shows people the thinking, under a heading of its own, and keeps it out of the history.
    assert SECRET not in ended.out.rpartition("ANSWER")[2], ended.all
    assert not any(SECRET in turn.text for said in forced.said for turn in said.prompt.turns)


def assert_history_stays(forced: Forced, tool: str) -> None:
    """The prompt with the result begins with the prompt before it and the whole reply, thinking included.

    So an agent's next turn computes nothing again.
    """
    first, second = (said for said in forced.said if tool in said.prompt.tool_names)
    before = (*first.ids, *encode_rendered(forced_model().tokenizer, first.reply + END))
    assert second.ids[: len(before)] == before
