"""POST /v1/chat/completions with the real openai client."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.support.servers import Served

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def test_answer_and_usage(client: openai.OpenAI, served: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=served.name,
        messages=HELLO,
        max_completion_tokens=6,
        temperature=0,
        extra_body={"cache_salt": "nobody was here before"},
    )
    answer = raw.parse()
    assert answer.object == "chat.completion"
    assert answer.model == served.name
    assert answer.choices[0].message.role == "assistant"
    assert "France" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert raw.headers["x-kvstrata-cached-tokens"] == "0"
    assert raw.headers["x-kvstrata-miss"] == "empty"


def test_stream_says_the_same(client: openai.OpenAI, served: Served) -> None:
    whole = client.chat.completions.create(model=served.name, messages=HELLO, max_tokens=6, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=served.name,
            messages=HELLO,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert deltas[0].delta.role == "assistant"
    assert all(choice.delta.role is None for choice in deltas[1:])
    assert [choice.finish_reason for choice in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_the_same_prompt_again_computes_one_token(client: openai.OpenAI, served: Served) -> None:
    def ask() -> tuple[ChatCompletion, Mapping[str, str]]:
        raw = client.chat.completions.with_raw_response.create(
            model=served.name,
            messages=HELLO,
            max_tokens=6,
            temperature=0,
            extra_body={"cache_salt": "said twice"},
        )
        return raw.parse(), raw.headers

    (first, _), (again, headers) = ask(), ask()
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert headers["x-kvstrata-cached-tokens"] == str(again.usage.prompt_tokens - 1)
    assert headers["x-kvstrata-miss"] == "complete"


def test_stream_on_the_wire(served: Served) -> None:
    body = {"model": served.name, "messages": HELLO, "max_tokens": 2, "temperature": 0, "stream": True}
    body["cache_salt"] = "wire"
    with served.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-kvstrata-cached-tokens"] == "0"
        text = "".join(response.iter_text())
    comments = re.findall(r"^:.*\n", text, re.MULTILINE)
    assert comments[0].startswith(": prefill 0/")
    blocks = re.sub(r"^:.*\n", "", text, flags=re.MULTILINE).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_stop_is_not_echoed(client: openai.OpenAI, served: Served) -> None:
    def ask(stop: Any) -> Any:
        return client.chat.completions.create(
            model=served.name, messages=HELLO, max_tokens=8, temperature=0, stop=stop
        ).choices[0]  # fmt: skip

    whole = ask(None).message.content
    word = whole.split()[3]
    stopped = ask(["never there", word])
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == whole[: whole.index(word)]


def test_seed_repeats(client: openai.OpenAI, served: Served) -> None:
    def ask(seed: int) -> str | None:
        return client.chat.completions.create(
            model=served.name, messages=HELLO, max_tokens=4, temperature=2, seed=seed
        ).choices[0].message.content  # fmt: skip

    first = ask(1)
    assert ask(1) == first
    assert ask(2) != first


def test_logprobs(client: openai.OpenAI, served: Served) -> None:
    choice = client.chat.completions.create(
        model=served.name, messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 4
    for token in choice.logprobs.content:
        assert token.bytes is not None
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content


def test_logprobs_without_alternatives(client: openai.OpenAI, served: Served) -> None:
    choice = client.chat.completions.create(
        model=served.name, messages=HELLO, max_tokens=2, temperature=0, logprobs=True
    ).choices[0]
    assert choice.logprobs is not None
    assert [token.top_logprobs for token in choice.logprobs.content or []] == [[], []]


def test_logit_bias_decides(client: openai.OpenAI, served: Served) -> None:
    tokenizer = served.server.state.loaded.tokenizer
    [banana] = tokenizer.encode(" banana", add_special_tokens=False)
    choice = client.chat.completions.create(
        model=served.name, messages=HELLO, max_tokens=2, temperature=0, logit_bias={str(banana): 100}
    ).choices[0]
    assert choice.message.content == " banana banana"


def test_parts_and_developer_are_text_and_system(client: openai.OpenAI, served: Served) -> None:
    def tokens(messages: Any) -> int:
        answer = client.chat.completions.create(model=served.name, messages=messages, max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    plain = [{"role": "system", "content": "Be brief."}, *HELLO]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *HELLO,
    ]
    assert tokens(plain) == tokens(parts)


def test_unknown_fields_and_nulls_are_ignored(served: Served) -> None:
    response = served.ask(
        "/v1/chat/completions", messages=HELLO, max_tokens=1, brand_new={"x": 1}, stop=None, seed=None, user="me"
    )
    assert response.status_code == 200, response.text


def test_sampling_fields_reach_the_engine(served: Served) -> None:
    """top_k = 1 and min_p = 1 are greedy whatever the temperature."""
    bodies: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 1}, {"min_p": 1}, {"top_p": 1e-9}]
    texts = [
        served.ask("/v1/chat/completions", messages=HELLO, max_tokens=3, **{"temperature": 2, **body}).json()
        for body in bodies
    ]
    assert len({text["choices"][0]["message"]["content"] for text in texts}) == 1


@pytest.mark.parametrize("name", ["path", "name"])
def test_model_may_be_called_by_its_path(served: Served, name: str) -> None:
    loaded = served.server.state.loaded
    called = {"path": str(loaded.path), "name": loaded.name}[name]
    response = served.ask("/v1/chat/completions", messages=HELLO, max_tokens=1, model=called)
    assert response.status_code == 200
    assert response.json()["model"] == served.name
