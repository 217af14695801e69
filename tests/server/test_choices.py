"""Choices of an answer that the default model cannot give: tool calls. Real tokenizer, real parser of mlx-lm."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from kvstrata.engine.request import FinishReason, TokenLogprob, TokenUsage
from kvstrata.models.load import LoadedModel
from kvstrata.server.chat.writer import ChoiceEnd, json_bytes
from kvstrata.server.openai.response import ChatChoice
from kvstrata.server.state import ServerState
from kvstrata.text.reply_events import ReplyText
from tests.server import played as played_by
from tests.support.servers import running
from tests.text.chat_templates import HERMES

HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def hermes(default_model: LoadedModel) -> Iterator[ServerState]:
    """The default model with a template that has tools."""
    hf = copy.deepcopy(default_model.tokenizer._tokenizer)
    hf.chat_template = HERMES
    tokenizer = TokenizerWrapper(
        hf,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )
    with running(replace(default_model, tokenizer=tokenizer)) as served:
        yield served.server.state


def play(hermes: ServerState, text: str, reason: FinishReason = "stop", **asked: Any) -> tuple[list[Any], Any]:
    """The deltas and the whole of a reply that arrives letter by letter."""
    played = played_by.play(hermes, played_by.letters(text, reason), **{"messages": HELLO, "tools": TOOLS, **asked})
    return played.deltas, played.whole


def test_calls_stream_as_they_are_written(hermes: ServerState) -> None:
    deltas, whole = play(hermes, f"Let me see. {CALL}{CALL}")
    pieces = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    begun = [piece for piece in pieces if "id" in piece]
    assert [(call["index"], call["function"]["name"]) for call in begun] == [(0, "add"), (1, "add")]
    assert len({call["id"] for call in begun}) == 2
    # Mistral's templates refuse others when the call comes back in the next request.
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in begun)
    for index in (0, 1):
        arguments = [piece["function"]["arguments"] for piece in pieces if piece["index"] == index]
        assert json.loads("".join(arguments)) == {"x": 1}
        assert sum(map(bool, arguments)) > 2
    assert "".join(delta["delta"].get("content") or "" for delta in deltas).strip() == "Let me see."
    assert deltas[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert [call["id"] for call in whole["message"]["tool_calls"]] == [call["id"] for call in begun]
    assert [json.loads(call["function"]["arguments"]) for call in whole["message"]["tool_calls"]] == [{"x": 1}] * 2
    assert all("index" not in call for call in whole["message"]["tool_calls"])


def test_one_call_is_enough_where_the_client_says_so(hermes: ServerState) -> None:
    _, whole = play(hermes, f"{CALL}{CALL} and more", parallel_tool_calls=False)
    assert len(whole["message"]["tool_calls"]) == 1
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == "tool_calls"


def test_only_a_call_has_no_content(hermes: ServerState) -> None:
    deltas, whole = play(hermes, CALL)
    assert whole["message"]["content"] is None
    assert deltas[0]["delta"]["role"] == "assistant"


def test_a_call_that_was_cut_off_has_what_came_of_it(hermes: ServerState) -> None:
    _, whole = play(hermes, CALL[:-14], "length")
    [call] = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"x": 1'}
    assert whole["finish_reason"] == "length"


def test_empty_reply_still_has_a_role(hermes: ServerState) -> None:
    deltas, whole = play(hermes, "")
    assert [delta["delta"] for delta in deltas] == [{"role": "assistant", "content": ""}]
    assert whole["message"]["content"] == ""


def test_impossible_tokens_are_json(hermes: ServerState) -> None:
    choice = ChatChoice(0, hermes.loaded.tokenizer)
    choice.add([ReplyText("a")], [TokenLogprob(5, float("-inf"), ((5, float("-inf")),))])
    choice.finish(ChoiceEnd("stop", TokenUsage()))
    logprobs = json.loads(json_bytes(choice.whole()))["logprobs"]
    assert logprobs["content"][0]["logprob"] == -9999.0
