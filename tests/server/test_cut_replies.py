"""Replies that end otherwise than their model would have it: by a stop string, by the server, or held to a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.engine.request import Finished, FinishReason, TextDelta, TokenUsage
from kvstrata.server.anthropic.response import MessagesWriter
from kvstrata.server.chat.assembler import ReplyAssembler
from kvstrata.server.chat.engine_client import RequestEvent
from kvstrata.server.chat.generation import Generation
from kvstrata.server.chat.writer import JsonEvent, ResponseWriter
from kvstrata.server.openai.endpoints import read_chat
from kvstrata.server.openai.response import ChatChoice, OpenAIWriter
from tests.agents import forced
from tests.agents.forced import TEMPLATE, call_text, forced_model, serving
from tests.server.played import SCOPE
from tests.support.servers import Served, running

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"enum": ["a"]}}, "required": ["x"]},
    },
}
USER = [{"role": "user", "content": "Add."}]
CALL = call_text("add", {"x": "one two"})


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    with serving(lambda _prompt: f"{CALL}\n{CALL}") as one:
        yield one.served


def chosen(served: Served, **asked: Any) -> dict[str, Any]:
    answer = served.ask("/v1/chat/completions", messages=USER, tools=[TOOL], **asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_call_that_a_stop_string_cuts_is_not_one_to_run(calling: Served) -> None:
    choice = chosen(calling, stop=["two"])
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": "one '


def test_a_stop_string_behind_a_call_leaves_it_whole(calling: Served) -> None:
    choice = chosen(calling, stop=["</tool_call>"])
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": "one two"}


def generation_of(served: Served, **asked: Any) -> Generation:
    body = json.dumps({"messages": USER, "tools": [TOOL], **asked}).encode()
    return read_chat(served.server.state, body, SCOPE)[1]


def tell(generation: Generation, writer: ResponseWriter, finished: Finished) -> list[JsonEvent]:
    """Of a reply that is CALL, and then this."""
    assembler = ReplyAssembler(generation, writer, finish_early=lambda _index: None)
    return [event for each in (TextDelta(CALL), finished) for event in assembler.feed(RequestEvent(0, each))]


@pytest.mark.parametrize(("reason", "stop"), [("length", ""), ("stop", "END")])
def test_what_follows_the_one_call_does_not_matter(calling: Served, reason: FinishReason, stop: str) -> None:
    wire = MessagesWriter("message", "model")
    tell(generation_of(calling, parallel_tool_calls=False), wire, Finished(reason, TokenUsage(), stop))
    whole = wire.whole(TokenUsage())
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)


def test_a_reply_that_the_server_cancels_has_no_end(calling: Served) -> None:
    """An error follows in its place: a client must not take the reply for a whole one."""
    wire = OpenAIWriter({}, [ChatChoice(0, calling.server.state.loaded.tokenizer)])
    sent = tell(generation_of(calling), wire, Finished("cancelled", TokenUsage()))
    assert sent
    assert all(event.data["choices"][0]["finish_reason"] is None for event in sent)


def test_a_form_leaves_no_room_for_thinking_that_no_token_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TEMPLATE.replace("think>", "reason>").replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<reason>\n{% endif %}"
    )
    monkeypatch.setattr(forced, "TEMPLATE", source)
    with running(forced_model.__wrapped__()) as served:
        wanted = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["abc"]}}}
        answer = served.ask("/v1/chat/completions", messages=USER, max_tokens=200, response_format=wanted)
        message = answer.json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ('"abc"', None)
        choice = chosen(served, max_tokens=400, tool_choice="required", parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["x"] == "a"
