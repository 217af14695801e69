"""Everything that a client can get wrong: a clear error in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.servers import Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def goes_on(served: Served) -> Iterator[None]:
    yield
    assert served.ask(TEXT, prompt="Hi", max_tokens=1).status_code == 200


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hello"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages.0.content"),
    (CHAT, {"messages": HELLO, "n": 0}, "n"),
    (CHAT, {"messages": HELLO, "n": 0}, "n"),
    (CHAT, {"messages": HELLO, "temperature": 2.1}, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": -1}, "temperature"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HELLO, "top_p": 0}, "top_p"),
    (CHAT, {"messages": HELLO, "top_p": 1.5}, "top_p"),
    (CHAT, {"messages": HELLO, "top_k": -2}, "top_k"),
    (CHAT, {"messages": HELLO, "min_p": 7}, "min_p"),
    (CHAT, {"messages": HELLO, "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": HELLO, "presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"messages": HELLO, "frequency_penalty": -3}, "frequency_penalty"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": "10"}, "max_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"messages": HELLO, "seed": 2**70}, "seed"),
    (CHAT, {"messages": HELLO, "stop": ""}, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["a", ""]}, "stop.1"),
    (CHAT, {"messages": HELLO, "stop": list("abcde") * 13}, "stop"),
    (CHAT, {"messages": HELLO, "stop": "a" * 1025}, "stop"),
    (CHAT, {"messages": HELLO, "stop": ["a", "b" * 1025]}, "stop.1"),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"99999999": 1}}, "logit_bias"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 101}}, "logit_bias.5"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "stream": "yes"}, "stream"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "yaml"}}, "response_format"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "functions": []}, "functions"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ["a", ""]}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [10**9]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": ["a"] * 300}, "prompt"),
    (TEXT, {"prompt": "a", "echo": True}, "echo"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "a", "logprobs": 6}, "logprobs"),
]  # fmt: skip


def test_every_wrong_field_is_named(served: Served) -> None:
    with served.http() as http:
        for path, body, param in WRONG:
            error = error_of(http.post(path, json={"model": served.name, **body}), 400)
            assert (error["param"] or "").startswith(param), (body, error)
            assert error["type"] == "invalid_request_error"


def test_a_stop_string_may_not_be_longer_than_1024_characters(served: Served) -> None:
    assert served.ask(TEXT, prompt="a", max_tokens=1, stop=["a" * 1024] * 4).status_code == 200
    message = error_of(served.ask(TEXT, prompt="a", max_tokens=1, stop=["a" * 1025]), 400)["message"]
    assert "at most 1024 characters" in message
    assert len(message) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": "m", "messages": ["\xff\xfe"]}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "text", "utf8", "nan", "infinity", "surrogate", "deep"],
)
def test_not_json(served: Served, body: bytes) -> None:
    with served.http() as http:
        response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"5", b"[]", b"null", b'"x"'])
def test_json_that_is_no_object(served: Served, body: bytes) -> None:
    with served.http() as http:
        error_of(http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)


def test_infinite_number_in_disguise(served: Served) -> None:
    body = b'{"model": "%b", "prompt": "a", "temperature": 1e999}' % served.name.encode()
    with served.http() as http:
        response = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "temperature"


def test_content_type_must_be_json(served: Served) -> None:
    with served.http() as http:
        error = error_of(http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 400)
    assert "application/json" in error["message"]


def test_unknown_model(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "Hello"}])
    assert caught.value.code == "model_not_found"
    assert served.name in caught.value.message


def test_too_long_a_prompt_tells_both_numbers(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=served.name, prompt=[5] * 9000)
    assert caught.value.code == "context_length_exceeded"
    assert "9000" in caught.value.message
    assert "8192" in caught.value.message


def test_too_many_tokens_asked_for_are_cut_to_the_context(served: Served) -> None:
    asked = {"model": served.name, "prompt": [5] * 10, "max_tokens": 8183, "stream": True}
    with served.http() as http, http.stream("POST", TEXT, json=asked) as answer:
        assert answer.status_code == 200
        assert answer.headers["x-kvstrata-max-tokens"] == "8182"
    with served.http() as http, http.stream("POST", TEXT, json={**asked, "max_tokens": 8182}) as answer:
        assert "x-kvstrata-max-tokens" not in answer.headers
    served.wait_idle()


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/images/generations", "/v1/images/variations", "/v1/audio/translations"]
)
def test_what_this_server_has_not_is_said(served: Served, path: str) -> None:
    error = error_of(served.ask(path, input="a"), 400)
    assert error["code"] == "not_supported"
    assert path in error["message"]


def test_ten_thousand_tools(served: Served) -> None:
    """Each is part of the prompt, so they do not fit; and the server goes on."""
    tools = [{"type": "function", "function": {"name": f"tool{number}"}} for number in range(10_000)]
    for choice in ("auto", "required"):
        error = error_of(served.ask(CHAT, messages=HELLO, tools=tools, tool_choice=choice, max_tokens=1), 400)
        assert error["code"] == "context_length_exceeded" or error["param"] == "tools"
    assert served.ask(CHAT, messages=HELLO, tools=tools, tool_choice="none", max_tokens=1).status_code == 200


def test_a_text_that_cannot_fit_is_not_tokenized(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty megabytes take seconds and a gigabyte of memory to tokenize; that they are too many is plain before."""
    long = "word " * 6_000_000
    bodies: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": long}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
    ]
    with monkeypatch.context() as patched:
        patched.setattr("kvstrata.text.tokenizer._encode", None)
        for path, body in bodies:
            error = error_of(served.ask(path, **body), 400)
            assert error["code"] == "context_length_exceeded"
            assert "8192" in error["message"]


def test_whatever_makes_a_prompt_too_long_is_found_before_it_is_tokenized(served: Served) -> None:
    state = served.server.state
    long = "word " * (state.limits.longest_token_chars * state.limits.context_tokens // 5 + 1)
    tools = [{"type": "function", "function": {"name": "f", "description": long}}]
    spoken = [*HELLO, {"role": "assistant", "content": long}, *HELLO]
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
    called = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "b"},
    ]
    for path, body in (
        (CHAT, {"messages": HELLO, "tools": tools}),
        (CHAT, {"messages": spoken}),
        (CHAT, {"messages": called, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": HELLO, "tools": tools}),
        ("/cache/explain", {"messages": spoken}),
    ):
        error = error_of(served.ask(path, **body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"], error  # the number of tokens was never found out


def test_body_of_50_mb(served: Served) -> None:
    error = error_of(served.ask(CHAT, messages=[{"role": "user", "content": "x" * 50_000_000}]), 413)
    assert "Send less" in error["message"]


def test_body_of_50_mb_without_a_length(served: Served) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 1_000_000

    with served.http() as http:
        response = http.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
    error_of(response, 413)


def test_unknown_path_and_method(served: Served) -> None:
    with served.http() as http:
        error_of(http.get("/v1/nothing"), 404)
        error_of(http.get("/v1/models/other"), 404)
        error_of(http.get(CHAT), 405)


def test_long_names_are_not_echoed_whole(served: Served) -> None:
    error = error_of(served.ask(TEXT, prompt="a", model="m" * 100_000), 404)
    assert len(error["message"]) < 1000
