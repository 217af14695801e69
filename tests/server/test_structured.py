"""Replies that keep to a form, through the `openai` client and a real server."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.support.servers import Served

HELLO: Any = [{"role": "user", "content": "Tell me of a city, as JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("describe", "forget")
]


class City(BaseModel):
    name: str
    size: Literal["small", "large"]


def ask(client: openai.OpenAI, served: Served, **asked: Any) -> Any:
    return client.chat.completions.create(
        model=served.name, messages=HELLO, max_tokens=80, temperature=1, seed=1, **asked
    ).choices[0]


def test_parse_gives_a_model(client: openai.OpenAI, served: Served) -> None:
    parsed = client.chat.completions.parse(
        model=served.name, messages=HELLO, response_format=City, max_tokens=200, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_is_kept_to(client: openai.OpenAI, served: Served, strict: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": strict}}
    choice = ask(client, served, response_format=wanted)
    found = json.loads(choice.message.content)
    assert set(found) == {"name", "size"}
    assert found["size"] in ("small", "large")


def test_a_json_object(client: openai.OpenAI, served: Served) -> None:
    choice = ask(client, served, response_format={"type": "json_object"})
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" (" b")+ "!"'}, "a( b)+!"),
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{.*\}"),
    ],
)
def test_vllms_names(client: openai.OpenAI, served: Served, how: dict[str, Any], form: str) -> None:
    choice = ask(client, served, extra_body={"structured_outputs": how})
    if choice.finish_reason == "stop":
        assert re.fullmatch(form, choice.message.content, re.DOTALL), choice.message.content
    else:
        assert "grammar" in how  # the only one without an end of its own


def test_completions_take_them_too(served: Served) -> None:
    asked = {"prompt": "The answer is", "max_tokens": 20, "structured_outputs": {"choice": ["yes", "no"]}}
    assert served.ask("/v1/completions", **asked).json()["choices"][0]["text"] in ("yes", "no")


def test_a_required_call(client: openai.OpenAI, served: Served) -> None:
    choice = ask(client, served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [call] = choice.message.tool_calls
    assert call.function.name in ("describe", "forget")
    assert set(json.loads(call.function.arguments)) == {"name", "size"}
    assert choice.finish_reason == "tool_calls"


def test_a_named_call_streams(client: openai.OpenAI, served: Served) -> None:
    with client.chat.completions.stream(
        model=served.name,
        messages=HELLO,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "forget"}},
        max_tokens=80,
    ) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.function.name == "forget"
    assert set(json.loads(call.function.arguments)) == {"name", "size"}
    assert kinds.count("tool_calls.function.arguments.delta") > 3


def test_tools_and_a_form_leave_both_open(client: openai.OpenAI, served: Served) -> None:
    choice = ask(client, served, tools=TOOLS, response_format={"type": "json_object"})
    if choice.finish_reason == "tool_calls":
        assert choice.message.tool_calls
    elif choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_constrained_and_free_replies_share_a_batch(served: Served) -> None:
    answer = served.ask(
        "/v1/completions", prompt=["One", "Two"], max_tokens=6, temperature=0, structured_outputs={"regex": "[0-9]{5}"}
    ).json()
    assert all(re.fullmatch("[0-9]{1,5}", choice["text"]) for choice in answer["choices"])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "nothing"}, "strict": True},
                }
            },
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "no grammar"}}, "structured_outputs.grammar"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_what_cannot_be_done_is_said(served: Served, asked: dict[str, Any], param: str) -> None:
    answer = served.ask("/v1/chat/completions", messages=HELLO, max_tokens=1, **asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert served.ask("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_huge_and_recursive_schemas(served: Served) -> None:
    def asked(schema: dict[str, Any]) -> Any:
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return served.ask("/v1/chat/completions", messages=HELLO, max_tokens=1, response_format=wanted)

    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    tree = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}}
    assert asked(tree).status_code == 200
    assert asked(deep).status_code in (200, 400)
    huge = {"type": "object", "properties": {f"property{number}": {"enum": ["x" * 50]} for number in range(10_000)}}
    assert asked(huge).status_code == 400
    assert asked({"$ref": "#/$defs/missing"}).status_code == 400


def test_what_a_lenient_schema_does_not_get_is_said(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    answer = served.ask("/v1/chat/completions", messages=HELLO, max_tokens=1, response_format=wanted)
    assert "unevaluatedProperties" in answer.headers["x-kvstrata-schema-ignored"]
    wanted["json_schema"]["strict"] = True
    refused = served.ask("/v1/chat/completions", messages=HELLO, max_tokens=1, response_format=wanted)
    assert refused.status_code == 400


def test_a_result_without_its_call_is_refused(served: Served) -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": "42"}
    answer = served.ask("/v1/chat/completions", messages=[*HELLO, result], max_tokens=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.1.tool_call_id"
