"""Whose cached state is whose: a key sees, changes, pins and clears its own; an admin key everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_cache import LONG, is_written, settle
from tests.server.test_ops import scrape
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

KEYS = ("key-a", "key-b", "boss")
OTHER = LONG[::-1]


class As:
    """A caller with a key, or without."""

    def __init__(self, served: Served, key: str) -> None:
        self._served = served
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        with self._served.http() as http:
            return http.request(method, path, headers=self._headers, json=body or None)

    def get(self, path: str) -> dict[str, Any]:
        return self.ask("GET", path).raise_for_status().json()

    def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = self.ask("POST", path, **body)
        assert response.status_code == status, response.text
        settle(self._served)
        return response.json()

    def complete(self, prompt: list[int], **fields: Any) -> int:
        """Tells how many tokens were cached."""
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        return self.post("/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def cached(self, prompt: list[int], **fields: Any) -> int:
        return self.post("/cache/explain", tokens=prompt, **fields)["cached_tokens"]

    @property
    def hot(self) -> dict[str, Any]:
        return self.get("/cache/usage")["tiers"]["hot"]


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=["key-a", "key-b"], admin_key=["boss"]) as one:
        yield one


@pytest.fixture
def callers(locked: Served) -> tuple[As, As, As]:
    """Two plain keys and an admin's, with nothing stored and everything raw."""
    a, b, boss = (As(locked, key) for key in KEYS)
    boss.post("/cache/requantize", k="raw", v="raw")
    boss.post("/cache/clear", tier="all")
    return a, b, boss


