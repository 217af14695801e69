"""Bodies of /v1/responses become conversations."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from kvstrata.errors import InvalidRequest
from kvstrata.server.chat.request import ChatRequest, ToolChoice
from kvstrata.server.chat.writer import json_bytes
from kvstrata.server.http.json_body import parse_json
from kvstrata.server.responses.request import pack_thinking, parse_response
from kvstrata.server.responses.schema import ResponsesRequest
from kvstrata.server.responses.store import ResponseStore, StoredResponse
from kvstrata.server.responses.tools import ToolName, ignored_tools, tool_names
from kvstrata.server.state import IgnoredTools

READ = {"type": "function", "name": "read", "parameters": {"type": "object"}, "description": "Reads.", "strict": True}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'}


def chat(stored: ResponseStore | None = None, **body: Any) -> ChatRequest:
    asked = parse_json(ResponsesRequest, json.dumps(body).encode())
    return parse_response(asked, stored or ResponseStore(), "me").chat


def refusal(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    return caught.value


def test_text_and_instructions() -> None:
    assert chat(input="Hi", instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_systems_at_the_front_are_one_and_others_stay() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "message", "role": "system", "content": "C"},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "D"},
    ]
    assert chat(input=items, instructions="I").messages == [
        {"role": "system", "content": "I\n\nAB\n\nC"},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "D"},
    ]


def test_one_reply_is_one_turn() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I read."}]},
        CALL,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'say "ü"'},
        {"type": "function_call_output", "call_id": "c1", "output": "A"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "B"}]},
        {"role": "assistant", "content": "Done"},
        {"role": "assistant", "content": "and more."},
    ]
    assert chat(input=items, tools=[READ, PATCH]).messages[1:] == [
        {
            "role": "assistant",
            "content": "I read.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}},
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "patch", "arguments": '{"input": "say \\"ü\\""}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "A"},
        {"role": "tool", "tool_call_id": "c2", "content": "B"},
        {"role": "assistant", "content": "Done\nand more."},
    ]


@pytest.mark.parametrize(
    ("reasoning", "thinking"),
    [
        ({"summary": [{"type": "summary_text", "text": "S"}]}, "S"),
        (
            {"summary": [{"type": "summary_text", "text": "S"}], "content": [{"type": "reasoning_text", "text": "C"}]},
            "C",
        ),
        ({"summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": pack_thinking("Ö")}, "Ö"),
        ({"summary": [{"type": "summary_text", "text": "S"}], "encrypted_content": "gAAAA"}, "S"),
        ({"summary": [], "encrypted_content": "kvstrata1.?"}, None),
    ],
)
def test_reasoning_comes_back(reasoning: dict[str, Any], thinking: str | None) -> None:
    items = [{"type": "reasoning", **reasoning}, {"role": "assistant", "content": "Yes"}]
    assert chat(input=items).messages[0].get("reasoning_content") == thinking


def test_thoughts_that_led_to_nothing_go() -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]},
        {"role": "user", "content": "x"},
    ]
    assert chat(input=items).messages == [{"role": "user", "content": "x"}]


def test_tools_are_functions_for_the_model() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    space = {"type": "namespace", "name": "team", "description": "T", "tools": [{**READ, "name": "spawn"}, READ, PATCH]}
    tools = [space, READ, {**PATCH, "format": grammar}, {"type": "web_search", "filters": {}}, {"type": "mcp"}]
    asked = parse_json(ResponsesRequest, json.dumps({"tools": tools}).encode())
    box = tool_names(asked.tools or ())
    told = {tool["function"]["name"]: tool["function"] for tool in box.tools}
    assert list(told) == ["read", "patch", "spawn", "team__read", "team__patch"]
    assert told["read"] == {key: value for key, value in READ.items() if key != "type"}
    assert told["patch"]["description"] == "Patches.\n\nThe input must follow this lark grammar:\nstart: /x/"
    assert told["patch"]["parameters"]["required"] == ["input"]
    assert box.names["spawn"] == ToolName("spawn", "team")
    assert box.names["team__patch"] == ToolName("patch", "team", is_custom=True)
    assert box.shown_name("read", "team") == "team__read"
    assert box.shown_name("read", None) == "read"
    assert box.shown_name("gone", "team") == "gone"
    assert ignored_tools(asked.tools or ()) == {"web_search": "does not run here", "mcp": "does not run here"}


def test_what_runs_elsewhere_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredTools()
    with caplog.at_level(logging.INFO, "kvstrata.server"):
        ignored.log_tools({"web_search": "does not run here", "mcp": "does not run here"})
        ignored.log_tools({"mcp": "does not run here"})
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "A client offers a tool of type mcp",
        "A client offers a tool of type web_search",
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "offered"),
    [
        (None, ToolChoice("auto"), ["read", "patch"]),
        ("none", ToolChoice("none"), ["read", "patch"]),
        ("required", ToolChoice("required"), ["read", "patch"]),
        ({"type": "function", "name": "read"}, ToolChoice("required", "read"), ["read", "patch"]),
        ({"type": "custom", "name": "patch"}, ToolChoice("required", "patch"), ["read", "patch"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            ToolChoice("required"),
            ["patch"],
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ToolChoice("auto"), []),
    ],
)
def test_choices_of_tools(choice: Any, expected: ToolChoice, offered: list[str]) -> None:
    made = chat(input="x", tools=[READ, PATCH], tool_choice=choice)
    assert made.choice == expected
    assert [tool["function"]["name"] for tool in made.tools] == offered
    assert not chat(input="x", tools=[READ], parallel_tool_calls=False).choice.parallel


def test_what_is_wanted_of_the_reply() -> None:
    made = chat(
        input="x",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_logprobs=2,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        stream_options={"include_obfuscation": False},
        service_tier="auto",
        truncation="auto",
        brand_new=1,
    )
    assert made.thinking.effort == "low"
    assert made.params.max_tokens == 7
    assert not made.params.reserves
    assert made.params.sampling == {"temperature": 0.5, "top_p": 0.25, "num_logprobs": 2}
    assert made.params.constraint is not None
    assert made.params.constraint_param == "text.format"
    assert chat(input="x").params.sampling["num_logprobs"] is None
    assert chat(input="x", include=["message.output_text.logprobs"]).params.sampling["num_logprobs"] == 0


def kept(response_id: str, owner: str, items: list[Any], output: list[Any]) -> StoredResponse:
    ids = tuple(item["id"] for item in output)
    return StoredResponse(response_id, owner, json_bytes({"output": output}), json_bytes(items), ids)


def test_earlier_responses_come_first_and_their_instructions_do_not() -> None:
    stored = ResponseStore()
    call = {**CALL, "id": "fc_1", "status": "completed"}
    stored.keep(kept("resp_1", "me", [{"type": "message", "role": "user", "content": "Hi", "id": "m"}], [call]))
    output = {"type": "function_call_output", "call_id": "c1", "output": "A"}
    made = chat(stored, input=[output], previous_response_id="resp_1", instructions="New.")
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "tool"]
    made = chat(stored, input=[{"type": "item_reference", "id": "fc_1"}, output])
    assert [message["role"] for message in made.messages] == ["assistant", "tool"]
    assert [message["role"] for message in chat(stored, input=[{"id": "fc_1"}, output]).messages] == [
        "assistant",
        "tool",
    ]


def test_another_keys_response_is_an_unknown_one() -> None:
    stored = ResponseStore()
    stored.keep(kept("resp_1", "somebody", [], [{**CALL, "id": "fc_1"}]))
    with pytest.raises(InvalidRequest) as theirs:
        chat(stored, input="x", previous_response_id="resp_1")
    unknown = refusal(input="x", previous_response_id="resp_1")
    assert theirs.value.message == unknown.message
    assert unknown.code == "previous_response_not_found"
    with pytest.raises(InvalidRequest, match="Item with id 'fc_1' not found"):
        chat(stored, input=[{"type": "item_reference", "id": "fc_1"}])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [{"type": "local_shell_call", "id": "x"}]}, "input.0", "local_shell_call is not supported"),
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": ""}]}, "input.0", "No tool call found"),
        ({"input": [CALL, CALL, {"role": "user", "content": 5}]}, "input.2.content", "valid string"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "takes text"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image"}]}]},
         "input.1.output", "takes text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text", "required"),
        ({"input": [{"role": "robot", "content": ""}]}, "input.0.role", "developer"),
        ({"input": ["x"]}, "input.0", "must be an item"),
        ({"input": []}, "input", "empty"),
        ({}, "input", "empty"),
        ({"input": "x", "tools": [READ, READ]}, "tools.1", "another tool"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [5]}]}, "tools.0.tools.0", "a tool"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "not among"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice", "do not run here"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "schema"),
    ],
)  # fmt: skip
def test_refusals(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(**body)
    assert (error.status, error.param) == (400, param)
    assert words in error.message


def test_many_items_of_one_reply_take_time_in_proportion() -> None:
    """Joining each to all before it, or looking for each tool among all, takes several times the limit."""
    texts = [{"role": "assistant", "content": "x" * 100} for _ in range(20_000)]
    tools = [{"type": "function", "name": f"f{number}"} for number in range(10_000)]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    began_s = time.process_time()
    made = chat(input=[*texts, {"role": "user", "content": "Hi"}], tools=tools, tool_choice=allowed)
    assert time.process_time() - began_s < 4
    assert made.messages[0]["content"] == "\n".join(["x" * 100] * 20_000)
    assert len(made.tools) == 10_000


def test_an_allowed_tool_may_be_named_without_its_namespace() -> None:
    tools = [{"type": "namespace", "name": space, "tools": [READ]} for space in ("a", "b")]
    for chosen, told in (
        ({"name": "read"}, "read"),
        ({"name": "read", "namespace": "a"}, "read"),
        ({"name": "read", "namespace": "b"}, "b__read"),
    ):
        made = chat(input="Hi", tools=tools, tool_choice={"type": "function", **chosen})
        assert made.choice.name == told
