"""Two replicas on a real Ray: routed by prefix, killed in the middle, made fewer; nothing that was written is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.fleet.ray_fleet import FLEET_PAUSE_S, RayFleet, cached, kill, ray_fleet
from tests.models.conftest import write_model
from tests.support.eventually import eventually
from tests.support.models import tiny_config, tiny_module

# Ray takes half a minute to start, and its own time limits are short for a busy machine: make test-all runs these.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SYSTEM = {"role": "system", "content": "Answer as a careful engineer would, in short sentences. " * 4}
BLOCK = 256  # tokens of a shared tier's block


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    folder = tmp_path_factory.mktemp("ray")
    model = write_model(folder / "tiny", tiny_module("llama"), tiny_config("llama"))
    shared = folder / "shared"
    shared.mkdir(mode=0o700)
    with ray_fleet() as fleet:
        fleet.deploy(
            2,
            model=str(model),
            max_num_seqs="8",
            memory_limit="600MiB",
            disk_cache_dir=str(folder / "disk"),
            remote_cache=f"file://{shared}",
            remote_precision="raw",
        )
        yield fleet


def turn(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Conversation {number}: " + f"what is to be said about {number * 7919}? " * 8}


def converse(fleet: RayFleet, number: int, turns: int) -> list[tuple[str, int, int]]:
    """Replica, prompt tokens and those that were cached, by turn."""
    messages, told = [SYSTEM, turn(number)], []
    for _ in range(turns):
        answer = fleet.chat(messages, max_tokens=16)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        told.append((answer.headers["x-kvstrata-replica"], usage["prompt_tokens"], cached(answer)))
        assert len(answer.headers.get_list("x-request-id")) == 1
        reply = answer.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "And then?"}]
    return told


def test_conversations_stay_where_they_are_cached_and_both_replicas_work(fleet: RayFleet) -> None:
    told: dict[int, list[tuple[str, int, int]]] = {}

    def run(number: int) -> None:
        told[number] = converse(fleet, number, 3)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {turns[0][0] for turns in told.values()} <= set(fleet.replicas())
    for turns in told.values():
        assert len({replica for replica, _, _ in turns}) == 1
        for (_, before, _), (_, _, found) in pairwise(turns):
            assert found >= before, "all of the last prompt was cached"


def test_the_fleet_is_seen_and_changed_as_one(fleet: RayFleet) -> None:
    names = set(fleet.replicas())
    usage = fleet.http.get("/cache/usage").json()
    hot = [replica["tiers"]["hot"]["tokens"] for replica in usage["replicas"].values()]
    assert usage["tiers"]["hot"]["tokens"] == sum(hot) > 0
    metrics = fleet.http.get("/metrics").text
    for name in names:
        assert f'vllm:num_requests_running{{replica="{name}"}}' in metrics
    assert fleet.http.get("/health").json() == {"status": "ok"}
    assert fleet.http.get("/cache/sessions").json()["total"] >= 4
    told = fleet.http.get("/cache/history").json()
    assert told["requests"]
    assert {request["replica"] for request in told["requests"]} <= names
    assert any(slot["tiers"] for slot in told["slots"])
    changed = fleet.http.post("/cache/requantize", json={"k": "planes:8", "v": "planes:8"}).json()
    assert set(changed["replicas"]) == names
    cleared = fleet.http.post("/cache/clear", json={"tier": "hot"}).json()
    assert cleared["tokens"] == sum(one["tokens"] for one in cleared["replicas"].values()) > 0
    fleet.http.post("/cache/requantize", json={"k": "raw", "v": "raw"})


def test_every_api_and_a_response_that_goes_on(fleet: RayFleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    made = [client.responses.create(model="tiny", input=f"Question {n}", max_output_tokens=8) for n in range(3)]
    for first in made:
        again = client.responses.create(model="tiny", input="More", previous_response_id=first.id, max_output_tokens=8)
        assert client.responses.retrieve(again.id).previous_response_id == first.id
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
    )
    assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    assert fleet.http.post("/v1/messages", json=body).json()["type"] == "message"
    wrong = fleet.http.post("/v1/chat/completions", json={"messages": []})
    assert wrong.status_code == 400


def test_a_replica_that_is_killed_costs_no_more_than_its_streams(fleet: RayFleet) -> None:
    told = converse(fleet, 77, 2)
    victim = told[0][0]
    wait_until_shared(fleet, victim)
    lines: list[str] = []
    other_lines: list[str] = []

    def read(into: list[str], number: int) -> None:
        body = {
            "messages": [SYSTEM, turn(number)],
            "stream": True,
            "max_tokens": 400,
            "temperature": 1,
            "ignore_eos": True,
        }
        with fleet.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            into.append(answer.headers["x-kvstrata-replica"])
            into.extend(line for line in answer.iter_lines() if line)

    reading = [threading.Thread(target=read, args=(lines, 77)), threading.Thread(target=read, args=(other_lines, 78))]
    for thread in reading:
        thread.start()
    eventually(lambda: len(lines) >= 5, 30)
    kill(lines[0])
    for thread in reading:
        thread.join()
    assert '"error"' in lines[-1]
    assert "ended" in lines[-1]
    assert other_lines[0] == lines[0] or other_lines[-1] == "data: [DONE]"
    # What was cached there is found by whichever replica answers: in the shared tier, or on the disk of the killed one,
    # whose folder its successor takes.
    fleet.wait_for(2, without=lines[0])
    # (A tiny model computes faster than it loads, so the question is what could be loaded.)
    explained = fleet.http.post("/cache/explain", json={"messages": [SYSTEM, turn(77)]}).json()
    assert explained["prompt_tokens"] - sum(explained["by_tier"].values()) <= BLOCK
    assert explained["by_tier"]["disk"] + explained["by_tier"]["remote"] > 0
    assert fleet.chat([SYSTEM, turn(77)], max_tokens=4).status_code == 200


def stream(fleet: RayFleet, messages: list[dict[str, Any]], into: list[str], num_tokens: int) -> None:
    """The replica's name, then every line."""
    # No token ends it: tiny models end at any moment.
    body = {"messages": messages, "stream": True, "max_tokens": num_tokens, "temperature": 1, "logit_bias": {"0": -100}}
    with httpx.stream("POST", f"{fleet.url}/v1/chat/completions", json=body, timeout=120) as answer:
        into.append(answer.headers["x-kvstrata-replica"])
        into.extend(line for line in answer.iter_lines() if line)


