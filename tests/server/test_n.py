"""Several choices of one prompt: it is computed once and held once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers import Served

PROMPT = [3 + place * 7 % 90 for place in range(2000)]


def metric(served: Served, name: str) -> float:
    with served.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def held_tokens(served: Served) -> int:
    with served.http() as http:
        return http.get("/cache/usage").json()["tiers"]["hot"]["tokens"]


def test_a_prompt_is_prefilled_and_held_once(fresh: Served) -> None:
    before = metric(fresh, "kvstrata_prefill_tokens_total")
    asked: dict[str, Any] = {"model": fresh.name, "prompt": PROMPT, "n": 4, "max_tokens": 8, "seed": 7}
    with fresh.openai() as client:
        answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1  # a seed does not make them all the same
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2000
    assert answer.usage.completion_tokens == sum(8 for _ in answer.choices)
    # All but the last token, once; the last one is the first input of each reply.
    computed = metric(fresh, "kvstrata_prefill_tokens_total") - before
    assert 1999 <= computed <= 1999 + 3 * 16, computed
    fresh.wait_idle()
    assert held_tokens(fresh) <= 2000 + 4 * 8


def test_choices_are_what_they_would_be_alone(fresh: Served) -> None:
    asked = {"prompt": PROMPT[:50], "max_tokens": 6}
    together = fresh.ask("/v1/completions", **asked, n=3, seed=11).json()["choices"]
    alone = [fresh.ask("/v1/completions", **asked, seed=11 + index).json()["choices"][0] for index in range(3)]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]


def test_choices_of_several_prompts_stand_in_order(fresh: Served) -> None:
    prompts = [PROMPT[:20], PROMPT[5:40]]
    answer = fresh.ask("/v1/completions", prompt=prompts, n=2, max_tokens=3, temperature=0).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert answer["usage"]["prompt_tokens"] == 20 + 35


def test_choices_stream_with_their_index(served: Served) -> None:
    with served.openai() as client:
        chunks = list(
            client.chat.completions.create(
                model=served.name, messages=[{"role": "user", "content": "Hi"}], n=2, max_tokens=5, stream=True
            )
        )
    indexes = {choice.index for chunk in chunks for choice in chunk.choices}
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert indexes == {0, 1}
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("n", [0, -1, 129, "2", 1.5])
def test_impossible_numbers_are_refused(fresh: Served, n: object) -> None:
    answer = fresh.ask("/v1/completions", prompt=PROMPT[:5], n=n)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
