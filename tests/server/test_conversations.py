"""/cache/conversations through the front door: what is held of each, who sees it, and what pinning and dropping do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstrata.engine.executor import EngineCore
from tests.server.test_cache import LONG, complete, get, is_written, post, settle, wait_done
from tests.server.test_keys import As
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

FIRST, SECOND = [*LONG, 7, 8], [*LONG[:250], 3, 4, 5, 6]


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=["key-a", "key-b"], admin_key=["boss"]) as one:
        yield one


def rows(served: Served) -> list[dict[str, Any]]:
    return get(served, "/cache/conversations")["conversations"]


def drop(served: Served, id: str, query: str = "") -> dict[str, Any]:
    with served.http() as http:
        answer = http.delete(f"/cache/conversations/{id}{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_in(row: dict[str, Any], tier: str) -> int:
    return sum(part["tokens"] for part in row["parts"] if part["tier"] == tier)


def test_what_is_shared_is_told_once(fresh: Served) -> None:
    assert rows(fresh) == []
    complete(fresh, FIRST, prompt_cache_key="first")
    complete(fresh, SECOND, prompt_cache_key="second")
    first, second = rows(fresh)
    assert (first["session"], first["starts_at"], first["above"]) == ("first", 0, None)
    assert (second["session"], second["starts_at"], second["above"]) == ("second", 250, first["id"])
    assert (first["tokens"], second["tokens"]) == (len(FIRST) + 1, len(SECOND) + 1)
    hot = get(fresh, "/cache/usage")["tiers"]["hot"]
    assert sum(tokens_in(row, "hot") for row in (first, second)) == hot["tokens"]
    assert abs(sum(part["bytes"] for row in (first, second) for part in row["parts"]) - hot["bytes"]) < 8
    assert {part["k"] for row in (first, second) for part in row["parts"]} == {"raw"}
    # Used again, the first is the last: it is told below the other, which has what they share then. It does not take up
    # its reply, so that is an end of its own.
    complete(fresh, [*FIRST, 9], prompt_cache_key="first")
    told = [(row["session"], row["starts_at"]) for row in rows(fresh)]
    assert told == [("second", 0), ("first", 250), ("first", len(FIRST))]


def test_an_idle_conversation_that_shares_a_prefix_with_a_running_one_is_not_running(fresh: Served) -> None:
    complete(fresh, FIRST, prompt_cache_key="idle")
    with fresh.openai() as client:
        stream = client.completions.create(model=fresh.name, prompt=SECOND, max_tokens=3000, stream=True)
        next(stream)
        is_running = {row["session"] == "idle": row["running"] for row in rows(fresh)}
        stream.close()
    assert is_running == {True: False, False: True}
    fresh.wait_idle()


def test_parts_are_told_in_their_precision(fresh: Served) -> None:
    complete(fresh, FIRST)
    post(fresh, "/cache/requantize", k="planes:8", v="planes:4")
    wait_done(fresh)
    post(fresh, "/cache/requantize", k="raw", v="raw")  # of what is to come: nothing brings bits back
    complete(fresh, LONG[::-1])
    told = [(part["tokens"], part["k"], part["v"]) for row in rows(fresh) for part in row["parts"]]
    assert told == [(len(FIRST) + 1, "planes:8", "planes:4"), (len(LONG) + 1, "raw", "raw")]


def test_a_running_one_is_told(fresh: Served) -> None:
    with fresh.openai() as client:
        stream = client.completions.create(model=fresh.name, prompt=LONG, max_tokens=3000, stream=True)
        next(stream)
        (row,) = rows(fresh)
        assert row["running"]
        assert drop(fresh, row["id"])["kept_because"] == "running" or rows(fresh)[0]["id"] != row["id"]
        stream.close()
    fresh.wait_idle()


def test_a_dry_run_drops_nothing_and_a_drop_what_is_nobody_elses(fresh: Served) -> None:
    complete(fresh, FIRST)
    complete(fresh, SECOND)
    before = get(fresh, "/cache/usage")["tiers"]["hot"]
    second = rows(fresh)[1]
    said = drop(fresh, second["id"], "?dry_run=true")
    assert (said["tokens"], said["kept_because"]) == (second["tokens"] - 250, "")
    assert get(fresh, "/cache/usage")["tiers"]["hot"] == before
    assert drop(fresh, second["id"]) == {**said, "dry_run": False}
    after = get(fresh, "/cache/usage")["tiers"]["hot"]
    assert before["tokens"] - after["tokens"] == said["tokens"]
    assert abs(before["bytes"] - after["bytes"] - said["bytes"]) < 4096  # buffers end at round sizes
    assert post(fresh, "/cache/explain", tokens=FIRST)["ends_because"] == "complete"
    gone = post(fresh, "/cache/explain", tokens=SECOND)
    assert (gone["cached_tokens"], gone["ends_because"]) == (250, "diverged")  # nothing had to make room
    (first,) = rows(fresh)
    assert drop(fresh, first["id"])["tokens"] == len(FIRST) + 1
    assert get(fresh, "/cache/usage")["tiers"]["hot"]["tokens"] == 0
    with fresh.http() as http:
        answer = http.delete(f"/cache/conversations/{first['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "conversation_not_found")
        assert http.delete(f"/cache/conversations/{first['id']}?dry_run=perhaps").status_code == 400


def test_a_pinned_one_is_kept(fresh: Served) -> None:
    complete(fresh, FIRST)
    id = rows(fresh)[0]["id"]
    assert post(fresh, f"/cache/conversations/{id}/pin")["tokens"] == len(FIRST) + 1
    (row,) = rows(fresh)
    assert row["pinned"]
    assert all(part["pinned"] for part in row["parts"])
    assert drop(fresh, id) == {
        "id": id, "dry_run": False, "tokens": 0, "bytes": 0, "disk_tokens": 0, "disk_bytes": 0,
        "kept_because": "pinned",
    }  # fmt: skip
    post(fresh, "/cache/clear", tier="all")
    assert len(rows(fresh)) == 1
    post(fresh, f"/cache/conversations/{id}/unpin")
    assert not rows(fresh)[0]["pinned"]
    with fresh.http() as http:  # as a page of another site could send it
        assert http.post(f"/cache/conversations/{id}/pin", content=b"x").status_code == 400


def test_every_key_sees_and_drops_its_own(locked: Served) -> None:
    a, b, boss = (As(locked, key) for key in ("key-a", "key-b", "boss"))
    a.complete(FIRST)
    b.complete(FIRST)
    lists = [who.get("/cache/conversations") for who in (a, b, boss)]
    assert [told["under"] for told in lists] == ["key", "key", "all"]
    ids = [{row["id"] for row in told["conversations"]} for told in lists]
    assert (len(ids[0]), len(ids[1]), ids[2]) == (1, 1, ids[0] | ids[1])
    (id,) = ids[0]
    for ask in (("DELETE", ""), ("POST", "/pin"), ("POST", "/unpin")):
        assert b.ask(ask[0], f"/cache/conversations/{id}{ask[1]}", x=1).status_code == 404
    assert a.cached(FIRST) == len(FIRST) - 1
    assert boss.ask("DELETE", f"/cache/conversations/{id}").json()["tokens"] == len(FIRST) + 1
    assert (a.cached(FIRST), b.cached(FIRST)) == (0, len(FIRST) - 1)


def test_the_disk_is_told_and_dropped_from(tmp_path: Path) -> None:
    with running(tiny_loaded("llama"), disk_cache_dir=tmp_path) as served:
        complete(served, FIRST, prompt_cache_key="first")
        complete(served, SECOND, prompt_cache_key="second")
        settle(served)
        assert served.server.state.engine.ask(is_written).result(60)
        first, second = rows(served)
        assert {tuple(part["also"]) for part in first["parts"]} == {("disk",)}
        said = drop(served, second["id"])
        assert 0 < said["disk_tokens"] <= said["tokens"] == second["tokens"] - 250
        # What has left memory is known by its session, and found on the disk. Clearing makes sessions forget their
        # tokens, so what is in memory is dropped without it.
        served.server.state.engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        (row,) = rows(served)
        assert (tokens_in(row, "hot"), tokens_in(row, "disk")) == (0, len(FIRST) + 1)
        assert {part["k"] for part in row["parts"]} == {"raw"}
        before = get(served, "/cache/usage")["tiers"]["disk"]["tokens"]
        gone = drop(served, row["id"])
        assert (gone["tokens"], gone["disk_tokens"]) == (0, len(FIRST) + 1)
        assert before - get(served, "/cache/usage")["tiers"]["disk"]["tokens"] == gone["disk_tokens"]
        # A block that ends where the two part is the other's: it was written when that parted inside one of these.
        (left,) = rows(served)
        assert (left["session"], tokens_in(left, "disk")) == ("second", 250)
        assert drop(served, left["id"])["disk_tokens"] == 250
        assert rows(served) == []


def test_the_shared_store_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running(tiny_loaded("llama"), remote_cache=f"file://{tmp_path}", remote_precision="raw") as served:
        complete(served, FIRST)
        served.server.state.engine.ask(is_shared).result(60)
        (row,) = rows(served)
        # Blocks there have exactly 256 tokens.
        assert [(part["tokens"], part["also"]) for part in row["parts"]] == [(256, ["remote"]), (147, [])]
        served.server.state.engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        (row,) = rows(served)
        told = [(part["tokens"], part["tier"], part["k"]) for part in row["parts"]]
        assert told == [(256, "remote", "raw")]
        gone = drop(served, row["id"])
        assert (gone["tokens"], gone["disk_tokens"]) == (0, 0)
        assert len(rows(served)) == 1  # it is the other servers', too


def is_shared(core: EngineCore) -> None:
    assert core.prefix_cache.sharing is not None
    core.prefix_cache.sharing.flush(60)
