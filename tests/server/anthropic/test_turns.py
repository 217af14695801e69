"""From bodies of the Messages API to chats, without a server."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import InvalidRequest
from kvstrata.server.anthropic.request import parse_messages, parse_prompt
from kvstrata.server.anthropic.schema import MessagesRequest
from kvstrata.server.chat.request import ChatRequest, GenerationParams, ThinkingParams, ToolChoice
from kvstrata.server.http.json_body import parse_json
from kvstrata.text.messages import Message

USER = {"role": "user", "content": "hello"}
CALL = {"type": "tool_use", "id": "call1", "name": "look", "input": {"at": "Größe"}}
CALLED = [USER, {"role": "assistant", "content": [CALL]}]
LOOK = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}


def chat(*messages: Any, **fields: Any) -> ChatRequest:
    body = {"model": "claude-x", "max_tokens": 10, "messages": list(messages) or [USER], **fields}
    asked = parse_json(MessagesRequest, json.dumps(body).encode())
    if asked.messages and asked.messages[-1].role == "assistant":  # no reply is possible, but it is translated
        return parse_prompt(asked, GenerationParams())
    return parse_messages(asked)


def turns(*messages: Any, **fields: Any) -> list[Message]:
    return chat(*messages, **fields).messages


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call1", "content": content, **fields}]}


def refused(*messages: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        chat(*messages, **fields)
    return error.value


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def test_texts_and_lists_of_blocks_are_the_same() -> None:
    in_blocks = {"role": "user", "content": [text("hello", cache_control={"type": "ephemeral", "ttl": "1h"})]}
    assert turns(USER, system="be brief") == turns(in_blocks, system=[text("be brief")])
    assert turns(USER, system="be brief")[0] == {"role": "system", "content": "be brief"}


def test_a_system_message_stays_in_its_place() -> None:
    middle = {"role": "system", "content": [text("12 tokens left")], "output_config": {"effort": "low"}}
    assert [turn["role"] for turn in turns(USER, middle, *CALLED[1:])] == ["user", "system", "assistant"]
    without_content = {"role": "system", "output_config": {"effort": "low"}}
    assert turns(USER, without_content) == [USER]


def test_results_come_before_the_text_beside_them() -> None:
    blocks = [text("one"), *result("42")["content"], text("two")]
    assert turns(*CALLED, {"role": "user", "content": blocks})[2:] == [
        {"role": "tool", "tool_call_id": "call1", "content": "42"},
        {"role": "user", "content": "one\ntwo"},
    ]


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("42", "42"),
        ([text("4"), text("2")], "4\n2"),
        ([], ""),
        (None, ""),
        ([{"type": "tool_reference", "tool_name": "Write"}], "The tool Write is available."),
        ([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "of"}}], "of"),
    ],
)
def test_the_content_of_a_result(content: Any, shown: str) -> None:
    (told,) = turns(*CALLED, result(content))[2:]
    assert told["content"] == shown


def test_a_result_that_is_an_error_says_so() -> None:
    (told,) = turns(*CALLED, result("no such file", is_error=True))[2:]
    assert told["content"] == "Error: no such file"


def test_what_the_assistant_said_thought_and_called() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    said = {"role": "assistant", "content": [thought, hidden, text("I "), text("look"), CALL]}
    assert turns(USER, said)[1] == {
        "role": "assistant",
        "content": "I look",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Größe"}'}}
        ],
    }


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert turns(USER, USER) == [{"role": "user", "content": "hello\nhello"}]
    second = {**CALL, "id": "call2"}
    both = turns(*CALLED, {"role": "assistant", "content": [second]})[1]
    assert [call["id"] for call in both["tool_calls"]] == ["call1", "call2"]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(min_size=1)), min_size=1))
def test_no_text_is_lost_or_moved(said: list[tuple[str, str]]) -> None:
    shown = turns(*({"role": role, "content": [text(words)]} for role, words in said))
    at = 0
    everything = "\n".join(turn["content"] for turn in shown)
    for _, words in said:
        at = everything.index(words, at) + len(words)
    assert all(one["role"] != other["role"] or one["role"] == "system" for one, other in pairwise(shown))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "no base64 at all!"}}


@pytest.mark.parametrize(
    ("messages", "place", "words"),
    [
        ([{"role": "user", "content": [text("see"), IMAGE]}], "messages.0.content.1", "images are not supported"),
        ([*CALLED, result([IMAGE])], "messages.2.content.0.content.0", "images are not supported"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "messages.0.content.0", "'hologram' is not supported"),
        ([USER, {"role": "assistant", "content": result("x")["content"]}], "messages.1.content.0", "no place"),
        ([{"role": "user", "content": [CALL]}], "messages.0.content.0", "no place"),
        ([USER, result("42")], "messages.1.content.0.tool_use_id", "id of no tool_use block"),
        ([result("42"), *CALLED], "messages.0.content.0.tool_use_id", "id of no tool_use block"),
        ([{"role": "user", "content": None}], "messages.0.content", "needs content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text", "required"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0.type", "required"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0", "valid dictionary"),
        ([{"role": "tool", "content": "x"}], "messages.0.role", "'user', 'assistant' or 'system'"),
        ([USER, {"role": "assistant", "content": [{**CALL, "input": "x"}]}], "messages.1.content.0.input", "dict"),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "%"}}]}],
            "messages.0.content.0",
            "plain text only",
        ),
        (
            [{"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_definition"}}]}],
            "messages.0.content.0",
            "Put it into tools",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_place(messages: list[Any], place: str, words: str) -> None:
    error = refused(*messages)
    assert error.param == place
    assert words in error.message


def test_tools_are_offered_in_the_form_that_templates_know() -> None:
    offered = chat(
        tools=[{**LOOK, "cache_control": {"type": "ephemeral"}, "defer_loading": True}, {**LOOK, "type": "custom"}]
    )
    function = {"name": "look", "description": "Looks", "parameters": LOOK["input_schema"]}
    assert offered.tools == ({"type": "function", "function": function},) * 2


def test_tools_that_only_anthropic_knows_are_left_out() -> None:
    own = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "something_new", "name": "x"},
    ]
    assert [tool["function"]["name"] for tool in chat(tools=[*own, LOOK]).tools] == ["look"]
    assert "needs tools" in refused(tools=own, tool_choice={"type": "any"}).message
    assert "not among" in refused(tools=own, tool_choice={"type": "tool", "name": "bash"}).message


@pytest.mark.parametrize("tool", [{"name": "x"}, {"input_schema": {}}, {"type": "custom", "name": "x"}])
def test_a_tool_needs_a_name_and_a_schema(tool: dict[str, Any]) -> None:
    assert (refused(tools=[LOOK, tool]).param or "").startswith("tools.1.")


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        (None, ToolChoice()),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", parallel=False)),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "look"}, ToolChoice("required", "look")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tool_choice(asked: Any, choice: ToolChoice) -> None:
    assert chat(tools=[LOOK], tool_choice=asked).choice == choice


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, ThinkingParams()),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, ThinkingParams(True)),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, ThinkingParams(False)),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "medium"}},
            ThinkingParams(None, "medium"),
        ),
        ({"output_config": {"effort": "max"}}, ThinkingParams(None, "high")),
    ],
)
def test_thinking(fields: dict[str, Any], wanted: ThinkingParams) -> None:
    assert chat(**fields).thinking == wanted


def test_what_is_wanted_of_the_reply() -> None:
    wanted = chat(temperature=1.5, top_p=0, top_k=40, stop_sequences=["a", "b"], max_tokens=128_000).params
    assert (wanted.max_tokens, wanted.reserves, wanted.stop) == (128_000, False, ("a", "b"))
    assert (wanted.sampling["temperature"], wanted.sampling["top_k"]) == (1.5, 40)
    assert 0 < wanted.sampling["top_p"] < 0.001


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_that_the_reply_must_follow(field: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    wanted = chat(**{field: {"format": form} if field == "output_config" else form}).params
    assert wanted.constraint is not None
    assert json.loads(wanted.constraint.text) == {"type": "object"}
    assert wanted.constraint_param.startswith(field)


def test_fields_without_a_meaning_here_are_ignored() -> None:
    plain = chat()
    assert plain == chat(
        metadata={"user_id": "x"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        speed="fast",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param
