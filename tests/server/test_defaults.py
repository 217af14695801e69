"""What a request may leave out: the model's name, and sampling that the model's makers recommend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.engine.request import Sampling
from kvstrata.models.generation_config import SamplingDefaults
from kvstrata.server.openai.endpoints import read_chat, read_completion
from tests.support.models import VOCAB, tiny_loaded
from tests.support.servers import Served, running

RECOMMENDED = SamplingDefaults(temperature=0.0, top_p=0.9, top_k=10**6, min_p=0.05, repetition_penalty=1.1)
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def recommended() -> Iterator[Served]:
    with running(replace(tiny_loaded("llama"), sampling=RECOMMENDED)) as one:
        yield one


def sampling_of(served: Served, body: str) -> Sampling:
    [request] = read_completion(served.server.state, body.encode(), {"type": "http"})[1].requests
    return request.sampling


def props(served: Served) -> dict[str, Any]:
    with served.http() as http:
        return http.get("/props").raise_for_status().json()["sampling"]


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
def test_without_a_model_the_one_that_is_served_answers(recommended: Served, model: dict[str, Any]) -> None:
    with recommended.http() as http:
        answer = http.post("/v1/completions", json={**model, "prompt": PROMPT, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == recommended.name


def test_a_chat_without_a_model(served: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}'
    assert read_chat(served.server.state, body, {"type": "http"})[1].requests


def test_another_models_name_is_still_refused(recommended: Served) -> None:
    assert recommended.ask("/v1/completions", prompt=PROMPT, model="gpt-5").status_code == 404


def test_a_request_gets_what_the_model_recommends_unless_it_says_otherwise(recommended: Served) -> None:
    assert sampling_of(recommended, '{"prompt": "a"}') == Sampling(
        temperature=0.0, top_p=0.9, top_k=VOCAB, min_p=0.05, repetition_penalty=1.1
    )
    asked = '{"prompt": "a", "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}'
    assert sampling_of(recommended, asked) == Sampling()
    # Greedy by default: two replies without a seed are the same.
    texts = {recommended.ask("/v1/completions", prompt=PROMPT, max_tokens=12).text for _ in range(2)}
    assert len({text.partition('"choices"')[2] for text in texts}) == 1


def test_props_show_them(recommended: Served, served: Served) -> None:
    said = props(recommended)
    assert (said["temperature"], said["top_p"], said["min_p"]) == (0.0, 0.9, 0.05)
    assert said["from_model"] == ["min_p", "repetition_penalty", "temperature", "top_k", "top_p"]
    assert props(served) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "from_model": [],
    }


def test_a_setting_turns_them_off() -> None:
    with running(replace(tiny_loaded("llama"), sampling=RECOMMENDED), generation_config="none") as plain:
        assert sampling_of(plain, '{"prompt": "a"}') == Sampling()
        assert props(plain)["from_model"] == []
