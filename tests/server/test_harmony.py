"""Replies in gpt-oss's form, which the default model cannot write: its tokens go by hand through what serves them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvstrata.models.load import LoadedModel
from kvstrata.text.tokenizer import encode_rendered
from tests.server.played import play_ids as played_ids
from tests.support.servers import Served, running
from tests.text.chat_templates import GPT_OSS, HARMONY

HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
ANALYSIS = "<|channel|>analysis<|message|>User says hi. 🙂<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello! 🙂"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "ü"}'


@pytest.fixture(scope="module")
def harmony(default_model: LoadedModel) -> Iterator[Served]:
    """The default model with other names for special tokens that it never uses."""
    spec = default_model.tokenizer.backend_tokenizer.to_str()
    unused = [token.content for id, token in default_model.tokenizer.added_tokens_decoder.items() if id > 2]
    for old, new in zip(unused, HARMONY, strict=False):
        spec = spec.replace(json.dumps(old), json.dumps(new))
    hf = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(spec), eos_token="<|im_end|>")
    hf.chat_template = GPT_OSS
    with running(replace(default_model, tokenizer=TokenizerWrapper(hf))) as served:
        yield served


def play(harmony: Served, text: str, **asked: Any) -> tuple[list[Any], Any]:
    """The deltas and the whole of a reply with the tokens of this text."""
    return play_ids(harmony, encode_rendered(harmony.server.state.loaded.tokenizer, text), **asked)


def play_ids(harmony: Served, ids: tuple[int, ...], **asked: Any) -> tuple[list[Any], Any]:
    played = played_ids(harmony.server.state, ids, **{"messages": HELLO, **asked})
    return played.deltas, played.whole


def joined(deltas: list[Any], field: str) -> str:
    return "".join(delta["delta"].get(field, "") for delta in deltas)


def test_channels_are_fields(harmony: Served) -> None:
    deltas, whole = play(harmony, ANALYSIS + FINAL + "<|return|>")
    assert whole["message"]["content"] == joined(deltas, "content") == "Hello! 🙂"
    assert whole["message"]["reasoning_content"] == joined(deltas, "reasoning_content") == "User says hi. 🙂"
    assert whole["finish_reason"] == deltas[-1]["finish_reason"] == "stop"
    # Word by word, not at the end.
    assert sum("reasoning_content" in delta["delta"] for delta in deltas) > 2
    assert sum(bool(delta["delta"].get("content")) for delta in deltas) >= 2


def test_a_call_ends_the_reply(harmony: Served) -> None:
    deltas, whole = play(harmony, ANALYSIS + CALL + "<|call|>" + FINAL, tools=TOOLS)
    [call] = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x": "ü"}'}
    assert whole["message"]["content"] is None
    assert whole["message"]["reasoning_content"] == "User says hi. 🙂"
    assert whole["finish_reason"] == deltas[-1]["finish_reason"] == "tool_calls"
    first, *pieces = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert (first["index"], first["id"], first["function"]["name"]) == (0, call["id"], "f")
    assert len(pieces) > 1  # as they are written
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]


def test_a_reply_that_runs_out_of_tokens(harmony: Served) -> None:
    num_tokens = len(encode_rendered(harmony.server.state.loaded.tokenizer, CALL))
    _, whole = play(harmony, CALL + "<|call|>", tools=TOOLS, max_tokens=num_tokens)
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "ü"}'}
    assert whole["finish_reason"] == "length"


def test_stop_strings_do_not_reach_over_marks(harmony: Served) -> None:
    _, whole = play(harmony, ANALYSIS + FINAL + "<|return|>", stop=["🙂assistant", "finalHello"])
    assert whole["message"]["content"] == "Hello! 🙂"
    _, whole = play(harmony, ANALYSIS + FINAL + "<|return|>", stop=["llo"])
    assert whole["message"]["content"] == "He"
    assert whole["finish_reason"] == "stop"


def test_half_a_character_does_not_reach_over_marks(harmony: Served) -> None:
    tokenizer = harmony.server.state.loaded.tokenizer
    whole_ids = encode_rendered(tokenizer, "🙂")
    half, other_half = whole_ids[:1], whole_ids[1:]
    before = encode_rendered(tokenizer, "<|channel|>analysis<|message|>Hm ")
    after = encode_rendered(tokenizer, "<|end|><|start|>assistant<|channel|>final<|message|>")
    end = encode_rendered(tokenizer, " Hello!<|return|>")
    _, whole = play_ids(
        harmony, before + half + after + half + encode_rendered(tokenizer, "<|message|>") + other_half + end
    )
    assert whole["message"]["reasoning_content"] == "Hm \ufffd"
    assert "🙂" not in whole["message"]["content"]
    assert whole["message"]["content"].endswith("\ufffd Hello!")


@pytest.mark.parametrize("end", ["<|return|>", "<|call|>"])
def test_what_was_answered_can_be_sent_back(harmony: Served, end: str) -> None:
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    reply = ANALYSIS + preamble + (CALL if end == "<|call|>" else FINAL) + end
    _, whole = play(harmony, reply, tools=TOOLS)
    message = whole["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in message.get("tool_calls", [])]
    messages = [*HELLO, message, *(results or HELLO)]
    answer = harmony.ask("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=1)
    assert answer.status_code == 200, answer.text


def test_marks_from_the_engine(harmony: Served) -> None:
    tokenizer = harmony.server.state.loaded.tokenizer

    def forced(mark: str) -> Any:
        [id] = encode_rendered(tokenizer, mark)
        body = {"messages": HELLO, "max_tokens": 3, "logit_bias": {str(id): 100}, "temperature": 0}
        return harmony.ask("/v1/chat/completions", **body).json()

    ended = forced("<|return|>")
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["message"]["content"] == ""
    assert ended["usage"]["completion_tokens"] == 1
    endless = forced("<|channel|>")
    assert endless["choices"][0]["finish_reason"] == "length"
    assert endless["choices"][0]["message"]["content"] == ""


def test_completions_show_the_reply_as_it_is(harmony: Served) -> None:
    [id] = encode_rendered(harmony.server.state.loaded.tokenizer, "<|channel|>")
    answer = harmony.ask("/v1/completions", prompt="hi", max_tokens=2, logit_bias={str(id): 100}, temperature=0).json()
    assert answer["choices"][0]["text"] == "<|channel|><|channel|>"
