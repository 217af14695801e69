"""What a subscriber knows from events alone is what the server holds, whatever was asked of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstrata.engine.executor import EngineCore
from kvstrata.server.state import ServerState
from tests.events.subscriber import BLOCK_TOKENS, Subscriber, blocks_of, subscribed
from tests.support.models import VOCAB, tiny_loaded
from tests.support.servers import Served, running

ADDRESS = "tcp://127.0.0.1:0"
NUM_PARTS = 10


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("disk")
    flags: dict[str, Any] = {
        "hot_cache_size": "512KiB",
        "disk_cache_dir": folder,
        "options": {"disk": {"reserve_bytes": 0}},
    }
    with running(tiny_loaded("llama"), kv_events=ADDRESS, **flags) as one:
        yield one


@pytest.fixture
def subscriber(served: Served) -> Iterator[Subscriber]:
    publisher = state_of(served).publisher
    assert publisher is not None
    with subscribed(publisher.publish_url, publisher.replay_url) as one:
        yield one


def state_of(served: Served) -> ServerState:
    return served.server.state


def usage(served: Served) -> Any:
    with served.http() as http:
        return http.get("/cache/usage").raise_for_status().json()


def agree(served: Served, subscriber: Subscriber) -> None:
    """What was told is what is held, and that is what the server says that it holds."""

    def look(core: EngineCore) -> tuple[dict[int, tuple[int, ...]], int]:
        return blocks_of(core), core.prefix_cache.table.tree.num_tokens

    def is_told() -> bool:
        held, num_tokens = state_of(served).engine.ask(look).result(60)
        if held != subscriber.blocks:
            return False
        return usage(served)["tiers"]["hot"]["tokens"] == num_tokens

    subscriber.wait_until(is_told)


def ask(served: Served, http: httpx.Client, prompt: list[int], max_tokens: int = 4, **fields: Any) -> httpx.Response:
    body = {"model": served.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
    return http.post("/v1/completions", json=body)


class Talks:
    """Requests that go on from earlier ones, part from them, or begin anew."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prompts = [self.ids(40) for _ in range(8)]

    def next(self) -> tuple[list[int], dict[str, Any]]:
        chance = self._random
        place = chance.randrange(len(self._prompts))
        prompt = self._prompts[place]
        if chance.random() < 0.15 or len(prompt) > 120:
            prompt = prompt[: chance.randrange(30)]
        prompt = prompt + self.ids(chance.randrange(1, 25))
        self._prompts[place] = prompt
        salt = chance.choice([{}, {}, {"cache_salt": "one"}, {"cache_salt": "two"}])
        return prompt, {"max_tokens": chance.randrange(1, 4), **salt}

    def ids(self, length: int) -> list[int]:
        return self._random.choices(range(5, VOCAB - 5), k=length)


@pytest.mark.parametrize("num_requests", [400, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_requests(served: Served, subscriber: Subscriber, num_requests: int) -> None:
    talks = Talks(1)
    engine = state_of(served).engine
    for part in range(NUM_PARTS):
        with served.http() as http, ThreadPoolExecutor(8) as pool:
            asked = [talks.next() for _ in range(num_requests // NUM_PARTS)]
            answers = list(pool.map(lambda one: ask(served, http, one[0], **one[1]), asked))
            assert {answer.status_code for answer in answers} == {200}
            if part == 2:
                http.post("/cache/requantize", json={"k": "planes:4", "v": "planes:4"}).raise_for_status()
            if part == 4:
                http.post("/cache/clear", json={"tier": "hot", "salt": "one"}).raise_for_status()
            if part == 6:
                # Nothing in memory: what is asked now comes back from the disk.
                http.post("/cache/clear", json={"tier": "hot"}).raise_for_status()
            if part == 8:
                engine.ask(fail_next_step).result(60)
                assert ask(served, http, talks.ids(40)).status_code == 500
        agree(served, subscriber)
    assert subscriber.sequences == list(range(len(subscriber.sequences)))
    assert subscriber.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert len(subscriber.blocks) > 20
    counters = usage(served)["counters"]
    assert counters["evicted_tokens"] > 1000
    assert counters["promoted_tokens"] > 0


def fail_next_step(core: EngineCore) -> None:
    def fails() -> None:
        raise RuntimeError("a step that fails on purpose")

    core.executor.step = fails


def test_one_who_comes_late_asks_for_what_it_missed(served: Served, subscriber: Subscriber) -> None:
    with served.http() as http:
        for seed in (2, 3):
            ask(served, http, Talks(seed).ids(100)).raise_for_status()
    numbers = subscriber.ask_missed(0)
    assert numbers == list(range(len(numbers)))
    agree(served, subscriber)
    with served.http() as http:
        ask(served, http, Talks(4).ids(100)).raise_for_status()
    agree(served, subscriber)
    assert subscriber.sequences == list(range(len(subscriber.sequences)))


def test_metrics_and_props_tell_of_events_and_blocks(served: Served, subscriber: Subscriber) -> None:
    with served.http() as http:
        ask(served, http, Talks(5).ids(100)).raise_for_status()
        agree_or_ask(served, subscriber)
        props = http.get("/props").json()
        lines = http.get("/metrics").text.splitlines()
    publisher = state_of(served).publisher
    assert publisher is not None
    assert props["kv_events"] == {
        "publish": publisher.publish_url, "replay": publisher.replay_url, "topic": "", "block_tokens": BLOCK_TOKENS,
    }  # fmt: skip
    stored = next(line for line in lines if line.startswith('kvstrata_kv_events_published_total{event="BlockStored"}'))
    assert float(stored.split()[1]) >= 1
    assert "kvstrata_kv_events_lost_total 0.0" in lines
    (blocks,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    num_blocks = props["kv_budget_bytes"] // (BLOCK_TOKENS * props["kv_bytes_per_token"])
    assert f'num_gpu_blocks="{num_blocks}"' in blocks
    assert 'block_size="16"' in blocks
    assert {line.split()[0] for line in lines} >= {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    }  # fmt: skip


def agree_or_ask(served: Served, subscriber: Subscriber) -> None:
    subscriber.ask_missed(0)
    agree(served, subscriber)


def test_the_end_of_a_server_is_told_under_its_topic() -> None:
    with running(tiny_loaded("llama"), kv_events=ADDRESS, kv_events_topic="kv@here:8000@tiny") as served:
        publisher = state_of(served).publisher
        assert publisher is not None
        one = Subscriber(publisher.publish_url, publisher.replay_url, "kv@")
        with served.http() as http:
            ask(served, http, Talks(6).ids(100)).raise_for_status()
        one.ask_missed(0)
        agree(served, one)
        with served.http() as http:
            ask(served, http, Talks(7).ids(100)).raise_for_status()
        agree(served, one)
        assert one.blocks
    one.wait_until(lambda: not one.blocks)
    one.close()
    assert one.topics == {"kv@here:8000@tiny"}
