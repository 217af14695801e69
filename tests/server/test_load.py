"""Many at once: concurrent streams, a full queue, clients that go away, draining."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.server.conftest import Served
from tests.server.test_ops import scrape

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
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as many:
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


def test_full_queue_is_429(serve: Callable[..., Served]) -> None:
    served = serve(max_running=1, max_waiting=0)
    with served.http() as http:
        running = begin(http, served, max_tokens=200)
        with pytest.raises(openai.RateLimitError) as caught:
            served.openai().completions.create(model=served.name, prompt="a", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert caught.value.code == "queue_full"
        running.close()
    served.wait_idle()
    assert scrape(served)['kvstrata_requests_refused_total{reason="queue_full"}'] == 1


def test_list_of_prompts_that_does_not_fit_leaves_nothing_behind(serve: Callable[..., Served]) -> None:
    served = serve(max_running=1, max_waiting=2, keep_alive_s=0.2)
    with served.http() as http:
        streams = [begin(http, served, max_tokens=4000), begin(http, served, max_tokens=1)]
        assert served.ask("/v1/completions", prompt=["a", "b"], max_tokens=1).status_code == 429
        # There is room for one more, so the first of the two was taken back.
        streams.append(begin(http, served, max_tokens=1))
        for stream in streams:
            stream.close()
    served.wait_idle()


def test_client_that_leaves_a_stream_cancels(served: Served) -> None:
    before = scrape(served).get(CANCELLED, 0.0)
    with served.http() as http:
        response = begin(http, served, max_tokens=4000)
        next(response.iter_raw())
        response.close()
    served.wait_idle()
    assert ended(served)
    assert scrape(served)[CANCELLED] == before + 1


def test_client_that_leaves_while_it_waits_cancels(served: Served) -> None:
    before = scrape(served).get(CANCELLED, 0.0)
    with served.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"model": served.name, "prompt": "Once", "max_tokens": 4000}, timeout=1.0)
    served.wait_idle()
    assert ended(served)
    assert scrape(served)[CANCELLED] == before + 1


def ended(served: Served) -> bool:
    """A request that goes through comes after the cancellation in the engine's queue."""
    served.ask("/v1/completions", prompt="a", max_tokens=1)
    state = served.server.service.engine.state()
    return (state.running, state.waiting, state.kv_bytes) == (0, 0, 0)


def test_silence_is_broken_by_comments(serve: Callable[..., Served]) -> None:
    """A request that waits behind another hears from the server before its turn."""
    served = serve(max_running=1, keep_alive_s=0.2)
    with served.http() as http, served.http() as other:
        running = begin(http, served, max_tokens=4000)
        waiting = begin(other, served, max_tokens=1)
        assert "x-kvstrata-cached-tokens" not in waiting.headers
        assert next(waiting.iter_lines()) == ": waiting"
        running.close()
        assert "data: [DONE]" in list(waiting.iter_lines())


def test_drain_finishes_what_runs_and_refuses_what_comes(serve: Callable[..., Served]) -> None:
    served = serve()
    with served.http() as http, served.http() as other:
        running = begin(http, served, max_tokens=12)
        lines = running.iter_lines()
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


def test_drain_ends_in_time_with_an_error_in_the_stream(serve: Callable[..., Served]) -> None:
    served = serve(drain_timeout_s=0.5)
    with served.http() as http:
        running = begin(http, served, max_tokens=4000)
        served.server.drain()
        events = [line for line in running.iter_lines() if line.startswith("data: ")]
    assert '"error"' in events[-1]
    served.thread.join(30)
    assert not served.thread.is_alive()
