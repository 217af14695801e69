"""The `anthropic` client against a real server: replies, streams, tools, thinking, counting."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ToolUseBlock

from tests.agents.forced import Forced
from tests.server.anthropic.conftest import LONG

LOOK: Any = {
    "name": "look",
    "description": "Looks at a thing",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "claude-x", "max_tokens": 200, "messages": [{"role": "user", "content": text}], **fields}


def streamed(claude: anthropic.Anthropic, **fields: Any) -> Message:
    with claude.messages.stream(**fields) as stream:
        return stream.get_final_message()


def whole(claude: anthropic.Anthropic, **fields: Any) -> Message:
    return claude.messages.create(**fields)


BOTH = pytest.mark.parametrize("get", [whole, streamed])


def input_tokens(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


@BOTH
def test_a_reply(claude: anthropic.Anthropic, forced: Forced, get: Any) -> None:
    message = get(claude, **asked("hello", system="Be kind."))
    assert re.fullmatch("msg_[0-9a-f]{24}", message.id)
    assert (message.type, message.role, message.model) == ("message", "assistant", "claude-x")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello there."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert input_tokens(message) == len(forced.said[-1].ids)
    assert message.usage.output_tokens > 2
    assert [turn.role for turn in forced.said[-1].prompt.turns] == ["system", "user"]


def test_a_stream_gives_the_text_piece_by_piece(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(**asked("hello")) as stream:
        pieces = list(stream.text_stream)
        assert "".join(pieces) == stream.get_final_text() == "Hello there."
    assert len(pieces) > 1


@BOTH
def test_what_was_cached_is_told(claude: anthropic.Anthropic, get: Any) -> None:
    words = asked("hello", system=f"{get.__name__}: {LONG[:500]}")
    first, second = get(claude, **words), get(claude, **words)
    assert first.usage.cache_read_input_tokens < second.usage.cache_read_input_tokens
    assert input_tokens(first) == input_tokens(second)


@BOTH
def test_a_tool_is_called_and_its_result_comes_in(claude: anthropic.Anthropic, forced: Forced, get: Any) -> None:
    words = asked("look", tools=[LOOK])
    called = get(claude, **words)
    text, call = called.content
    assert called.stop_reason == "tool_use"
    assert text.text.strip() == "I look."
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("look", {"at": "Größe", "deep": [1, {"a": None}]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a size"}]}
    history = [*words["messages"], called.to_param(), {"role": "user", "content": [result]}]
    told = get(claude, **{**words, "messages": history})
    assert told.content[0].text == "It says: a size"
    assert told.stop_reason == "end_turn"
    prompt = forced.said[-1].prompt
    assert prompt.tool_names == ("look",)
    assert [turn.role for turn in prompt.turns] == ["user", "assistant", "tool"]


@BOTH
def test_how_many_calls_there_are(claude: anthropic.Anthropic, get: Any) -> None:
    words = asked("look twice", tools=[LOOK])
    assert [block.input for block in get(claude, **words).content] == [{"at": "a"}, {"at": "b"}]
    one = get(claude, **words, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.input for block in one.content] == [{"at": "a"}]
    assert one.stop_reason == "tool_use"


def test_without_a_choice_of_tools_the_model_is_told_of_none(claude: anthropic.Anthropic, forced: Forced) -> None:
    claude.messages.create(**asked("hello", tools=[LOOK], tool_choice={"type": "none"}))
    assert forced.said[-1].prompt.tool_names == ()


@BOTH
def test_thoughts_have_a_block_of_their_own(claude: anthropic.Anthropic, forced: Forced, get: Any) -> None:
    words = asked("think", thinking={"type": "adaptive"})
    message = get(claude, **words)
    thought, text = message.content
    assert (thought.type, thought.thinking.strip()) == ("thinking", "Let me see.")
    assert thought.signature
    assert text.text.strip() == "Done."
    later = {"role": "user", "content": "hello"}
    get(claude, **{**words, "messages": [*words["messages"], message.to_param(), later]})
    assert "Let me see." in forced.said[-1].prompt.turns[1].text


@BOTH
def test_why_a_reply_stops(claude: anthropic.Anthropic, get: Any) -> None:
    short = get(claude, **{**asked("hello"), "max_tokens": 1})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)
    stopped = get(claude, **asked("hello", stop_sequences=["there"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "there")
    assert stopped.content[0].text == "Hello "


def test_max_tokens_is_only_a_bound(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.with_raw_response.create(**{**asked("hello"), "max_tokens": 10**9, "timeout": 60})
    assert int(answer.headers["x-kvstrata-max-tokens"]) < 10**9
    assert answer.parse().stop_reason == "end_turn"


@pytest.mark.parametrize("more", [{}, {"system": "Be kind."}, {"tools": [LOOK]}, {"thinking": {"type": "adaptive"}}])
def test_counting_gives_what_a_reply_counts(claude: anthropic.Anthropic, more: dict[str, Any]) -> None:
    words = asked("hello", **more)
    message = claude.messages.create(**words)
    del words["max_tokens"]
    assert claude.messages.count_tokens(**words).input_tokens == input_tokens(message)


def test_a_client_that_leaves_ends_its_reply(claude: anthropic.Anthropic, forced: Forced) -> None:
    before = generated(forced)
    with claude.messages.stream(**{**asked("go on"), "max_tokens": 100_000}) as stream:
        assert next(iter(stream.text_stream))
    forced.served.wait_idle()
    # The whole of it has a token for each word at least.
    assert 0 < generated(forced) - before < len(LONG.split())
    assert get_text(claude.messages.create(**asked("hello"))) == "Hello there."


def generated(forced: Forced) -> float:
    with forced.served.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("vllm:generation_tokens_total "))


def get_text(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def test_the_list_of_models_can_be_read(claude: anthropic.Anthropic, forced: Forced) -> None:
    (only,) = claude.models.list().data
    assert (only.id, only.type, only.display_name) == (forced.served.name, "model", forced.served.name)
    assert claude.models.retrieve(only.id).created_at == only.created_at
