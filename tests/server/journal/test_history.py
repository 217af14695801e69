"""/cache/history: what the server keeps of the last hour, and who may see what of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvstrata.engine.cache_api import CacheApi
from kvstrata.server.history import SETTLED_AFTER, HistorySampler
from kvstrata.server.request_log import MAX_REQUESTS
from tests.server.journal.conftest import Lines
from tests.server.test_cache import LONG, complete, get, post
from tests.server.test_keys import As
from tests.support.eventually import eventually
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=["key-a", "key-b"], admin_key=["boss"]) as one:
        yield one


def history(served: Served, query: str = "") -> dict[str, Any]:
    served.wait_idle()
    return get(served, f"/cache/history{query}")


def look(sampler: HistorySampler, served: Served) -> None:
    """As at the end of a slot, without waiting for it."""
    loop = served.server._loop
    assert loop is not None
    slot = served.server.state.request_log.history.current
    asyncio.run_coroutine_threadsafe(sampler.sample_slot(slot), loop).result(60)


def encoded_spans(served: Served) -> int:
    usage = served.server.state.engine.ask(lambda core: CacheApi(core).usage()).result(60)
    return usage.counters.get("encoded_spans", 0)


def test_a_request_is_there_with_why_it_missed(fresh: Served) -> None:
    complete(fresh, LONG)
    changed = [*LONG[:100], 1, *LONG[101:]]
    answered = fresh.ask("/v1/completions", prompt=changed, max_tokens=3, ignore_eos=True)
    told = history(fresh)
    before, last = told["requests"][-2:]
    assert before["divergence"] is None
    assert last["id"] == answered.headers["x-request-id"]
    assert (last["path"], last["status"], last["error"]) == ("/v1/completions", 200, None)
    assert (last["prompt_tokens"], last["cached_tokens"]) == (len(LONG), 100)
    assert last["completion_tokens"] == answered.json()["usage"]["completion_tokens"]
    assert (last["miss"], last["divergence"]["at"], last["divergence"]["where"]) == ("diverged", 100, "prompt")
    assert last["meaning"] == "The cached prompt differs from here on."
    assert last["divergence"]["was"] != last["divergence"]["now"]
    assert 0 < last["first_token_s"] <= last["seconds"]
    assert before["time"] < last["time"] < told["now"]
    # One click from there to why: the session that it names can be explained.
    assert post(fresh, "/cache/explain", session=last["session"])["prompt_tokens"] >= len(LONG)


def test_counting_tokens_is_no_recent_request_unless_it_fails(served: Served) -> None:
    body = {"model": served.name, "messages": [{"role": "user", "content": "hello"}]}
    answered = served.ask("/v1/messages/count_tokens", **body)
    assert answered.status_code == 200
    failed = served.ask("/v1/messages/count_tokens", **{**body, "messages": 3})
    assert failed.status_code == 400
    told = {request["id"]: request["status"] for request in history(served)["requests"]}
    assert answered.headers["request-id"] not in told
    assert told[failed.headers["request-id"]] == 400


def sampler_of(served: Served) -> HistorySampler:
    state = served.server.state
    return HistorySampler(state.engine, state.metrics, state.request_log.history)


def test_slots_count_and_sample(fresh: Served) -> None:
    sampler = sampler_of(fresh)
    look(sampler, fresh)
    before = sums(history(fresh))
    complete(fresh, LONG)
    complete(fresh, LONG)
    fresh.ask("/v1/completions", prompt=[5] * 10, max_tokens=0)
    fresh.wait_idle()
    look(sampler, fresh)
    told = history(fresh)
    after = sums(told)
    assert {name: after[name] - before[name] for name in after} == {
        "requests": 3, "failed": 1, "cancelled": 0, "prompt_tokens": 2 * len(LONG), "cached_tokens": len(LONG) - 1,
    }  # fmt: skip
    last = [slot for slot in told["slots"] if slot["requests"]][-1]
    assert 0 < last["first_token_p50_s"] <= last["first_token_p95_s"]
    sampled = [slot for slot in told["slots"] if slot["tiers"]][-1]
    usage = get(fresh, "/cache/usage")
    assert sampled["tiers"]["hot"]["by_precision"] == usage["tiers"]["hot"]["by_precision"]
    assert sampled["budget_bytes"] == usage["budget_bytes"]
    assert (sampled["running"], sampled["waiting"]) == (0, 0)
    assert sampled["tokens_per_s"] > 0


def sums(told: dict[str, Any]) -> dict[str, int]:
    names = ("requests", "failed", "cancelled", "prompt_tokens", "cached_tokens")
    return {name: sum(slot[name] for slot in told["slots"]) for name in names}


def test_events_have_a_label_and_a_count(fresh: Served) -> None:
    sampler = sampler_of(fresh)
    look(sampler, fresh)
    complete(fresh, LONG)
    post(fresh, "/cache/requantize", k="planes:8", v="planes:8")
    eventually(lambda: encoded_spans(fresh), 60)  # between requests, a layer at a time
    look(sampler, fresh)
    told = [(event["kind"], event["text"]) for event in history(fresh)["events"]]
    assert ("target", "Precision of new KV: K planes:8, V planes:8") in told
    # The server looks by itself too, and may have seen most of it before.
    encoded = [text for kind, text in told if kind == "encoded"]
    assert any(re.fullmatch(r"Spans quantized: 1 \(planes:8, [\d.]+ KiB freed\)", text) for text in encoded)
    assert history(fresh, f"?since={history(fresh)['now']}")["events"] == []


def test_since_leaves_out_what_is_older(fresh: Served) -> None:
    complete(fresh, LONG)
    told = history(fresh)
    assert told["requests"]
    complete(fresh, LONG)
    newer = history(fresh, f"?since={told['now']}")
    assert len(newer["requests"]) == 1
    assert len(newer["slots"]) <= 2
    with fresh.http() as http:
        for wrong in ("x", "nan", "inf", "1e999"):
            assert http.get(f"/cache/history?since={wrong}").status_code == 400


def test_an_idle_engine_is_left_asleep(fresh: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    engine = type(fresh.server.state.engine)
    ask = engine.ask_cache
    sampler = sampler_of(fresh)
    look(sampler, fresh)
    monkeypatch.setattr(engine, "ask_cache", lambda self, question: asked.append(1) or ask(self, question))
    for _ in range(3 * SETTLED_AFTER):
        look(sampler, fresh)
    assert len(asked) <= SETTLED_AFTER
    complete(fresh, LONG)
    fresh.wait_idle()
    asked.clear()
    look(sampler, fresh)
    assert asked


def test_every_key_sees_its_own_requests(locked: Served) -> None:
    a, b, boss, nobody = (As(locked, key) for key in ("key-a", "key-b", "boss", ""))
    for caller, token in ((a, 7), (b, 8), (boss, 9)):
        caller.complete([token] * 80)
        caller.complete([*[token] * 70, 3, 4, 5])  # parts from the one before, in a text that is the caller's alone
    assert nobody.ask("POST", "/v1/completions", prompt=[1], max_tokens=1).status_code == 401
    locked.wait_idle()
    assert nobody.ask("GET", "/cache/history").status_code == 401
    own = {name: who.get("/cache/history") for name, who in (("a", a), ("b", b), ("boss", boss))}
    ids = {name: {request["id"] for request in told["requests"]} for name, told in own.items()}
    assert (len(ids["a"]), len(ids["b"]), len(ids["boss"])) == (2, 2, 7)
    assert not ids["a"] & ids["b"]
    assert ids["a"] | ids["b"] < ids["boss"]
    assert (own["a"]["under"], own["boss"]["under"]) == ("key", "all")
    assert [request["status"] for request in own["boss"]["requests"]].count(401) == 1
    assert own["a"]["requests"][-1]["divergence"]["at"] == 70
    # Sums are over all keys, as in /metrics.
    assert own["a"]["slots"][-1]["requests"] == own["boss"]["slots"][-1]["requests"]


def test_memory_is_bounded(fresh: Served, lines: Lines) -> None:
    with fresh.http() as http:
        for _ in range(MAX_REQUESTS + 5):
            assert http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).is_error
    for _ in range(MAX_REQUESTS + 5):
        lines.next()
    assert len(history(fresh)["requests"]) == MAX_REQUESTS
