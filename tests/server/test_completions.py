"""POST /v1/completions with the real openai client."""

from __future__ import annotations

import json
from dataclasses import replace

import openai
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.support.models import VOCAB, tiny_loaded
from tests.support.servers import Served, running

PROMPT = "The capital of France is"


def test_text_and_ids_are_the_same_prompt(client: openai.OpenAI, served: Served) -> None:
    ids = served.server.state.loaded.tokenizer.encode(PROMPT)
    text = client.completions.create(model=served.name, prompt=PROMPT, max_tokens=4, temperature=0)
    by_ids = client.completions.create(model=served.name, prompt=ids, max_tokens=4, temperature=0)
    assert "Paris" in text.choices[0].text
    assert by_ids.choices[0].text == text.choices[0].text
    assert text.usage is not None
    assert text.usage.prompt_tokens == len(ids)


def test_each_prompt_is_a_choice(client: openai.OpenAI, served: Served) -> None:
    alone = client.completions.create(model=served.name, prompt=PROMPT, max_tokens=3, temperature=0)
    both = client.completions.create(model=served.name, prompt=["1, 2, 3,", PROMPT], max_tokens=3, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[1].text == alone.choices[0].text
    assert both.usage is not None
    assert both.usage.completion_tokens == 6


def test_stream_of_several_prompts(client: openai.OpenAI, served: Served) -> None:
    ids = [[1, 2, 3], [4, 5]]
    whole = client.completions.create(model=served.name, prompt=ids, max_tokens=3, temperature=0)
    texts = {0: "", 1: ""}
    finishes = {}
    for chunk in client.completions.create(model=served.name, prompt=ids, max_tokens=3, temperature=0, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert finishes == {choice.index: choice.finish_reason for choice in whole.choices}


def test_logprobs(client: openai.OpenAI, served: Served) -> None:
    choice = client.completions.create(
        model=served.name, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == choice.text
    assert [len(top) for top in logprobs.top_logprobs or []] == [2, 2, 2]
    assert logprobs.text_offset is not None
    assert [choice.text[start:] for start in logprobs.text_offset][1:] == [
        choice.text[len("".join((logprobs.tokens or [])[:n])) :] for n in (1, 2)
    ]


def test_salt_changes_nothing_visible(client: openai.OpenAI, served: Served) -> None:
    texts = {
        client.completions.create(
            model=served.name, prompt=PROMPT, max_tokens=2, temperature=0, extra_body={"cache_salt": salt}
        ).choices[0].text
        for salt in ("a", "b")
    }  # fmt: skip
    assert len(texts) == 1


def test_characters_that_some_clients_take_for_line_ends() -> None:
    """A model that says nothing else, and a client that splits lines as str.splitlines does."""
    tokenizer = Tokenizer(
        models.WordLevel({f"{i}\u2028\u2029\x85": i for i in range(VOCAB)}, unk_token="0\u2028\u2029\x85")
    )
    tokenizer.decoder = decoders.Fuse()
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    loaded = replace(tiny_loaded("llama"), tokenizer=wrapped)
    with running(loaded) as one, one.http() as http:
        asked = {"model": one.name, "prompt": [1, 2], "max_tokens": 3, "temperature": 0}
        whole = http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
    assert text == whole
    assert text.count("\u2028\u2029\x85") == 3
