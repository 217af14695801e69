"""Chats of real clients: whatever API they speak, they are recognised and told where their prompts part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.agents.forced import Forced, Prompt, serving
from tests.server.anthropic.conftest import client_of
from tests.server.test_cache import get, post, settle
from tests.support.servers import Served

MISS = "x-kvstrata-miss"
ORCHARD = "You know all about orchards. Apples, pears and quinces grow there. "
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def script(prompt: Prompt) -> str:
    return f"You said: {prompt.turns[-1].text}"


@pytest.fixture(scope="module")
def forced() -> Iterator[Forced]:
    with serving(script) as one:
        yield one


@pytest.fixture
def clean(forced: Forced) -> Served:
    """No session of an earlier test is remembered by its tokens."""
    post(forced.served, "/cache/clear", tier="all")
    return forced.served


def talk(
    client: openai.OpenAI, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any
) -> tuple[str, str]:
    """The reply, and what the server says of the miss."""
    raw = client.chat.completions.with_raw_response.create(
        model="forced", messages=messages, extra_headers=headers or {}, **fields
    )
    return raw.parse().choices[0].message.content or "", raw.headers[MISS]


def turns(system: str, *said: str) -> list[Any]:
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": system},
        *({"role": roles[place % 2], "content": text} for place, text in enumerate(said)),
    ]


def session(served: Served, id: str) -> dict[str, Any]:
    return get(served, f"/cache/sessions/{id}")


def test_a_chat_with_a_prompt_cache_key(clean: Served) -> None:
    with clean.openai() as client:
        reply, _ = talk(client, turns(ORCHARD, "What grows there?"), prompt_cache_key="orchard-1")
        _, miss = talk(client, turns(ORCHARD, "What grows there?", reply, "And else?"), prompt_cache_key="orchard-1")
    assert "at=" not in miss
    settle(clean)
    found = session(clean, "orchard-1")
    assert (found["id"], found["recognised_by"], found["requests"]) == ("orchard-1", "prompt_cache_key", 2)
    assert found["hit_rate"] == found["cached_tokens"] / found["prompt_tokens"] > 0.3
    hot = found["held"]["hot"]
    assert found["tokens"] - 1 <= hot <= found["tokens"]  # a step may have begun before the end was read
    assert found["precision"] == {"k": {"raw": hot}, "v": {"raw": hot}}
    assert found["divergence"] is None
    assert found["created"] < found["last_use"]
    assert get(clean, "/cache/sessions")["sessions"][0] == found


def test_a_changed_system_text_is_told_in_the_header_and_explained(clean: Served) -> None:
    """No name at all: the first message and the tools make it the same session."""
    with clean.openai() as client:
        reply, first = talk(client, turns(ORCHARD + "It is 12:31 now.", "Which is the sourest?"), tools=[TOOL])
        assert "at=" not in first
        again = turns(ORCHARD + "It is 12:59 now.", "Which is the sourest?", reply, "Why?")
        said = post(clean, "/cache/explain", messages=again, tools=[TOOL])
        assert said["session"]["recognised_by"] == "first message"
        parted = said["session"]["divergence"]
        assert parted["where"] == "prompt"
        assert parted["before"].endswith(":")
        assert parted["was"].startswith("31 now.")
        assert parted["now"].startswith("59 now.")
        _, miss = talk(client, again, tools=[TOOL])
    assert miss.startswith(f'diverged; at={parted["at"]}; was="31 now.')
    assert 'now="59 now.' in miss
    [found] = [s for s in get(clean, "/cache/sessions")["sessions"] if s["id"] == said["session"]["id"]]
    assert found["requests"] == 2  # to explain is no visit
    assert found["divergence"] == {**parted, "request": 2}


def test_a_reply_that_comes_back_otherwise_is_told_with_another_word(clean: Served) -> None:
    with clean.openai() as client:
        reply, _ = talk(client, turns(ORCHARD, "Say it again."), prompt_cache_key="cut")
        _, miss = talk(client, turns(ORCHARD, "Say it again.", reply[:8], "Well?"), prompt_cache_key="cut")
    assert "reply_at=" in miss
    assert "; at=" not in miss
    assert session(clean, "cut")["divergence"]["where"] == "reply"


def test_a_stream_is_learnt_and_told_too(clean: Served) -> None:
    with clean.openai() as client:
        for clock in ("12:31", "12:32"):
            messages = turns(f"{ORCHARD}It is {clock} now.", "What ripens?")
            raw = client.chat.completions.with_raw_response.create(
                model="forced", messages=messages, stream=True, prompt_cache_key="streamed"
            )
            miss = raw.headers[MISS]
            list(raw.parse())
    assert 'was="31 now.' in miss or 'was="1 now.' in miss
    assert session(clean, "streamed")["requests"] == 2


def test_claude_code_names_its_sessions_in_headers(clean: Served) -> None:
    headers = {"x-claude-code-session-id": "5f1c-77"}
    with client_of(clean) as claude:
        for agent in ("", "a9"):
            named = {**headers, **({"x-claude-code-agent-id": agent} if agent else {})}
            message = [{"role": "user", "content": "Hello"}]
            claude.messages.create(model="claude-x", max_tokens=50, messages=message, extra_headers=named)  # pyright: ignore[reportArgumentType]
    assert session(clean, "5f1c-77")["recognised_by"] == "x-claude-code-session-id"
    assert session(clean, "5f1c-77:a9")["requests"] == 1


def test_responses_and_our_own_header(clean: Served) -> None:
    with clean.openai() as client:
        client.responses.create(model="forced", input="Hello", prompt_cache_key="codex-1")
        talk(client, turns("", "Hello"), {"x-kvstrata-session": "mine"}, prompt_cache_key="other")
    assert session(clean, "codex-1")["recognised_by"] == "prompt_cache_key"
    assert session(clean, "mine")["recognised_by"] == "x-kvstrata-session"
