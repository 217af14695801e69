"""Choices of an answer that the default model cannot give: tool calls. Real tokenizer, real parser of mlx-lm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from kvstrata.engine.request import Finished, FinishReason, Piece, TokenLogprob, TokenUsage
from kvstrata.models.loaded import LoadedModel
from kvstrata.server.openai.answers import json_bytes
from kvstrata.server.openai.choices import ChatChoice
from kvstrata.text.tools import ToolCallSplitter

CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer(default_model: LoadedModel) -> TokenizerWrapper:
    return TokenizerWrapper(
        default_model.tokenizer._tokenizer,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )


def play(tokenizer: TokenizerWrapper, text: str, reason: FinishReason = "stop") -> tuple[list[Any], Any]:
    """The deltas and the whole of a reply that arrives letter by letter."""
    choice = ChatChoice(0, tokenizer, ToolCallSplitter(tokenizer, TOOLS))
    deltas = [delta for letter in text for delta in choice.add(Piece(letter))]
    deltas += choice.end(Finished(reason, TokenUsage()))
    return deltas, choice.whole()


def test_calls_stream_whole_and_numbered(tokenizer: TokenizerWrapper) -> None:
    deltas, whole = play(tokenizer, f"Let me see. {CALL}{CALL}")
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    # Mistral's templates refuse others when the call comes back in the next request.
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": 1}, {"x": 1}]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas).strip() == "Let me see."
    assert deltas[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert [call["id"] for call in whole["message"]["tool_calls"]] == [call["id"] for call in calls]
    assert all("index" not in call for call in whole["message"]["tool_calls"])


def test_only_a_call_has_no_content(tokenizer: TokenizerWrapper) -> None:
    deltas, whole = play(tokenizer, CALL)
    assert whole["message"]["content"] is None
    assert deltas[0]["delta"]["role"] == "assistant"


def test_call_that_was_cut_off_is_content(tokenizer: TokenizerWrapper) -> None:
    _, whole = play(tokenizer, CALL[:-15], "length")
    assert "tool_calls" not in whole["message"]
    assert whole["message"]["content"] == CALL[:-15]
    assert whole["finish_reason"] == "length"


def test_empty_reply_still_has_a_role(tokenizer: TokenizerWrapper) -> None:
    deltas, whole = play(tokenizer, "")
    assert [delta["delta"] for delta in deltas] == [{"role": "assistant", "content": ""}]
    assert whole["message"]["content"] == ""


def test_impossible_tokens_are_json(tokenizer: TokenizerWrapper) -> None:
    choice = ChatChoice(0, tokenizer)
    choice.add(Piece("a", (5,), (TokenLogprob(5, float("-inf"), ((5, float("-inf")),)),)))
    choice.end(Finished("stop", TokenUsage()))
    logprobs = json.loads(json_bytes(choice.whole()))["logprobs"]
    assert logprobs["content"][0]["logprob"] == -9999.0
