"""What goes over the wire of the Messages API, byte by byte, and what Claude Code sends."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.agents.forced import Forced, serving
from tests.server.anthropic.conftest import LONG, script

USER = {"role": "user", "content": "hello"}


def events(forced: Forced, **fields: Any) -> list[tuple[str, Any]]:
    """Names and data, in order. Fails where an event is more than these two lines."""
    body = {"model": "claude-x", "max_tokens": 100, "messages": [USER], "stream": True, **fields}
    with forced.served.http() as http:
        answer = http.post("/v1/messages?beta=true", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    pairs = [event.split("\n") for event in answer.text[:-2].split("\n\n")]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in pairs)
    return [(name[7:], json.loads(data[6:])) for name, data in pairs]


def test_names_and_order_of_events(forced: Forced) -> None:
    told = events(forced, messages=[{"role": "user", "content": "think"}])
    assert all(name == data["type"] for name, data in told)
    names = [name for name, _ in told if name not in ("ping", "content_block_delta")]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert [name for name, _ in told][:2] == ["message_start", "ping"]
    assert [data["index"] for name, data in told if name == "content_block_start"] == [0, 1]
    usage = told[-2][1]["usage"]
    assert sum(count for name, count in usage.items() if name != "output_tokens") == len(forced.said[-1].ids)


def test_a_long_prompt_is_waited_for_with_pings() -> None:
    with serving(script, keep_alive_s=0.001) as impatient:
        told = events(impatient, messages=[{"role": "user", "content": LONG}])
    before = [name for name, _ in told][: [name for name, _ in told].index("content_block_start")]
    assert before[0] == "message_start"
    assert before[1:] == ["ping"] * (len(before) - 1)
    assert len(before) > 3


CLAUDE_CODE = {
    "model": "claude-opus-5-5",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>"},
                {"type": "text", "text": "make the file"},
            ],
        },
        {
            "role": "system",
            "content": [{"type": "text", "text": "# Environment", "cache_control": {"type": "ephemeral"}}],
            "output_config": {"effort": "medium"},
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "abc"},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "echo hi"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": "(no output)",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                }
            ],
        },
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.325.bb6; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command",
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"},
            "eager_input_streaming": True,
        },
        {"name": "Later", "defer_loading": True, "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"session_id":"x"}'},
    "max_tokens": 128_000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
HEADERS = {
    "Authorization": "Bearer x",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27",
    "anthropic-version": "2023-06-01",
    "x-app": "cli",
    "X-Claude-Code-Session-Id": "f844014c",
}


def test_what_claude_code_sends_is_served(forced: Forced, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvstrata.server"), forced.served.http() as http:
        answers = [http.post("/v1/messages?beta=true", json=CLAUDE_CODE, headers=HEADERS) for _ in range(2)]
    assert "It says: (no output)" in "".join(
        json.loads(line[6:])["delta"]["text"]
        for line in answers[0].text.splitlines()
        if line.startswith("data: ") and '"text_delta"' in line
    )
    assert answers[1].headers["x-kvstrata-miss"] is not None
    prompt = forced.said[-1].prompt
    assert prompt.tool_names == ("Bash", "Later")
    assert [turn.role for turn in prompt.turns] == ["system", "user", "system", "assistant", "tool"]
    assert prompt.turns[0].text == "You are an agent."
    # Of tools that are left out one line tells, however often they are sent.
    assert sum("web_search" in record.getMessage() for record in caplog.records) == 1
