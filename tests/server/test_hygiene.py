"""What keeps prompts the same from turn to turn: nonces go, system messages stay where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.server.chat.prompt import stabilize
from tests.agents.forced import Forced, Prompt, serving

BILL = "x-anthropic-billing-header: cc_version=2.1.325.bb6; cch={}"
USER: Any = {"role": "user", "content": "Hello."}


def system(content: Any) -> Any:
    return {"role": "system", "content": content}


def test_the_line_for_the_bill_goes_wherever_it_stands() -> None:
    """It differs from turn to turn, in front of everything else."""
    bills = [BILL.format(turn) for turn in range(2)]
    plain = [system("You are an agent."), USER]
    for bill in bills:
        assert stabilize([system(f"{bill}\nYou are an agent."), USER])[0] == plain
        assert stabilize([system(bill), USER])[0] == [USER]
        parts = [{"type": "text", "text": bill}, {"type": "text", "text": "You are an agent."}]
        assert stabilize([system(parts), USER])[0] == [system(parts[1:]), USER]
    assert stabilize([system(bills[0]), system("S"), USER])[1] == {"nonce": 1}
    asked = [system(f"{bills[0]}\nYou are an agent."), {"role": "user", "content": bills[0]}]
    assert stabilize(asked)[0][1] == asked[1]  # what a user says is the user's


MESSAGES = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content},
              st.sampled_from(["system", "user", "assistant"]), st.text(max_size=20)),
    max_size=6,
)  # fmt: skip


@given(MESSAGES)
def test_what_has_no_nonce_is_left_as_it_is(messages: list[Any]) -> None:
    stable, used = stabilize(messages)
    assert stable == messages
    assert "nonce" not in used


@pytest.fixture(scope="module")
def forced() -> Iterator[Forced]:
    with serving(lambda _prompt: "Yes.") as one:
        yield one


def shown(forced: Forced, messages: list[Any]) -> tuple[Prompt, str]:
    answer = forced.served.ask("/v1/chat/completions", messages=messages, max_tokens=4)
    answer.raise_for_status()
    return forced.said[-1].prompt, answer.headers["x-kvstrata-miss"]


def billed(turn: int) -> Any:
    return [{"type": "text", "text": BILL.format(turn)}, {"type": "text", "text": "You are an agent. " * 9}]


def test_a_bill_costs_claude_code_nothing(forced: Forced) -> None:
    with anthropic.Anthropic(base_url=forced.served.url, api_key="none", max_retries=0) as client:
        answers = [
            client.messages.with_raw_response.create(
                model="claude-x", max_tokens=4, system=billed(turn), messages=[USER]
            )
            for turn in range(2)
        ]
    assert all("hygiene=nonce" in answer.headers["x-kvstrata-miss"] for answer in answers)
    assert answers[1].parse().usage.input_tokens == 1  # all but the last token was found
    with forced.served.http() as http:
        assert 'kvstrata_prompt_hygiene_total{rule="nonce"} 2.0' in http.get("/metrics").text


def test_a_note_of_the_system_stays_where_it_is(forced: Forced) -> None:
    chat = [system("S"), USER, {"role": "assistant", "content": "Yes."}, system("<total_tokens>9</total_tokens>"), USER]
    prompt, miss = shown(forced, chat)
    assert [turn.role for turn in prompt.turns] == ["system", "user", "assistant", "system", "user"]
    assert "hygiene=system_in_place" in miss
    told = forced.served.ask("/cache/explain", messages=chat).json()
    assert told["hygiene"] == {"system_in_place": 1}


def test_no_stable_prompts_turns_rules_off() -> None:
    with serving(lambda _prompt: "Yes.", stable_prompts=False) as forced:
        prompt, miss = shown(forced, [system(f"{BILL.format(1)}\nS"), USER, system("N"), USER])
        assert BILL.format(1) in prompt.turns[0].text
        assert "hygiene" not in miss