def wait_until_shared(fleet: RayFleet, name: str) -> None:
    def is_shared() -> bool:
        remote = fleet.replicas()[name]["remote"]
        return remote["written_tokens"] > 0 and not remote["queue_bytes"]

    eventually(is_shared, 30, pause_s=FLEET_PAUSE_S)


def test_a_stream_goes_on_while_there_come_to_be_fewer_replicas(fleet: RayFleet) -> None:
    streams: list[list[str]] = [[] for _ in range(4)]

    def read(into: list[str], number: int) -> None:
        stream(fleet, [turn(number)], into, 1500)

    threads = [threading.Thread(target=read, args=(into, 200 + n)) for n, into in enumerate(streams)]
    for thread in threads:
        thread.start()
    eventually(lambda: all(streams), 60)
    assert len({into[0] for into in streams}) == 2
    left = fleet.deploy(1)
    for thread in threads:
        thread.join()
    assert [into[-1] for into in streams] == ["data: [DONE]"] * 4
    # The one that went wrote what it held, and the next one finds it.
    gone = next(into[0] for into in streams if into[0] not in left)
    found = fleet.deploy(2)
    (new,) = found.keys() - {into[0] for into in streams}
    assert gone not in found
    assert found[new]["tiers"]["disk"]["tokens"] > 0
