"""/cache/sessions through the front door: what is listed is what is held, and every key sees its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_cache import LONG, complete, get, is_written, post
from tests.server.test_keys import As
from tests.server.test_ops import scrape
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

MISS = "x-kvstrata-miss"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=["key-a", "key-b"], admin_key=["boss"]) as one:
        yield one


def session(served: Served, id: str) -> dict[str, Any]:
    return get(served, f"/cache/sessions/{id}")


def test_plain_texts_are_one_session_by_their_first_tokens(fresh: Served) -> None:
    complete(fresh, LONG)
    changed = [*LONG[:100], 1, *LONG[101:]]
    response = fresh.ask("/v1/completions", prompt=changed, max_tokens=1)
    assert response.headers[MISS].startswith("diverged; at=100; was=")
    latest = get(fresh, "/cache/sessions?limit=1")["sessions"][0]
    assert (latest["recognised_by"], latest["divergence"]["at"]) == ("first tokens", 100)


def test_two_prompts_of_one_request_are_two_sessions(fresh: Served) -> None:
    before = get(fresh, "/cache/sessions")["total"]
    prompts = [[number] * 70 for number in (11, 12)]
    fresh.ask("/v1/completions", prompt=prompts, max_tokens=1, n=2).raise_for_status()
    listed = get(fresh, "/cache/sessions?limit=2")
    assert listed["total"] == before + 2
    assert [s["prompt_tokens"] for s in listed["sessions"]] == [70, 70]


def test_several_choices_are_one_turn_of_the_first(fresh: Served) -> None:
    fields = {"prompt_cache_key": "choices", "n": 3, "temperature": 1, "seed": 5}
    fresh.ask("/v1/completions", prompt=LONG, max_tokens=4, **fields).raise_for_status()
    found = session(fresh, "choices")
    assert (found["requests"], found["tokens"], found["divergence"]) == (1, 404, None)
    # The answer to several choices says where the prompt diverged, too.
    changed = [*LONG[:100], 1, *LONG[101:]]
    response = fresh.ask("/v1/completions", prompt=changed, max_tokens=4, **fields)
    assert "at=100; was=" in response.headers[MISS]
    found = session(fresh, "choices")
    assert (found["requests"], found["divergence"]["at"], found["divergence"]["request"]) == (2, 100, 2)


def test_a_session_can_be_pinned_and_explained_by_its_id(fresh: Served) -> None:
    complete(fresh, LONG, prompt_cache_key="kept")
    complete(fresh, LONG[::-1], prompt_cache_key="not-kept")
    assert post(fresh, "/cache/pin", session="kept") == {"prompt_tokens": 402, "tokens": 401}
    assert session(fresh, "kept")["pinned"]
    assert not session(fresh, "not-kept")["pinned"]
    said = post(fresh, "/cache/explain", session="kept")
    assert (said["cached_tokens"], said["session"]["id"]) == (401, "kept")
    post(fresh, "/cache/clear", tier="hot")
    assert post(fresh, "/cache/explain", tokens=LONG)["cached_tokens"] == 399
    # Its tokens are forgotten with what was cleared, though these are pinned.
    assert session(fresh, "kept")["tokens"] == 0
    refused = post(fresh, "/cache/unpin", status=404, session="kept")
    assert "not remembered any more" in refused["error"]["message"]
    post(fresh, "/cache/unpin", tokens=LONG)


def test_what_is_not_there_is_said(fresh: Served) -> None:
    with fresh.http() as http:
        answer = http.get("/cache/sessions/nobody")
        assert answer.status_code == 404
        assert "No session 'nobody' is known" in answer.json()["error"]["message"]
        for wrong in ("limit=0", "limit=10001", "limit=x", "before=nan", "before=x"):
            assert http.get(f"/cache/sessions?{wrong}").status_code == 400
    post(fresh, "/cache/pin", status=404, session="nobody")
    both = post(fresh, "/cache/pin", status=400, session="a", tokens=[1])
    assert "tokens and session came together" in both["error"]["message"]


def test_the_list_goes_on_page_by_page(fresh: Served) -> None:
    for number in range(5):
        complete(fresh, [number, number], prompt_cache_key=f"page-{number}")
    first = get(fresh, "/cache/sessions?limit=2")
    assert [s["id"] for s in first["sessions"]] == ["page-4", "page-3"]
    second = get(fresh, f"/cache/sessions?limit=2&before={first['next_before']!r}")
    assert [s["id"] for s in second["sessions"]] == ["page-2", "page-1"]
    rest = get(fresh, "/cache/sessions?limit=10000")
    assert rest["next_before"] is None
    assert len(rest["sessions"]) == rest["total"]


def test_a_key_never_sees_anothers_sessions(locked: Served) -> None:
    a, b, boss = As(locked, "key-a"), As(locked, "key-b"), As(locked, "boss")
    a.complete(LONG, prompt_cache_key="same-name")
    a.complete(LONG[:80], prompt_cache_key="only-a")
    changed = [*LONG[:50], 1, *LONG[51:]]
    seen = b.ask("POST", "/v1/completions", prompt=changed, max_tokens=1, prompt_cache_key="same-name")
    assert "at=" not in seen.headers[MISS]
    b.post("/cache/clear", tier="all")  # forgets nothing of a's
    listed = {name: who.get("/cache/sessions") for name, who in (("a", a), ("b", b), ("boss", boss))}
    assert [s["id"] for s in listed["a"]["sessions"]] == ["only-a", "same-name"]
    assert [s["id"] for s in listed["b"]["sessions"]] == ["same-name"]
    assert [listed[name]["total"] for name in ("a", "b", "boss")] == [2, 1, 3]
    assert (listed["a"]["under"], listed["boss"]["under"]) == ("key", "all")
    assert listed["a"]["sessions"][1]["tokens"] == 402
    of_a = listed["a"]["sessions"][1]["key"]
    assert b.ask("GET", "/cache/sessions/only-a").status_code == 404
    assert b.ask("GET", f"/cache/sessions/{of_a}").status_code == 404
    assert b.ask("POST", "/cache/pin", session="only-a").status_code == 404
    assert boss.ask("GET", "/cache/sessions/same-name").status_code == 400
    assert boss.get(f"/cache/sessions/{of_a}")["held"] == {"hot": 401}
    assert boss.get("/cache/sessions/only-a")["tokens"] == 82
    a.complete(LONG, prompt_cache_key="same-name", cache_salt="apart")
    assert len({s["id"] for s in a.get("/cache/sessions")["sessions"]}) == 3


def test_what_the_disk_has_is_told(tmp_path: Path) -> None:
    with running(tiny_loaded("llama"), disk_cache_dir=tmp_path) as served:
        complete(served, LONG, prompt_cache_key="on-disk")
        assert served.server.state.engine.ask(is_written).result(60)
        assert session(served, "on-disk")["held"] == {"hot": 401, "disk": 401}
        listed = get(served, "/cache/sessions")["sessions"]
        assert listed[0]["held"] == {"hot": 401, "disk": 401}


def test_precision_is_told_by_tokens(fresh: Served) -> None:
    post(fresh, "/cache/requantize", k="planes:8", v="planes:4")
    complete(fresh, LONG, prompt_cache_key="encoded")
    assert session(fresh, "encoded")["precision"] == {"k": {"planes:8": 401}, "v": {"planes:4": 401}}


def test_how_many_are_known_is_a_metric(fresh: Served) -> None:
    complete(fresh, [1, 2, 3], prompt_cache_key="counted")
    assert scrape(fresh)["kvstrata_sessions"] == get(fresh, "/cache/sessions")["total"] >= 1
