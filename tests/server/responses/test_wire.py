"""Events of replies in the words of the Responses API, each as the openai package defines it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvstrata.engine.request import Sampling, TokenLogprob, TokenUsage
from kvstrata.errors import ContextTooLong, MemoryPinned, NeverFits, QueueFull, ReplyFailed, RequestError
from kvstrata.server.chat.writer import ChoiceEnd, JsonEvent, StreamStart, json_bytes
from kvstrata.server.http.json_body import validated
from kvstrata.server.responses.output_items import OutputItems
from kvstrata.server.responses.request import pack_thinking
from kvstrata.server.responses.response import ResponsesWriter
from kvstrata.server.responses.schema import OutputLogprob, ResponsesRequest, opening
from kvstrata.server.responses.tools import ToolName
from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyText,
    ReplyThinking,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NAMES = {
    "read": ToolName("read"),
    "patch": ToolName("patch", is_custom=True),
    "spawn": ToolName("spawn", "team"),
}
TOOLS = [
    {"type": "function", "name": "read"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "team", "description": "", "tools": [{"type": "function", "name": "spawn"}]},
]
USAGE = TokenUsage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)


def logprobs(tokens: Sequence[TokenLogprob]) -> list[OutputLogprob]:
    return [{"token": str(token.id), "logprob": token.logprob, "bytes": [], "top_logprobs": []} for token in tokens]


def wire(*, packs: bool = False) -> ResponsesWriter:
    asked = validated(ResponsesRequest, {"input": "x", "instructions": "I", "tools": TOOLS, "metadata": {"a": "b"}})
    first = opening(asked, "resp_1", "model", Sampling())
    return ResponsesWriter(first, OutputItems(NAMES, logprobs, packs_thinking=packs))


def stream(events: Sequence[ReplyEvent], reason: Any = "stop", on: ResponsesWriter | None = None) -> list[Any]:
    """All of a stream, checked against the package's types and for its numbers."""
    one = on or wire()
    sent = one.start(StreamStart(7, 3))
    for event in events:
        sent += one.add(0, [event], [])
    sent += one.finish_choice(0, ChoiceEnd(reason, USAGE))
    sent += one.finish(USAGE)
    return checked(sent, one)


def checked(sent: Sequence[JsonEvent], one: ResponsesWriter) -> list[Any]:
    del one
    events = [json.loads(json_bytes(event.data)) for event in sent]
    assert [event["type"] for event in events] == [event.name for event in sent]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    return events


def kinds(events: Sequence[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_everything_in_order() -> None:
    events = stream(
        [
            ReplyThinking("Hm"),
            ReplyThinking("."),
            ReplyText("I "),
            ReplyText("read."),
            ToolCallStart("c1", "read"),
            ToolCallArguments('{"a":'),
            ToolCallArguments("1}"),
            ToolCallEnd(),
            ReplyText("\n"),
            ToolCallStart("c2", "patch"),
            ToolCallArguments('{"input": "x\\'),
            ToolCallArguments('ny"}'),
            ToolCallEnd(),
        ]
    )
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    added = [event for event in events if event["type"].endswith("output_item.added")]
    done = [event for event in events if event["type"].endswith("output_item.done")]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3] == [event["output_index"] for event in done]
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    response = events[-1]["response"]
    assert response["output"] == [event["item"] for event in done]
    reasoning, message, call, patch = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I read."
    assert (call["call_id"], call["name"], call["arguments"]) == ("c1", "read", '{"a":1}')
    assert (patch["type"], patch["call_id"], patch["input"]) == ("custom_tool_call", "c2", "x\ny")
    assert {item["status"] for item in response["output"]} == {"completed"}


def test_the_whole_answer_is_the_last_of_the_stream() -> None:
    one = wire()
    last = stream([ReplyText("Hi")], on=one)[-1]["response"]
    assert last == json.loads(json_bytes(one.whole(USAGE)))
    answer = Response.model_validate(last)
    assert answer.output_text == "Hi"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 5, 12)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert (answer.instructions, answer.metadata, answer.tool_choice) == ("I", {"a": "b"}, "auto")
    assert [tool.type for tool in answer.tools] == ["function", "custom", "namespace"]


