"""Answers of many tokens: each token is taken once, and no JSON of a whole answer is made on the event loop."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvstrata.engine.request import TokenLogprob
from kvstrata.server.chat import writer
from kvstrata.server.openai.response import ChatChoice, CompletionChoice
from kvstrata.server.responses import endpoints
from kvstrata.text.reply_events import ReplyText, ToolCallArguments, ToolCallStart
from tests.support.models import tiny_tokenizer
from tests.support.servers import Served


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return tiny_tokenizer()


@pytest.mark.parametrize("kind", [ChatChoice, CompletionChoice])
def test_logprobs_grow_in_place(tokenizer: TokenizerWrapper, kind: Any) -> None:
    """So each token is copied once, however many follow."""
    choice = kind(0, tokenizer)
    key = "content" if kind is ChatChoice else "tokens"
    chunks, held = [], []
    for number in range(5):
        chunks += choice.add([ReplyText("a")], [TokenLogprob(number, -0.5, ((number, -0.5),))])
        held.append(choice.whole()["logprobs"][key])
    assert all(each is held[0] for each in held)
    assert len(held[0]) == 5
    assert [len(chunk["logprobs"][key]) for chunk in chunks] == [1] * 5


def test_arguments_of_calls_are_joined_once(tokenizer: TokenizerWrapper) -> None:
    choice = ChatChoice(0, tokenizer)
    pieces = ['{"a": "', *["b" * 50] * 4, '"}']
    deltas = choice.add([ToolCallStart("call_1", "look"), *map(ToolCallArguments, pieces)], [])
    sent = [delta["delta"]["tool_calls"][0]["function"].get("arguments", "") for delta in deltas]
    assert sent == ["", *pieces]
    assert choice.whole()["message"].get("tool_calls", [])[0]["function"]["arguments"] == "".join(pieces)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Everything that becomes JSON or is read from it, with the thread that does it."""
    done: list[tuple[Any, int]] = []
    write, read = writer.json_bytes, endpoints.from_json

    def writing(answer: Any) -> bytes:
        done.append((answer, threading.get_ident()))
        return write(answer)

    def reading(data: bytes) -> Any:
        done.append((data, threading.get_ident()))
        return read(data)

    monkeypatch.setattr(writer, "json_bytes", writing)
    monkeypatch.setattr(endpoints, "from_json", reading)
    return done


def test_whole_answers_are_written_off_the_event_loop(served: Served, written: list[tuple[Any, int]]) -> None:
    loop = served.thread.ident
    chat = [{"role": "user", "content": "Hi"}]
    tokens = served.ask("/tokenize", messages=chat).json()["tokens"]
    assert served.ask("/detokenize", tokens=tokens).json()["prompt"]
    assert served.ask("/v1/chat/completions", messages=chat, max_tokens=2).status_code == 200
    response = served.ask("/v1/responses", input="Hi", max_output_tokens=2)
    with served.http() as http:
        assert http.get(f"/v1/responses/{response.json()['id']}").content == response.content
        items = http.get(f"/v1/responses/{response.json()['id']}/input_items").json()
    assert [item["role"] for item in items["data"]] == ["user"]
    assert len(written) == 6
    assert loop not in {thread for _, thread in written}


def test_the_last_events_of_a_stream_are_written_off_the_event_loop(
    served: Served, written: list[tuple[Any, int]]
) -> None:
    """In OpenAI's Responses they have the whole answer, several times."""
    streamed = served.ask("/v1/responses", input="Hi", max_output_tokens=2, stream=True).text
    assert "response.incomplete" in streamed or "response.completed" in streamed
    long = ("response.output_text.done", "response.output_item.done", "response.incomplete", "response.completed")
    threads = {thread for event, thread in written if isinstance(event, dict) and event.get("type") in long}
    assert threads
    assert served.thread.ident not in threads
