"""How much of what agents send again is cached, turn by turn: slow, as test_agents.py.

With exact replay and hygiene, and without. `pytest -m slow -s tests/agents/test_cached.py` prints the table of
docs/agents.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.agents import clients
from tests.agents.clients import Agent, Ended, Start, Where, run, talk
from tests.agents.errand import CHECK, LAST, TASK, Think, thinks_not
from tests.agents.forced import CONTEXT_TOKENS, NAME, Form, forced_model, serving
from tests.agents.long_errand import (
    AGAIN,
    AGAIN_LAST,
    OTHER,
    OTHER_LAST,
    Arguments,
    Turn,
    conversation,
    long_edits,
    long_errand,
    thinks_long,
    turns_of,
)
from tests.text.chat_templates import QWEN3

pytestmark = pytest.mark.slow

FORM = Form(QWEN3)
MIN_RATE = 0.95
# A long prompt has that rate whatever becomes of a reply. A token may be lost where two texts meet.
MAX_AGAIN = 4
NUM_COLUMNS = 6
OFF: dict[str, Any] = {"stable_prompts": False}


@dataclass(frozen=True)
class Case:
    """`again`: how it is started for the second message of the same session."""

    agent: Agent
    again: Callable[[Start], Start]
    tool: str  # the agent's own that runs a command
    arguments: Arguments


def command(text: str) -> dict[str, Any]:
    return {"command": text}


def described(text: str) -> dict[str, Any]:
    return {"command": text, "description": "Run the errand"}


def keeping(start: Start) -> Start:
    return replace(start, arguments=[each for each in start.arguments if each != "--no-session"])


def pi(api: str) -> Case:
    def again(start: Start) -> Start:
        return replace(start, arguments=["--continue", *start.arguments])

    return Case(lambda where: keeping(clients.pi(api)(where)), again, "bash", command)


def with_more(*more: str) -> Callable[[Start], Start]:
    return lambda start: replace(start, arguments=[*start.arguments, *more])


CASES = {
    "pi, chat": pi("openai-completions"),
    "pi, Messages": pi("anthropic-messages"),
    "pi, Responses": pi("openai-responses"),
    "opencode": Case(clients.opencode, with_more("--continue"), "bash", described),
    "Claude Code": Case(clients.claude, with_more("--continue"), "Bash", described),
    "Codex": Case(clients.codex, with_more("resume", "--last"), "exec_command", lambda text: {"cmd": text}),
}

thinking_or_not = pytest.mark.parametrize("think", [thinks_not, thinks_long], ids=["plain", "thinking"])


def started(agent: Agent, url: str) -> Start:
    start = agent(Where(url, NAME, CONTEXT_TOKENS))
    if not (clients.COMMANDS / start.command).exists():
        pytest.skip(f"{start.command} is not installed: make agents")
    return start


def errand_turns(case: Case, think: Think, folder: Path, **flags: Any) -> list[Turn]:
    with serving(long_errand(case.tool, case.arguments, think), FORM, **flags) as forced:
        start = started(case.agent, forced.served.url)
        ends = [run(start, TASK, folder), run(case.again(start), AGAIN, folder), run(start, OTHER, folder)]
    assert_done(ends)
    main = conversation(forced.said, case.tool)
    assert len(main) == 7, ends[-1].all
    return turns_of(forced_model(FORM).tokenizer, main)


def edit_turns(think: Think, folder: Path, **flags: Any) -> list[Turn]:
    with serving(long_edits(think), FORM, **flags) as forced:
        start = started(clients.aider, forced.served.url)
        # Without --message it reads what to do line by line.
        start = replace(start, arguments=["--auto-test", "--test-cmd", CHECK, *start.arguments[:-1]])
        ended = talk(start, [TASK, AGAIN], folder)
    assert_done([ended, ended])  # both last words
    main = conversation(forced.said, "")
    assert len(main) == 4, ended.all
    return turns_of(forced_model(FORM).tokenizer, main)


def assert_done(ends: list[Ended]) -> None:
    for ended, last in zip(ends, (LAST, AGAIN_LAST, OTHER_LAST), strict=False):
        assert last in ended.out, ended.all
        assert ended.code == 0, ended.all


def compare(name: str, think: Think, off: list[Turn], on: list[Turn]) -> None:
    kind = "plain" if think is thinks_not else "thinking"
    # How many shared tokens were computed again, without and with; then the least rates.
    cells = [f"{before.again}, {after.again} of {after.shared:,}" for before, after in zip(off, on, strict=True)]
    cells += [""] * (NUM_COLUMNS - len(cells))
    least = [f"{100 * min(turn.rate for turn in turns):.1f} %" for turns in (off, on)]
    print(f"| {' | '.join([name, kind, *cells, ', '.join(least)])} |")
    for turn in on:
        assert turn.rate >= MIN_RATE
        assert turn.again <= MAX_AGAIN
    assert sum(turn.again for turn in on) <= sum(turn.again for turn in off)


@thinking_or_not
@pytest.mark.parametrize("name", CASES)
def test_what_an_agent_sends_again_is_cached(name: str, think: Think, tmp_path: Path) -> None:
    off = errand_turns(CASES[name], think, tmp_path / "off", **OFF)
    on = errand_turns(CASES[name], think, tmp_path / "on")
    compare(name, think, off, on)


@thinking_or_not
def test_what_aider_sends_again_is_cached(think: Think, tmp_path: Path) -> None:
    compare("aider", think, edit_turns(think, tmp_path / "off", **OFF), edit_turns(think, tmp_path / "on"))
