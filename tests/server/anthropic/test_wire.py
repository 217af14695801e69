"""Replies as the Messages API writes them, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.engine.request import TokenUsage
from kvstrata.errors import ContextTooLong, QueueFull
from kvstrata.server.anthropic.response import SIGNATURE, MessagesWriter
from kvstrata.server.chat.writer import ChoiceEnd, JsonEvent, StreamStart
from kvstrata.text.reply_events import (
    ReplyEvent,
    ReplyText,
    ReplyThinking,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

USAGE = TokenUsage(prompt_tokens=100, cached_tokens=60, completion_tokens=7)
LOOK = [ToolCallStart("abcdefghi", "look"), ToolCallArguments('{"at": '), ToolCallArguments("1}"), ToolCallEnd()]


def streamed(*events: ReplyEvent, ended: ChoiceEnd | None = None) -> list[JsonEvent]:
    wire = MessagesWriter("msg_1", "claude-x")
    told = wire.start(StreamStart(100, 60))
    for event in events:
        told += wire.add(0, [event], ())
    return [*told, *wire.finish_choice(0, ended or ChoiceEnd("stop", USAGE)), *wire.finish(USAGE)]


def whole(*events: ReplyEvent, ended: ChoiceEnd | None = None) -> dict[str, Any]:
    wire = MessagesWriter("msg_1", "claude-x")
    wire.add(0, events, ())
    wire.finish_choice(0, ended or ChoiceEnd("stop", USAGE))
    wire.finish(USAGE)
    return dict(wire.whole(USAGE))


def put_together(told: list[JsonEvent]) -> dict[str, Any]:
    """As the SDK does it."""
    message, buffers = None, {}
    for event in told:
        if event.name != "ping":
            message = accumulate_event(event=event.data, current_snapshot=message, json_bufs=buffers)
    assert message is not None
    return {name: value for name, value in message.to_dict().items() if name != "stop_details"}


def test_a_stream_event_by_event() -> None:
    told = streamed(ReplyThinking("h"), ReplyThinking("m"), ReplyText("Hi"), *LOOK)
    assert all(event.data["type"] == event.name for event in told)
    shown = [(event.name, event.data.get("index"), event.data.get("delta", {}).get("type")) for event in told]
    assert shown == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert told[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_stream_says_at_once_what_the_prompt_took() -> None:
    start = streamed()[0].data["message"]
    expected = {"input_tokens": 40, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 0, "output_tokens": 0}
    assert (start["usage"], start["content"], start["stop_reason"]) == (expected, [], None)
    unknown = MessagesWriter("msg_1", "m").start(StreamStart(100, None))[0].data["message"]["usage"]
    assert (unknown["input_tokens"], unknown["cache_read_input_tokens"]) == (100, 0)


PIECES = st.lists(
    st.one_of(
        st.text(max_size=4).map(ReplyText),
        st.text(max_size=4).map(ReplyThinking),
        st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2),
    ),
    max_size=8,
)


@given(PIECES, st.sampled_from([ChoiceEnd("stop", USAGE), ChoiceEnd("length", USAGE), ChoiceEnd("stop", USAGE, "END")]))
def test_streamed_and_whole_are_the_same_message(pieces: list[Any], ended: ChoiceEnd) -> None:
    events: list[ReplyEvent] = []
    for piece in pieces:
        if isinstance(piece, dict):
            words = json.dumps(piece)
            half = len(words) // 2
            events += [
                ToolCallStart("a", "b"),
                ToolCallArguments(words[:half]),
                ToolCallArguments(words[half:]),
                ToolCallEnd(),
            ]
        else:
            events.append(piece)
    answer = whole(*events, ended=ended)
    assert put_together(streamed(*events, ended=ended)) == answer
    usage = answer["usage"]
    assert sum(count for name, count in usage.items() if name != "output_tokens") == USAGE.prompt_tokens
    assert all(block["text"].strip() for block in answer["content"] if block["type"] == "text")


@pytest.mark.parametrize(
    ("events", "ended", "reason"),
    [
        ([ReplyText("x")], ChoiceEnd("stop", USAGE), "end_turn"),
        ([ReplyText("x")], ChoiceEnd("length", USAGE), "max_tokens"),
        ([ReplyText("x")], ChoiceEnd("stop", USAGE, "END"), "stop_sequence"),
        (LOOK, ChoiceEnd("stop", USAGE), "tool_use"),
        (LOOK[:2], ChoiceEnd("length", USAGE), "max_tokens"),
    ],
)
def test_why_it_stopped(events: list[ReplyEvent], ended: ChoiceEnd, reason: str) -> None:
    answer = whole(*events, ended=ended)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, ended.stop or None)
    assert streamed(*events, ended=ended)[-2].data["delta"]["stop_reason"] == reason


@pytest.mark.parametrize("arguments", ['{"at": ', "[1]", '{"at": NaN}', '{"at": 1e999}', "[" * 100_000, "no"])
def test_a_call_that_is_broken_is_told_as_text(arguments: str) -> None:
    answer = whole(ToolCallStart("a", "look"), ToolCallArguments(arguments), ToolCallEnd())
    (block,) = answer["content"]
    assert block["type"] == "text"
    assert "look" in block["text"]
    assert arguments in block["text"]
    assert answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("", {}),
        ('{"path": "a.py", "content": "def f', {"path": "a.py"}),
        ('{"path": "a.py", "lines": [1, 2', {"path": "a.py", "lines": [1, 2]}),
        ('{"path": "a.py"}', {"path": "a.py"}),
    ],
)
def test_a_call_cut_off_by_max_tokens_stays_a_call(arguments: str, kept: dict[str, Any]) -> None:
    answer = whole(
        ReplyText("I look."), ToolCallStart("a", "look"), ToolCallArguments(arguments), ended=ChoiceEnd("length", USAGE)
    )
    assert answer["content"][-1] == {"type": "tool_use", "id": "a", "name": "look", "input": kept}
    assert answer["stop_reason"] == "max_tokens"


def test_a_broken_call_before_a_cut_is_text() -> None:
    broken = (ToolCallStart("a", "look"), ToolCallArguments('{"at": NaN'), ToolCallEnd())
    answer = whole(*broken, ReplyText("and"), ended=ChoiceEnd("length", USAGE))
    assert [block["type"] for block in answer["content"]] == ["text", "text"]


def test_a_call_without_arguments_has_an_empty_input() -> None:
    events = (ToolCallStart("a", "look"), ToolCallEnd())
    assert whole(*events)["content"] == [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]
    assert put_together(streamed(*events)) == whole(*events)


def test_whitespace_before_a_call_is_no_block() -> None:
    answer = whole(ReplyThinking("hm"), ReplyText("\n"), ReplyText("\n"), *LOOK, ReplyText(" \n"))
    assert [block["type"] for block in answer["content"]] == ["thinking", "tool_use"]
    assert whole(ReplyText("\n"), ReplyText("\nx "), ReplyText(" "))["content"] == [{"type": "text", "text": "\n\nx  "}]


def test_thoughts_are_signed() -> None:
    (block,) = whole(ReplyThinking("hm"))["content"]
    assert block == {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}


def test_pings_and_failures_have_names() -> None:
    wire = MessagesWriter("msg_1", "m")
    assert wire.ping("prefill 1/2") == b'event: ping\ndata: {"type":"ping"}\n\n'
    (failed,) = wire.fail(QueueFull("full"))
    assert failed == ({"type": "error", "error": {"type": "rate_limit_error", "message": "full"}}, "error")


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for() -> None:
    (failed,) = MessagesWriter("msg_1", "m").fail(ContextTooLong("Shorten it.", num_tokens=30, max_tokens=20))
    assert failed.data["error"]["message"] == "prompt is too long: 30 tokens > 20 maximum. Shorten it."
