"""What clients see of the prefix store, through a real server and the real openai client."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from kvstrata.config import load
from kvstrata.errors import ConfigError
from kvstrata.platform.device import Device
from kvstrata.server.build import build_server
from tests.server.test_ops import scrape
from tests.support.models import tiny_loaded
from tests.support.servers import Served

GIB = 1 << 30
CITIES = ("Vilnius", "Porto", "Graz", "Bergen", "Split", "Cork", "Ghent", "Tartu")


def long_text(num_sentences: int) -> str:
    return " ".join(
        f"In the year {1500 + 7 * i} the people of {CITIES[i % 8]} built {3 + i} bridges." for i in range(num_sentences)
    )


def first_token_s(client: openai.OpenAI, model: str, prompt: str, salt: str) -> tuple[float, Any]:
    """Until the first text comes, and the usage."""
    began_s = time.perf_counter()
    first_s, usage = 0.0, None
    stream = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=2,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt},
        timeout=600,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].text and not first_s:
            first_s = time.perf_counter() - began_s
        usage = chunk.usage or usage
    return first_s, usage


# The larger, the clearer: it takes 13 s, and the smaller one shows the same.
@pytest.mark.parametrize(
    ("num_sentences", "num_tokens", "times"), [(35, 600, 10), pytest.param(115, 2000, 20, marks=pytest.mark.slow)]
)
def test_a_long_prompt_is_answered_at_once_the_second_time(
    client: openai.OpenAI, served: Served, num_sentences: int, num_tokens: int, times: int
) -> None:
    prompt, salt = long_text(num_sentences), f"of {num_tokens} tokens"
    cold_s, cold = first_token_s(client, served.name, prompt, salt)
    warm_s, warm = first_token_s(client, served.name, prompt, salt)
    assert cold.prompt_tokens >= num_tokens
    assert cold.prompt_tokens_details.cached_tokens == 0
    assert warm.prompt_tokens_details.cached_tokens == warm.prompt_tokens - 1
    assert cold_s >= times * warm_s


def test_cached_tokens_and_headers(client: openai.OpenAI, served: Served) -> None:
    ask: dict[str, Any] = {"model": served.name, "max_tokens": 2, "temperature": 0}
    ask["extra_body"] = {"cache_salt": "headers"}
    messages: list[Any] = [{"role": "user", "content": "Name three rivers of Portugal."}]
    seen = []
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(messages=messages, **ask)
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        assert raw.headers["x-kvstrata-cached-tokens"] == str(cached)
        seen.append((cached, usage.prompt_tokens, raw.headers.get("x-kvstrata-miss")))
    assert seen[0][0] == 0
    assert seen[0][2] == "empty"
    assert seen[1][0] == seen[1][1] - 1
    other = client.chat.completions.create(messages=messages, **{**ask, "extra_body": {"cache_salt": "another"}})
    assert other.usage is not None
    assert other.usage.prompt_tokens_details is not None
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_who_goes_away_in_the_middle_of_prefill_leaves_its_prefix(serve: Callable[..., Served]) -> None:
    slow = serve(keep_alive_s=0.02, options={"engine": {"prefill_chunk_tokens": 32}})
    prompt = long_text(20)
    body = {"model": slow.name, "prompt": prompt, "max_tokens": 4, "stream": True}
    done = total = 0
    with slow.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            told = re.fullmatch(r": prefill (\d+)/(\d+)", line)
            if told and int(told[1]) >= 32:
                done, total = int(told[1]), int(told[2])
                break
    assert 32 <= done < total
    slow.wait_idle()
    computed = int(scrape(slow)["kvstrata_prefill_tokens_total"])
    assert done <= computed < total - 1
    with slow.openai() as client:
        again = client.completions.create(model=slow.name, prompt=prompt, max_tokens=1)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == computed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"hot_cache_size": "0"}, "--hot-cache-size 0B is not possible"),
        ({"hot_cache_size": "64GiB"}, "this machine has 8GiB"),
        ({"hot_cache_size": "20 percents"}, r"--hot-cache-size .*'percents' is unknown"),
        ({"hot_cache_size": "120%"}, "at most 100%"),
        ({"cache_type_k": "plains:8"}, "plains:8"),
        ({"cache_type_v": "planes:5"}, "planes has 8, 4 or 2 bits, not 5"),
        ({"kv_cache_bits": 7}, "--kv-cache-bits"),
        ({"cache_type_k": "affine:8:g7"}, "groups of 32, 64 or 128, not 7"),
        ({"kv_cache_min_quantize_tokens": -1}, "--kv-cache-min-quantize-tokens"),
        ({"cache_type_k": "affine:8"}, "affine"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_the_start(flags: dict[str, Any], said: str) -> None:
    """The last one: this model's heads are smaller than any group."""
    with pytest.raises(ConfigError, match=said):
        build_server(load(flags=flags), tiny_loaded("llama"), Device("cpu", "x", 8 * GIB, 2, 8 * GIB))
