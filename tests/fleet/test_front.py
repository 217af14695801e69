"""A front before three real servers: requests go where their prefix is, and what is everyone's reaches all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from kvstrata.models.load import LoadedModel, load
from tests.fleet.local import LocalFleet, front_of, local_fleet, serving
from tests.models.conftest import write_model
from tests.support.browser import HOW_TO_GET, browsing, find_browser
from tests.support.models import tiny_config, tiny_module

KEYS = {"api_key": ["first-key", "second-key"], "admin_key": ["admin-key"]}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("fleet") / "tiny"
    return load(str(write_model(folder, tiny_module("llama"), tiny_config("llama"))))


@pytest.fixture(scope="module")
def fleet(loaded: LoadedModel) -> Iterator[LocalFleet]:
    with local_fleet(loaded, 3, **KEYS) as made:
        yield made


@pytest.fixture(scope="module")
def front(fleet: LocalFleet) -> Iterator[httpx.Client]:
    with serving(front_of(fleet, **KEYS)) as http:
        http.headers["authorization"] = "Bearer first-key"
        yield http


@pytest.fixture(autouse=True)
def _all_well(fleet: LocalFleet) -> Iterator[None]:
    yield
    for one in fleet.ones.values():
        one.is_lost, one.lost_after = False, None


def run_cli(*arguments: str) -> str:
    env = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", "from kvstrata.cli import main; main()", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def question(number: int) -> str:
    return f"Number {number}. " + f"What is to be said of {number * 7919}? " * 12


def chat(front: httpx.Client, *contents: str, **more: Any) -> httpx.Response:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return front.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **more})


def replica(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvstrata-replica"]


def reply(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_goes_on_where_it_began_and_others_go_round(front: httpx.Client) -> None:
    firsts = [chat(front, question(n)) for n in range(3)]
    assert len({replica(first) for first in firsts}) == 3
    for n in (2, 0, 1):
        again = chat(front, question(n), reply(firsts[n]), "Go on.")
        assert replica(again) == replica(firsts[n])
        assert again.headers["x-kvstrata-route"].startswith("prefix; cached=")
        assert cached(again) >= firsts[n].json()["usage"]["prompt_tokens"]


def test_every_api_is_routed_by_the_same_keys(front: httpx.Client) -> None:
    home = replica(chat(front, question(50)))
    turns = [{"role": "user", "content": question(50)}]
    messages = front.post("/v1/messages", json={"model": "tiny", "max_tokens": 4, "messages": turns})
    assert replica(messages) == home
    assert replica(front.post("/v1/responses", json={"input": question(50), "max_output_tokens": 4})) == home
    assert replica(front.post("/v1/completions", json={"prompt": question(50), "max_tokens": 4})) == home
    assert replica(front.post("/cache/explain", json={"messages": turns})) == home


def test_keys_share_nothing_and_a_wrong_one_gets_no_further(front: httpx.Client) -> None:
    first = chat(front, question(60))
    other = front.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": question(60)}], "max_tokens": 8},
        headers={"authorization": "Bearer second-key"},
    )
    assert cached(other) == 0
    assert other.headers["x-kvstrata-route"] == "load; cached=0"
    assert replica(other) != replica(first)
    refused = front.get("/cache/usage", headers={"authorization": "Bearer wrong"})
    assert refused.status_code == 401


def test_a_response_is_found_by_the_replica_that_keeps_it(front: httpx.Client) -> None:
    made = [front.post("/v1/responses", json={"input": f"Q{n}", "max_output_tokens": 4}) for n in range(4)]
    for one in made:
        kept = front.get(f"/v1/responses/{one.json()['id']}")
        assert replica(kept) == replica(one)
        body = {"input": "more", "previous_response_id": one.json()["id"], "max_output_tokens": 4, "stream": True}
        with front.stream("POST", "/v1/responses", json=body) as on:
            assert on.headers["x-kvstrata-replica"] == replica(one)
            events = [json.loads(line[6:]) for line in on.iter_lines() if line.startswith("data: ")]
        later = events[-1]["response"]["id"]
        assert replica(front.get(f"/v1/responses/{later}")) == replica(one)


def test_what_is_held_is_the_sum(front: httpx.Client, fleet: LocalFleet) -> None:
    admin = {"authorization": "Bearer admin-key"}
    usage = front.get("/cache/usage", headers=admin).json()
    assert set(usage["replicas"]) == set(fleet.ones)
    assert usage["tiers"]["hot"]["tokens"] == sum(one["tiers"]["hot"]["tokens"] for one in usage["replicas"].values())
    assert usage["budget_bytes"] == sum(one["budget_bytes"] for one in usage["replicas"].values())
    assert usage["target"] == {"k": "raw", "v": "raw"}
    metrics = front.get("/metrics", headers=admin).text
    families = [line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert all(f'vllm:num_requests_running{{replica="{name}"}}' in metrics for name in fleet.ones)
    props = front.get("/props", headers=admin).json()
    assert set(props["replicas"]) == set(fleet.ones)
    assert props["state"]["kv_budget_bytes"] == sum(
        one["state"]["kv_budget_bytes"] for one in props["replicas"].values()
    )


def test_top_and_the_page_show_each_replica(front: httpx.Client, fleet: LocalFleet) -> None:
    shown = run_cli("top", "--once", "--url", str(front.base_url), "--api-key", "admin-key")
    for name in fleet.ones:
        assert re.search(rf"{name} +0 +0 +[\d,]+ ", shown), shown
    assert re.search(r"chat +\d+ +\d+ +\d+ % ", shown), shown
    page = front.get("/").text
    assert 'id="replicas"' in page
    assert front.get("/dashboard/running.js").status_code == 200


@pytest.mark.parametrize(("number", "name"), [(70, "seventy"), (71, "claude:agent")])
def test_sessions_of_all_are_listed_and_one_is_found(front: httpx.Client, number: int, name: str) -> None:
    for other in (80, 81):
        chat(front, question(other))
    chat(front, question(number), prompt_cache_key=name)
    path = f"/cache/sessions/{quote(name)}"
    listed = front.get("/cache/sessions", params={"limit": "2"}).json()
    assert len(listed["sessions"]) == 2
    assert listed["total"] > 2
    assert listed["sessions"][0]["id"] == name
    rest = front.get("/cache/sessions", params={"before": listed["next_before"], "limit": "1000"}).json()
    assert len(rest["sessions"]) == listed["total"] - 2
    assert front.get(path).json()["id"] == name
    assert front.get("/cache/sessions/nowhere").status_code == 404
    explained = front.post("/cache/explain", json={"session": name})
    assert explained.json()["session"]["id"] == name
    exported = front.get(f"{path}/export")
    assert exported.status_code == 200
    assert len(exported.content) > 1000


def test_the_past_of_all_is_one(front: httpx.Client) -> None:
    before = front.get("/cache/history").json()
    answers = [chat(front, question(n)) for n in range(90, 93)]
    told = front.get("/cache/history", params={"since": before["now"]}).json()
    homes = {answer.headers["x-request-id"]: replica(answer) for answer in answers}
    assert {each["id"]: each["replica"] for each in told["requests"]} == homes
    assert [each["time"] for each in told["requests"]] == sorted(each["time"] for each in told["requests"])
    times = [slot["time"] for slot in told["slots"]]
    assert times == sorted(set(times))
    assert sum(slot["requests"] for slot in told["slots"]) >= len(answers)
    assert max(slot["first_token_p95_s"] or 0 for slot in told["slots"]) > 0


def test_conversations_of_all_are_told_and_one_is_dropped(front: httpx.Client) -> None:
    answers = [chat(front, question(n), prompt_cache_key=f"talk-{n}") for n in range(100, 103)]
    told = front.get("/cache/conversations").json()["conversations"]
    found = {row["session"]: row for row in told}
    for n, answer in zip(range(100, 103), answers, strict=True):
        assert found[f"talk-{n}"]["replica"] == replica(answer)
    path = f"/cache/conversations/{found['talk-101']['id']}"
    assert front.post(f"{path}/pin", json={}).json()["tokens"] > 0
    assert front.delete(path).json()["kept_because"] == "pinned"
    assert front.post(f"{path}/unpin", json={}).status_code == 200
    assert front.delete(path).json()["tokens"] > 0
    assert front.delete(path).status_code == 404
    assert "talk-101" not in {row["session"] for row in front.get("/cache/conversations").json()["conversations"]}


def test_the_page_of_a_fleet_shows_them(front: httpx.Client, tmp_path: Path) -> None:
    program = find_browser()
    if program is None:
        pytest.skip(HOW_TO_GET)
    home = replica(chat(front, question(110), prompt_cache_key="talk-110"))
    with browsing(program, tmp_path) as browser:
        page = browser.page()
        page.open(str(front.base_url))
        page.wait("document.getElementById('key').open")
        page.type("#key input", "first-key")
        page.press("Enter")
        page.wait("document.querySelectorAll('#replicas tr').length === 3")
        page.wait(f"""document.querySelector('.conversation:has(.id[title="talk-110"]) em').innerText === '{home}'""")
        page.wait("document.querySelector('tr.request')")
        page.click("tr.request td")
        page.wait(f"document.querySelector('.details:not([hidden])').innerText.includes('{home}')")
        # The page asked before it had the key.
        assert [each for each in page.complaints if "401" not in each] == []


def test_a_change_reaches_all_of_them_and_a_failure_is_told(front: httpx.Client, fleet: LocalFleet) -> None:
    admin = {"authorization": "Bearer admin-key"}
    done = front.post("/cache/requantize", json={"k": "planes:8", "v": "planes:8"}, headers=admin)
    assert set(done.json()["replicas"]) == set(fleet.ones)
    assert front.get("/cache/usage", headers=admin).json()["target"] == {"k": "planes:8", "v": "planes:8"}
    fleet.ones["r1"].is_lost = True
    partly = front.post("/cache/requantize", json={"k": "raw", "v": "raw"}, headers=admin)
    assert partly.status_code == 502
    assert {name: one["status"] for name, one in partly.json()["replicas"].items()} == {"r0": 200, "r1": 0, "r2": 200}
    fleet.ones["r1"].is_lost = False
    assert front.get("/cache/usage", headers=admin).json()["target"] == {"k": "mixed", "v": "mixed"}
    front.post("/cache/requantize", json={"k": "raw", "v": "raw"}, headers=admin).raise_for_status()
    refused = front.post("/cache/requantize", json={"k": "nothing"}, headers=admin)
    assert refused.status_code == 400
    cleared = front.post("/cache/clear", json={"tier": "all"}, headers=admin).json()
    assert cleared["tokens"] == sum(one["tokens"] for one in cleared["replicas"].values()) > 0


def test_another_replica_answers_for_one_that_is_lost_before_its_first_byte(
    front: httpx.Client, fleet: LocalFleet
) -> None:
    home = replica(chat(front, question(80)))
    for lost_after in (0, 1):  # before its headers, and before its first byte
        fleet.ones[home].lost_after = lost_after
        assert replica(chat(front, question(80))) != home
    for one in fleet.ones.values():
        one.is_lost = True
    gone = chat(front, question(80))
    assert gone.status_code == 503
    assert "again" in gone.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 32}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 32}),
    ],
)
def test_a_stream_that_is_lost_ends_with_an_error(
    front: httpx.Client, fleet: LocalFleet, path: str, body: dict[str, Any]
) -> None:
    for one in fleet.ones.values():
        one.lost_after = 2  # its headers and its first piece came
    with front.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    error = json.loads(lines[-1][6:])["error"]
    assert "Send the request again" in error["message"]


def test_bad_bodies_are_refused_as_a_server_refuses_them(front: httpx.Client) -> None:
    assert front.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    assert front.post("/v1/chat/completions", content=b"{").status_code == 400
    assert front.get("/nowhere").status_code == 404
    large = front.post("/v1/chat/completions", content=b"x" * (64 << 20), headers={"content-type": "application/json"})
    assert large.status_code == 413
