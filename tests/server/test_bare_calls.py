"""Calls as Llama 3 writes them, from the request to the choice; the default model cannot write them itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.models.load import LoadedModel
from tests.server.played import letters, play
from tests.support.servers import Served, running
from tests.text.chat_templates import LLAMA

HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SHOWS_NO_CALLS = "{{ tools | tojson if tools else '' }}{% for message in messages %}{{ message.content }}{% endfor %}"

ServeTemplate = Callable[[str], AbstractContextManager[Served]]


@pytest.fixture
def serve_template(default_model: LoadedModel) -> ServeTemplate:
    def serve(source: str) -> AbstractContextManager[Served]:
        hf = copy.deepcopy(default_model.tokenizer._tokenizer)
        hf.chat_template = source
        return running(replace(default_model, tokenizer=TokenizerWrapper(hf)))

    return serve


def test_a_call_comes_and_can_be_sent_back(serve_template: ServeTemplate) -> None:
    with serve_template(LLAMA) as served:
        reply = letters('{"name": "f", "parameters": {"a": 1}}')
        whole = play(served.server.state, reply, messages=HELLO, tools=TOOLS).whole
        assert whole["finish_reason"] == "tool_calls"
        [call] = whole["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        messages = [*HELLO, whole["message"], result]
        answer = served.ask("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=1)
        assert answer.status_code == 200, answer.text


def test_tools_of_a_template_that_shows_no_calls(serve_template: ServeTemplate) -> None:
    with serve_template(SHOWS_NO_CALLS) as served:
        reply = letters('{"name": "f", "arguments": {"a": 1}}')
        whole = play(served.server.state, reply, messages=HELLO, tools=TOOLS).whole
        assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_history_of_calls_where_the_template_knows_none(served: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "42"}
    answer = served.ask("/v1/chat/completions", messages=[*HELLO, asks, result], max_tokens=1)
    assert answer.status_code == 200, answer.text
    ids = served.ask("/tokenize", messages=[*HELLO, asks, result]).json()["tokens"]
    text = served.ask("/detokenize", tokens=ids).json()["prompt"]
    assert '"name": "f"' in text
    assert "42" in text
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []}
    answer = served.ask("/v1/chat/completions", messages=[*HELLO, refusal, *HELLO], max_tokens=1)
    assert answer.status_code == 200, answer.text
