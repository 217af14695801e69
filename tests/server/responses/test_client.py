"""/v1/responses with the real openai client and a real server, whose model says what a script wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from kvstrata.errors import NeverFits
from tests.agents.forced import Forced, Prompt, call_text, serving
from tests.support.servers import Served

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "array"}}, "required": ["x"]},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Patches."}
TEAM: Any = {"type": "namespace", "name": "team", "description": "Others", "tools": [{**ADD, "name": "spawn"}]}
TOOLS: Any = [ADD, PATCH, TEAM, {"type": "web_search"}]
INPUT = '*** Begin\n+say "ü"\\\n'
REPLIES = {
    "add": "I add.\n" + call_text("add", {"x": [1, "ü"]}),
    "patch": call_text("patch", {"input": INPUT}),
    "spawn": call_text("spawn", {"x": []}),
    "both": call_text("add", {"x": [1]}) + "\n" + call_text("add", {"x": [2]}),
    "think": "<think>\nHm, well.\n</think>\n\nYes.",
    "city": '{"name": "Oslo", "size": "large"}',
    "long": "word " * 20_000,
}


class City(BaseModel):
    name: str
    size: Literal["small", "large"]


def script(prompt: Prompt) -> str:
    last = prompt.turns[-1]
    if last.role == "tool":
        return f"It is {last.text}."
    return REPLIES.get(last.text, "/".join(f"{turn.role}:{turn.text}" for turn in prompt.turns))


@pytest.fixture(scope="module")
def forced() -> Iterator[Forced]:
    with serving(script, max_model_len=4096) as one:
        yield one


@pytest.fixture(scope="module")
def served(forced: Forced) -> Served:
    return forced.served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as one:
        yield one


def test_text_in_text_out(client: openai.OpenAI, served: Served) -> None:
    answer = client.responses.create(model=served.name, input="Hi", instructions="Be brief.", metadata={"a": "b"})
    Response.model_validate(answer.to_dict())
    assert answer.output_text == "system:Be brief./user:Hi"
    assert (answer.status, answer.model, answer.metadata) == ("completed", served.name, {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    again = client.responses.create(model=served.name, input="Hi", instructions="Be brief.")
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1


def test_items_in(client: openai.OpenAI, served: Served) -> None:
    items: Any = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {"role": "user", "content": "Ho"},
    ]
    answer = client.responses.create(model=served.name, input=items)
    assert answer.output_text == "system:D/user:Hi/assistant:Yes?/user:Ho"


def test_a_call_its_result_and_the_end(client: openai.OpenAI, served: Served) -> None:
    first = client.responses.create(model=served.name, input="add", tools=TOOLS)
    message, call = first.output
    assert (message.type, first.output_text.strip()) == ("message", "I add.")
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"x": [1, "ü"]}, "completed")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    items: Any = [{"role": "user", "content": "add"}, *(item.to_dict() for item in first.output), result]
    assert client.responses.create(model=served.name, input=items, tools=TOOLS).output_text == "It is 42."
    second = client.responses.create(model=served.name, input=[result], tools=TOOLS, previous_response_id=first.id)
    assert second.output_text == "It is 42."
    assert second.previous_response_id == first.id


def test_free_text_tools(client: openai.OpenAI, served: Served, forced: Forced) -> None:
    first = client.responses.create(model=served.name, input="patch", tools=TOOLS)
    [call] = first.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("patch", INPUT)
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    second = client.responses.create(model=served.name, input=[result], tools=TOOLS, previous_response_id=first.id)
    assert second.output_text == "It is done."
    written = forced.said[-1].prompt.turns[-2].text  # as the model had written it
    assert json.loads(written.split("tool_call>")[1].removesuffix("</"))["arguments"] == {"input": INPUT}


def test_namespaces(client: openai.OpenAI, served: Served) -> None:
    [call] = client.responses.create(model=served.name, input="spawn", tools=TOOLS).output
    assert call.type == "function_call"
    assert (call.name, call.namespace) == ("spawn", "team")


def test_several_calls_or_one(client: openai.OpenAI, served: Served) -> None:
    def calls(**asked: Any) -> list[str]:
        output = client.responses.create(model=served.name, input="both", tools=TOOLS, **asked).output
        assert {item.type for item in output} == {"function_call"}
        return [item.arguments for item in output if item.type == "function_call"]

    assert [json.loads(arguments) for arguments in calls()] == [{"x": [1]}, {"x": [2]}]
    assert [json.loads(arguments) for arguments in calls(parallel_tool_calls=False)] == [{"x": [1]}]


@pytest.mark.parametrize(("kind", "answer"), [("function", "function_call"), ("custom", "custom_tool_call")])
def test_a_call_that_must_be_made(client: openai.OpenAI, served: Served, kind: str, answer: str) -> None:
    """Whatever the model would say: its script has no call."""
    choice: Any = {"type": kind, "name": "pick"}
    schema = {"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"], "additionalProperties": False}
    tool: Any = {**choice, "parameters": schema} if kind == "function" else choice
    made = client.responses.create(
        model=served.name, input="no", tools=[tool, PATCH], tool_choice=choice, max_output_tokens=60, temperature=0
    )
    [call] = made.output
    assert (call.type, getattr(call, "name", "")) == (answer, "pick")
    if call.type == "function_call":
        # A model that knows nothing may fill its tokens with white space.
        assert '{"x":7}'.startswith("".join(call.arguments.split()))
        assert call.arguments.lstrip().startswith("{")


def test_thinking_goes_out_and_comes_back(client: openai.OpenAI, served: Served, forced: Forced) -> None:
    include: Any = ["reasoning.encrypted_content"]
    first = client.responses.create(model=served.name, input="think", include=include, store=False)
    reasoning, message = first.output
    assert reasoning.type == "reasoning"
    assert message.type == "message"
    assert [part.text.strip() for part in reasoning.content or []] == ["Hm, well."]
    assert first.output_text.strip() == "Yes."
    packed = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    for item in (reasoning.to_dict(), packed):
        items: Any = [{"role": "user", "content": "think"}, item, message.to_dict(), {"role": "user", "content": "Hi"}]
        client.responses.create(model=served.name, input=items)
        assert "<think>\nHm, well." in forced.said[-1].prompt.turns[1].text


def test_stream_helper(client: openai.OpenAI, served: Served) -> None:
    for text in ("Hi", "add", "patch", "think", "both"):
        with client.responses.stream(model=served.name, input=text, tools=TOOLS) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = client.responses.create(model=served.name, input=text, tools=TOOLS)
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert said == whole.output_text
        assert client.responses.retrieve(final.id).output_text == final.output_text


def test_parsed_text(client: openai.OpenAI, served: Served) -> None:
    oslo = City(name="Oslo", size="large")
    assert client.responses.parse(model=served.name, input="city", text_format=City).output_parsed == oslo
    with client.responses.stream(model=served.name, input="city", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == oslo


def events_of(served: Served, **body: Any) -> list[tuple[str, Any]]:
    response = served.ask("/v1/responses", stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in blocks)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_events_on_the_wire(served: Served) -> None:
    events = events_of(served, input="add", tools=TOOLS)
    assert [name for name, _ in events] == [event["type"] for _, event in events]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    order = [name for place, name in enumerate(names) if name not in names[max(0, place - 1) : place]]
    assert order == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert names.count("function_call_arguments.delta") > 1  # piece by piece


def test_a_long_silence_is_broken_by_events_with_numbers() -> None:
    with serving(script, keep_alive_s=0.01) as forced:
        served = forced.served
        events = events_of(served, input="add", tools=[ADD])
        with served.openai() as client, client.responses.stream(model=served.name, input="add", tools=[ADD]) as stream:
            assert [item.type for item in stream.get_final_response().output] == ["message", "function_call"]
    names = [name for name, _ in events]
    assert names.count("response.in_progress") >= 2
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))


def test_cut_off_by_length(client: openai.OpenAI, served: Served) -> None:
    answer = client.responses.create(model=served.name, input="long", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    name, last = events_of(served, input="long", max_output_tokens=3)[-1]
    assert (name, last["response"]["output"][0]["status"]) == ("response.incomplete", "incomplete")


def test_conversation_by_previous_response(client: openai.OpenAI, served: Served) -> None:
    first = client.responses.create(model=served.name, input="one", instructions="I")
    with client.responses.stream(model=served.name, input="two", previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    assert second.output_text == f"user:one/assistant:{first.output_text}/user:two"
    third = client.responses.create(model=served.name, input="three", previous_response_id=second.id)
    assert third.output_text.endswith("/user:three")
    client.responses.delete(first.id)  # the others have what they need
    assert client.responses.create(model=served.name, input="4", previous_response_id=second.id).status == "completed"


def test_retrieve_list_and_delete(client: openai.OpenAI, served: Served) -> None:
    made = client.responses.create(model=served.name, input="one")
    then = client.responses.create(model=served.name, input="two", previous_response_id=made.id)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    listed: Any = client.responses.input_items.list(then.id, order="asc")
    texts = [part.text for item in listed.data for part in item.content]
    assert texts == ["one", made.output_text, "two"]
    paged = [item.id for item in client.responses.input_items.list(then.id, limit=1)]
    assert paged == [item.id for item in reversed(listed.data)]
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            again(made.id)
        assert caught.value.code == "response_not_found"


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI, served: Served) -> None:
    made = client.responses.create(model=served.name, input="one", store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=served.name, input="two", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_another_keys_response_is_not_found() -> None:
    with (
        serving(script, api_key=["key-a", "key-b"], admin_key=["boss"]) as forced,
        forced.served.openai("key-a") as ours,
        forced.served.openai("key-b") as theirs,
        forced.served.openai("boss") as boss,
    ):
        name = forced.served.name
        made = ours.responses.create(model=name, input="one")
        with pytest.raises(openai.NotFoundError) as refused:
            theirs.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            theirs.responses.retrieve(made.id[:-1] + "?")
        assert refused.value.code == unknown.value.code
        with pytest.raises(openai.NotFoundError):
            theirs.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            theirs.responses.create(model=name, input="two", previous_response_id=made.id)
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        with pytest.raises(openai.BadRequestError, match="not found"):
            theirs.responses.create(model=name, input=reference)
        assert ours.responses.create(model=name, input=reference).status == "completed"
        assert boss.responses.retrieve(made.id).id == made.id
        with forced.served.openai("wrong") as nobody, pytest.raises(openai.AuthenticationError):
            nobody.responses.retrieve(made.id)


def test_a_prompt_that_is_too_long(client: openai.OpenAI, served: Served) -> None:
    """An error as such; in a stream as its only news, because that is where Codex looks for it."""
    text = "word " * 5000
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=served.name, input=text)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    events = events_of(served, input=text)
    assert [name for name, _ in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1][1]["response"]["error"]["code"] == "context_length_exceeded"


def test_a_prompt_that_memory_has_no_room_for(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NeverFits("It needs more memory than there is.")

    monkeypatch.setattr(served.server.state.engine, "submit", refuse)
    with pytest.raises(openai.BadRequestError, match="more memory"):
        client.responses.create(model=served.name, input="x")
    assert events_of(served, input="x")[-1][1]["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": [{"type": "computer_call_output"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input.0"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 5}}}},
            "text.format",
        ),
        ({"input": "x", "stream": True, "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "temperature": 3}, "temperature"),
    ],
)
def test_refusals(served: Served, body: dict[str, Any], param: str) -> None:
    response = served.ask("/v1/responses", **body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert served.ask("/v1/responses", input="x").status_code == 200


def test_bad_questions_about_what_is_kept(client: openai.OpenAI, served: Served) -> None:
    made = client.responses.create(model=served.name, input="one")

    def get(path: str) -> httpx.Response:
        with served.http() as http:
            return http.get(f"/v1/responses/{made.id}{path}")

    for path, param in [
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?after=x", "after"),
    ]:
        assert (get(path).status_code, get(path).json()["error"]["param"]) == (400, param)


def test_who_leaves_a_stream_cancels_it(client: openai.OpenAI, served: Served) -> None:
    with client.responses.create(model=served.name, input="long", stream=True) as stream:
        created = next(stream)
        assert created.type == "response.created"
    served.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.response.id)