def test_deltas_make_the_parts() -> None:
    events = stream(
        [
            ReplyThinking("a"),
            ReplyText("b"),
            ReplyText("c"),
            ToolCallStart("c", "read"),
            ToolCallArguments("{}"),
            ToolCallEnd(),
        ]
    )
    for kind, key, text in [("reasoning_text", "text", "a"), ("output_text", "text", "bc"),
                            ("function_call_arguments", "arguments", "{}")]:  # fmt: skip
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        [done] = [event for event in events if event["type"] == f"response.{kind}.done"]
        assert "".join(deltas) == done[key] == text


def test_a_call_in_a_namespace_says_so() -> None:
    events = stream([ToolCallStart("c", "spawn"), ToolCallArguments("{}"), ToolCallEnd()])
    [item] = events[-1]["response"]["output"]
    assert (item["name"], item["namespace"]) == ("spawn", "team")


@pytest.mark.parametrize("name", ["read", "patch"])
def test_a_call_that_is_cut_off_is_never_done(name: str) -> None:
    """Codex runs what is done at once."""
    events = stream([ReplyText("x"), ToolCallStart("c", name), ToolCallArguments('{"input": "rm -rf /tm')], "length")
    assert "output_item.done" not in kinds(events)[kinds(events).index("output_item.done") + 1 :]
    assert kinds(events)[-1] == "incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_a_text_that_is_cut_off() -> None:
    events = stream([ReplyText("x")], "length")
    assert kinds(events)[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["completed_at"] is None


@pytest.mark.parametrize(
    ("events", "texts"),
    [
        ([], [""]),
        ([ReplyText(" "), ReplyText("\n")], [" \n"]),
        ([ReplyText("\n"), ReplyText("a"), ReplyText("\n")], ["\na\n"]),
        ([ReplyThinking("t"), ReplyText("\n\n"), ReplyText("a")], ["\n\na"]),
        ([ReplyText("\n"), ToolCallStart("c", "read"), ToolCallEnd(), ReplyText("\n")], []),
    ],
)
def test_white_space_alone_is_a_message_only_where_there_is_nothing_else(
    events: list[ReplyEvent], texts: list[str]
) -> None:
    output = stream(events)[-1]["response"]["output"]
    assert [item["content"][0]["text"] for item in output if item["type"] == "message"] == texts


def test_silence_is_broken_by_events_that_count() -> None:
    one = wire()
    sent = [event.data["sequence_number"] for event in one.start(StreamStart(7, None))]
    name, data, *rest = one.ping("prefill 1/2").decode().split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, rest) == ("event: response.in_progress", ["", ""])
    assert EVENT.validate_python(event).type == event["type"] == "response.in_progress"
    assert [*sent, event["sequence_number"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextTooLong("long"), "context_length_exceeded"),
        (NeverFits("large"), "context_length_exceeded"),
        (ReplyFailed("broken"), "server_error"),
        (QueueFull("full"), "rate_limit_exceeded"),
        (MemoryPinned("pinned"), "invalid_prompt"),
    ],
)
def test_failures(error: RequestError, code: str) -> None:
    one = wire()
    sent = [
        *one.start(StreamStart(7, None)),
        *one.add(0, [ReplyText("a"), ToolCallStart("c", "read")], []),
        *one.fail(error),
    ]
    last = json.loads(json_bytes(sent[-1].data))
    assert last["type"] == "response.failed"
    assert last["sequence_number"] == len(sent) - 1
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": error.message}
    assert [item["type"] for item in last["response"]["output"]] == ["message"]


def test_reasoning_is_packed_for_clients_that_ask() -> None:
    events = stream([ReplyThinking("Ö"), ReplyText("x")], on=wire(packs=True))
    assert events[-1]["response"]["output"][0]["encrypted_content"] == pack_thinking("Ö")
    assert stream([ReplyThinking("Ö"), ReplyText("x")])[-1]["response"]["output"][0]["encrypted_content"] is None


def test_logprobs_go_with_their_text() -> None:
    one = wire()
    one.add(0, [ReplyThinking("t")], [TokenLogprob(1, -1.0)])
    one.add(0, [], [TokenLogprob(2, -1.0)])
    [*_, delta] = one.add(0, [ReplyText("ab")], [TokenLogprob(3, -1.0)])
    assert [each["token"] for each in delta.data["logprobs"]] == ["2", "3"]
    one.add(0, [ReplyText("c")], [TokenLogprob(4, -1.0)])
    one.finish_choice(0, ChoiceEnd("stop", USAGE))
    message = one.whole(USAGE)["output"][1]
    assert message["type"] == "message"
    assert [each["token"] for each in message["content"][0]["logprobs"]] == ["2", "3", "4"]