def test_usage_is_of_ones_own(callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    a.complete(LONG)
    a.complete(OTHER, cache_salt="project")
    assert (a.hot["spans"], b.hot["spans"], boss.hot["spans"]) == (2, 0, 2)
    assert a.hot == boss.hot
    of_a, of_b, of_all = (caller.get("/cache/usage") for caller in (a, b, boss))
    assert [usage["under"] for usage in (of_a, of_b, of_all)] == ["key", "key", "all"]
    assert of_b["held"] == {"k": {}, "v": {}}
    assert of_a["held"] == of_all["held"]
    assert of_a["headroom_bytes"] == of_b["headroom_bytes"] == of_all["headroom_bytes"]
    assert b.get("/props")["kv"]["held"] == {"k": {}, "v": {}}
    assert a.get("/props")["kv"]["held"] == of_all["held"]


def test_a_running_request_is_seen_by_its_key_alone(locked: Served, callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    with locked.openai("key-a") as client:
        stream = client.completions.create(model=locked.name, prompt=LONG, max_tokens=3000, stream=True)
        next(stream)
        [sequence] = a.get("/cache/usage")["sequences"]
        assert boss.get("/cache/usage")["sequences"][0]["id"] == sequence["id"]
        assert (b.get("/cache/usage")["sequences"], b.get("/cache/usage")["running_bytes"]) == ([], 0)
        assert a.get("/cache/usage")["running_bytes"] > 0
        change = {"k": "planes:2", "sequence": sequence["id"], "dry_run": True}
        unknown = b.ask("POST", "/cache/requantize", **{**change, "sequence": "none"})
        refused = b.ask("POST", "/cache/requantize", **change)
        assert (refused.status_code, refused.text) == (400, unknown.text.replace("none", sequence["id"]))
        assert a.ask("POST", "/cache/requantize", **change).json()["bytes_before"] > 0
        stream.close()
    locked.wait_idle()


def test_a_key_changes_its_own_and_not_the_target(callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    a.complete(LONG)
    a.complete(OTHER, cache_salt="project")
    b.complete(LONG)
    before = a.hot
    said = b.post("/cache/requantize", k="planes:2", v="planes:2")
    assert (said["under"], said["spans"], "admin key" in said["note"]) == ("key", 1, True)
    assert a.hot == before
    assert b.hot["by_precision"].keys() == {"planes:2"}
    assert boss.get("/cache/usage")["target"] == {"k": "raw", "v": "raw"}
    said = a.post("/cache/requantize", k="planes:4", v="planes:4", salt="project")
    assert said["spans"] == 1
    assert a.hot["by_precision"].keys() == {"raw", "planes:4"}
    a.post("/cache/requantize", k="planes:4", v="planes:4")
    assert a.hot["by_precision"].keys() == {"planes:4"}


def test_a_key_is_told_of_and_stops_its_own_changes(callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    for start in range(6):
        a.complete(LONG[start:])
        b.complete(LONG[start:])
    a.ask("POST", "/cache/requantize", k="planes:4", v="planes:4")
    spans = a.get("/cache/requantize")["spans_total"]
    assert (spans, b.get("/cache/requantize")["spans_total"]) == (a.hot["spans"], 0)
    assert b.ask("DELETE", "/cache/requantize").json()["spans_total"] == 0
    b.post("/cache/requantize", k="planes:8", v="planes:8")
    # One key's change neither stops nor undoes the other's.
    assert [caller.hot["by_precision"].keys() for caller in (a, b)] == [{"planes:4"}, {"planes:8"}]
    assert a.get("/cache/requantize")["is_running"] is False
    assert boss.ask("DELETE", "/cache/requantize").json()["is_running"] is False


def test_an_admin_key_changes_everything_and_the_target(callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    for caller in (a, b, boss):
        caller.complete(LONG)
    said = boss.post("/cache/requantize", k="planes:8", v="planes:8")
    assert (said["under"], said["spans"], said["note"]) == ("all", 3, "")
    assert [caller.hot["by_precision"].keys() for caller in (a, b)] == [{"planes:8"}] * 2
    assert a.get("/cache/usage")["target"] == {"k": "planes:8", "v": "planes:8"}


def test_a_key_clears_its_own_under_every_salt(callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    for extra in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
        a.complete(LONG, **extra)
    b.complete(LONG)
    assert b.post("/cache/clear", tier="all") == {
        "tier": "all",
        "bytes": a.hot["bytes"] // 3,
        "tokens": len(LONG) + 1,
        "bytes_left": 0,
    }
    assert a.post("/cache/clear", salt="one")["tokens"] == len(LONG) + 1
    assert (a.cached(LONG), a.cached(LONG, cache_salt="one")) == (len(LONG) - 1, 0)
    assert a.post("/cache/clear", tier="hot")["tokens"] == 2 * (len(LONG) + 1)
    a.complete(LONG)
    b.complete(LONG)
    assert boss.post("/cache/clear", tier="all")["tokens"] == 2 * (len(LONG) + 1)


def test_explain_tells_nothing_of_anothers_prompts(callers: tuple[As, As, As]) -> None:
    a, b, boss = callers
    a.complete(LONG)
    before = [caller.post("/cache/explain", tokens=LONG) for caller in (b, boss)]
    assert [(said["cached_tokens"], said["ends_because"], said["instead"]) for said in before] == [(0, "empty", [])] * 2
    a.post("/cache/clear", tier="all")
    # What one has evicted or cleared is nothing to the other, and one that clears forgets nothing of the other's.
    assert b.post("/cache/explain", tokens=LONG)["ends_because"] == "empty"


def test_pins_are_ones_own_and_within_the_quota() -> None:
    with running(tiny_loaded("llama", 4), api_key=["key-a", "key-b"], admin_key=["boss"], pin_quota="600KiB") as locked:
        a, b, boss = (As(locked, key) for key in KEYS)
        for caller in (a, b, boss):
            for prompt in (LONG, OTHER):
                caller.complete(prompt)
        assert a.post("/cache/pin", tokens=LONG)["tokens"] == len(LONG)
        usage = a.get("/cache/usage")
        assert (usage["pinned_bytes"], usage["pin_quota_bytes"]) == (usage["tiers"]["hot"]["bytes"] // 2, 600 << 10)
        assert a.post("/cache/pin", tokens=LONG)["tokens"] == len(LONG)  # again: nothing more is pinned
        assert a.post("/cache/pin", tokens=LONG[:50])["tokens"] == 50
        refused = a.post("/cache/pin", 403, tokens=OTHER)["error"]
        assert (refused["code"], "--pin-quota" in refused["message"]) == ("pin_quota_exceeded", True)
        # Each key has its own quota; no key unpins another's, and an admin has none.
        assert b.post("/cache/pin", tokens=OTHER)["tokens"] == len(OTHER)
        b.post("/cache/unpin", tokens=LONG)
        assert [boss.post("/cache/pin", tokens=prompt)["tokens"] for prompt in (LONG, OTHER)] == [400, 400]
        assert boss.get("/cache/usage")["pin_quota_bytes"] is None
        assert boss.post("/cache/clear", tier="all")["tokens"] == 2 * (len(LONG) + 1)
        assert (a.cached(LONG), a.cached(OTHER), b.cached(OTHER)) == (399, 0, 399)
        a.post("/cache/unpin", tokens=LONG)
        assert a.get("/cache/usage")["pinned_bytes"] == 0
        a.complete(OTHER)
        assert a.post("/cache/pin", tokens=OTHER)["tokens"] == len(OTHER)


def test_metrics_count_all_and_show_no_contents(locked: Served, callers: tuple[As, As, As]) -> None:
    a, b, _ = callers
    a.complete(LONG)
    with locked.http() as http:
        assert http.get("/metrics").status_code == 401
    assert b.ask("GET", "/metrics").text.count(f'kvstrata_cache_tokens{{tier="hot"}} {len(LONG) + 1}.0') == 1


def test_without_keys_every_caller_is_an_admin() -> None:
    with running(tiny_loaded("llama"), pin_quota="1KiB") as open_to_all:
        caller = As(open_to_all, "")
        caller.complete(LONG)
        assert caller.post("/cache/pin", tokens=LONG)["tokens"] == len(LONG)
        assert caller.post("/cache/requantize", k="planes:8", v="planes:8")["under"] == "all"
        usage = caller.get("/cache/usage")
        assert (usage["under"], usage["target"]["k"], usage["pin_quota_bytes"]) == ("all", "planes:8", None)
        assert scrape(open_to_all)['kvstrata_cache_spans{tier="hot"}'] == 1


def test_the_disk_knows_whose_its_blocks_are(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"api_key": ["key-a", "key-b"], "admin_key": ["boss"], "disk_cache_dir": tmp_path}
    with running(tiny_loaded("llama"), **flags) as first:
        a, b = As(first, "key-a"), As(first, "key-b")
        a.complete(LONG)
        a.complete(LONG, cache_salt="project")
        b.complete(LONG)
    # After a restart no list of salts is left: the blocks themselves tell.
    with running(tiny_loaded("llama"), **flags) as again:
        a, b, boss = (As(again, key) for key in KEYS)
        assert again.server.state.engine.ask(is_written).result(60)
        tokens = [caller.get("/cache/usage")["tiers"]["disk"]["tokens"] for caller in (a, b, boss)]
        assert tokens == [2 * (len(LONG) + 1), len(LONG) + 1, 3 * (len(LONG) + 1)]
        assert a.get("/cache/usage")["tiers"]["disk"]["by_precision"].keys() == {"raw"}
        assert a.post("/cache/clear", tier="disk")["tokens"] == 2 * (len(LONG) + 1)
        assert a.cached(LONG) == a.cached(LONG, cache_salt="project") == 0
        assert b.cached(LONG) == len(LONG) - 1
