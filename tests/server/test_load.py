"""Many at once: concurrent streams, a full queue, clients that go away, draining."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Iterator

import httpx
import mlx.core as mx
import openai
import pytest

from kvstrata.engine.executor import EngineCore
from tests.server.test_ops import scrape
from tests.support.models import VOCAB, tiny_loaded
from tests.support.raw_http import connected, head
from tests.support.servers import Served, running

CANCELLED = 'kvstrata_requests_total{outcome="cancelled"}'


async def stream_text(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    text = ""
    stream = await client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0, stream=True)
    async for chunk in stream:
        text += chunk.choices[0].text
    return text


def test_sixteen_streams_at_once(served: Served, client: openai.OpenAI) -> None:
    prompts = [f"{number} is a number. The number after it is" for number in range(16)]

    async def all_at_once() -> list[str]:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        base = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, http_client=http) as many:
            return await asyncio.gather(*(stream_text(many, served.name, prompt) for prompt in prompts))

    together = asyncio.run(all_at_once())
    for index in (0, 9):
        alone = client.completions.create(model=served.name, prompt=prompts[index], max_tokens=4, temperature=0)
        assert together[index] == alone.choices[0].text


def begin(http: httpx.Client, served: Served, *, max_tokens: int) -> httpx.Response:
    """A stream that has begun."""
    body = {"model": served.name, "prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True, "seed": 7}
    response = http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)
    assert response.status_code == 200
    return response


@pytest.fixture(scope="module")
def narrow() -> Iterator[Served]:
    """One runs, two wait, and who waits is told so soon."""
    with running(tiny_loaded("llama"), max_num_seqs=1, options={"engine": {"max_waiting": 2}}, keep_alive_s=0.2) as one:
        yield one


def test_full_queue_is_429_and_leaves_nothing_behind(narrow: Served) -> None:
    with narrow.http() as http:
        streams = [begin(http, narrow, max_tokens=4000) for _ in range(2)]
        with narrow.openai() as client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=narrow.name, prompt=["a", "b"], max_tokens=4000)
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert caught.value.code == "queue_full"
        for stream in streams:
            stream.close()
    narrow.wait_idle()
    assert scrape(narrow)['kvstrata_requests_refused_total{reason="queue_full"}'] == 1
    # Of the list of two the first had found a place in the queue; it must not run on for a client that got no answer.
    assert ended(narrow)


def test_a_full_queue_is_told_before_the_body_is_read(narrow: Served) -> None:
    with narrow.http() as http:
        streams = [begin(http, narrow, max_tokens=4000) for _ in range(3)]
        with connected(narrow) as line:
            line.sendall(head("/v1/completions", Content_Type="application/json", Content_Length=30_000_000))
            assert line.recv(1 << 12).startswith(b"HTTP/1.1 429")
        for stream in streams:
            stream.close()
    narrow.wait_idle()
    assert ended(narrow)


def test_more_prompts_than_the_queue_holds_is_400(narrow: Served) -> None:
    assert narrow.ask("/v1/completions", prompt=["a", "b", "c"], max_tokens=1).status_code == 400


def test_silence_is_broken_by_comments(narrow: Served) -> None:
    """A request that waits behind another hears from the server before its turn."""
    with narrow.http() as http:
        assert ended(narrow)
        first, second = begin(http, narrow, max_tokens=4000), begin(http, narrow, max_tokens=1)
        assert "x-kvstrata-cached-tokens" not in second.headers
        lines = second.iter_lines()
        assert next(lines) == ": waiting"
        first.close()
        assert "data: [DONE]" in list(lines)


def test_client_that_leaves_a_stream_cancels(endless: Served) -> None:
    before = scrape(endless).get(CANCELLED, 0.0)
    with endless.http() as http:
        response = begin(http, endless, max_tokens=4000)
        next(response.iter_raw())
        response.close()
    endless.wait_idle()
    assert ended(endless)
    assert scrape(endless)[CANCELLED] == before + 1


def test_client_that_leaves_while_it_waits_cancels(endless: Served) -> None:
    before = scrape(endless).get(CANCELLED, 0.0)
    with endless.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"model": endless.name, "prompt": "Once", "max_tokens": 4000}, timeout=1.0)
    endless.wait_idle()
    assert ended(endless)
    assert scrape(endless)[CANCELLED] == before + 1


def ended(served: Served) -> bool:
    """Whether nothing is left in the engine. A request that goes through comes after the cancellations in its queue."""
    # A cancelled request holds its place until the engine's next step, so the first try may be told to come again.
    with served.openai() as client:
        client.with_options(max_retries=5).completions.create(model=served.name, prompt="a", max_tokens=1)
    return served.server.state.engine.idle()


def test_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    # How busy the machine is must not matter.
    with (
        running(tiny_loaded("llama"), drain_timeout_s=300) as served,
        served.http() as http,
        served.http() as other,
    ):
        stream = begin(http, served, max_tokens=400)
        lines = stream.iter_lines()
        next(lines)
        assert other.get("/health").status_code == 200
        served.server.drain()
        refused = other.get("/health")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        response = other.post("/v1/completions", json={"model": served.name, "prompt": "a", "max_tokens": 1})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        assert "data: [DONE]" in list(lines)
        served.thread.join(30)
        assert not served.thread.is_alive()


def test_drain_ends_in_time_with_an_error_in_the_stream() -> None:
    with running(tiny_loaded("llama"), drain_timeout_s=0.5) as served, served.http() as http:
        stream = begin(http, served, max_tokens=8000)
        served.server.drain()
        events = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert '"error"' in events[-1]
        served.thread.join(30)
        assert not served.thread.is_alive()


async def leave_early(url: str, model: str, rng: random.Random) -> None:
    """One client: a prompt of some length, a stream that it drops after some lines, or before the first."""
    body = {"model": model, "prompt": [rng.randrange(VOCAB) for _ in range(rng.randint(1, 400))], "max_tokens": 2000}
    num_lines, patience_s = rng.randrange(20), rng.uniform(0.02, 1)
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(patience_s),
            httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client,
            client.stream("POST", "/v1/completions", json={**body, "stream": num_lines > 5}) as response,
        ):
            lines = response.aiter_lines()
            for _ in range(num_lines):
                await anext(lines, None)


# A client that is cut off while it connects leaves its socket to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_clients_that_hang_up_leave_nothing_behind() -> None:
    rng = random.Random(11)

    async def in_waves(served: Served) -> None:
        for _ in range(3):
            await asyncio.gather(*(leave_early(served.url, served.name, rng) for _ in range(20)))

    with running(tiny_loaded("qwen3_next")) as served:
        served.ask("/v1/completions", prompt=[1, 2, 3], max_tokens=2).raise_for_status()
        served.wait_idle()
        before = settled_bytes(served)
        asyncio.run(in_waves(served))
        served.wait_idle()
        assert settled_bytes(served) <= before * 1.01
        assert served.server.state.engine.idle()
        cancelled = scrape(served)[CANCELLED]
    # The others left before their request was read.
    assert cancelled > 15
    gc.collect()


def settled_bytes(served: Served) -> int:
    """MLX's active memory once nothing is stored, asked for on the engine's thread after all that came before."""

    def measure(core: EngineCore) -> int:
        while core.pacer.has_work:
            core.pacer.run_slice(1.0)
        core.prefix_cache.evictor.clear()
        mx.clear_cache()
        return mx.get_active_memory()

    return served.server.state.engine.ask(measure).result(60)
