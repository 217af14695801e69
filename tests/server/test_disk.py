"""The disk tier through the front door: servers that end and others that go on from the same folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvstrata.cli import app
from kvstrata.cli.serve import start_lines
from kvstrata.config import load as load_settings
from kvstrata.models.load import load
from kvstrata.platform.device import device
from kvstrata.tiers.disk.filesystem import Filesystem
from tests.engine.test_disk import make_computing_slow
from tests.models.conftest import write_model
from tests.server.test_cache import LONG, complete, get
from tests.server.test_process import serving
from tests.support.eventually import eventually
from tests.support.models import tiny_config, tiny_loaded, tiny_module
from tests.support.servers import Served, running

MESSAGES = [
    {"role": "system", "content": "You know all about orchards. " + "Apples, pears and quinces grow there. " * 8},
    {"role": "user", "content": "What grows in an orchard?"},
]
NO_RESERVE = {"disk": {"reserve_bytes": 0}}
FOLLOW_UP = [{"role": "assistant", "content": "Fruit."}, {"role": "user", "content": "Which one is the sourest?"}]


def chat(served: Served, messages: list[dict[str, str]], **fields: str) -> Any:
    with served.openai() as client:
        asked: Any = messages
        return client.chat.completions.create(
            model=served.name, messages=asked, max_tokens=4, temperature=0, extra_body=fields
        )


def cached_tokens(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_the_next_server_says_what_it_did_not_compute(serve: Callable[..., Served], tmp_path: Path) -> None:
    first_server = serve(disk_cache_dir=tmp_path)
    cold = chat(first_server, MESSAGES)
    assert cached_tokens(cold) == 0
    cold_follow_up = chat(first_server, [*MESSAGES, *FOLLOW_UP], cache_salt="nothing is shared")
    assert cached_tokens(cold_follow_up) == 0
    first_server.server.end()
    first_server.thread.join(30)
    second_server = serve(disk_cache_dir=tmp_path)
    # Whichever is expected to be faster is done: on a busy machine that may be either, so it is settled here.
    second_server.server.state.engine.ask(make_computing_slow).result(60)
    again = chat(second_server, MESSAGES)
    assert cached_tokens(again) == again.usage.prompt_tokens - 1 > 80
    assert again.choices[0].message.content == cold.choices[0].message.content
    follow_up = chat(second_server, [*MESSAGES, *FOLLOW_UP])
    # All but the reply that this client invented, and what it asks after it.
    assert cached_tokens(follow_up) >= again.usage.prompt_tokens - 1
    assert follow_up.choices[0].message.content == cold_follow_up.choices[0].message.content
    usage = get(second_server, "/cache/usage")
    assert usage["counters"]["promoted_tokens"] >= again.usage.prompt_tokens - 1


def test_kill_loses_no_conversation_whose_reply_ended_ten_seconds_ago(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
    disk = str(tmp_path / "disk")
    conversations = [[number + 1, *range(20, 80)] for number in range(3)]
    with (
        serving(tmp_path / "log", str(model), "--disk-cache-dir", disk) as (process, url, start),
        httpx.Client(base_url=url, verify=False, timeout=60) as client,
    ):
        assert "each reply is written seconds after its end" in start
        for _ in range(2):
            for tokens in conversations:
                asked = {"model": "tiny", "prompt": tokens, "max_tokens": 4}
                client.post("/v1/completions", json=asked).raise_for_status()
                tokens += range(40, 80)
        stored_tokens = client.get("/cache/usage").json()["tiers"]["hot"]["tokens"]
        eventually(lambda: client.get("/cache/usage").json()["tiers"]["disk"]["tokens"] >= stored_tokens, 10)
        process.kill()
        process.wait(30)
    with running(load(str(model)), disk_cache_dir=disk, options=NO_RESERVE) as served:
        for tokens in conversations:
            explained = served.ask("/cache/explain", tokens=tokens[:101]).json()
            assert explained["by_tier"]["disk"] == 100


def test_clear_survives_a_kill_right_after_the_answer(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
    disk = str(tmp_path / "disk")
    tokens = [*range(1, 91)] * 2
    with (
        serving(tmp_path / "log", str(model), "--disk-cache-dir", disk) as (process, url, _),
        httpx.Client(base_url=url, verify=False, timeout=60) as client,
    ):
        client.post("/v1/completions", json={"model": "tiny", "prompt": tokens, "max_tokens": 4}).raise_for_status()
        eventually(lambda: client.get("/cache/usage").json()["tiers"]["disk"]["tokens"] >= len(tokens))
        client.post("/cache/clear", json={"tier": "all"}).raise_for_status()
        process.kill()
        process.wait(30)
    with running(load(str(model)), disk_cache_dir=disk, options=NO_RESERVE) as served:
        assert served.ask("/cache/explain", tokens=tokens).json()["cached_tokens"] == 0


def test_clear_says_so_where_the_disk_does_not_confirm_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.server.cache.endpoints.DURABLE_S", 0.1)
    go_on, create = threading.Event(), Filesystem.create
    with running(tiny_loaded("llama"), disk_cache_dir=tmp_path, options=NO_RESERVE) as served:
        complete(served, LONG)
        eventually(lambda: get(served, "/cache/usage")["tiers"]["disk"]["tokens"])
        monkeypatch.setattr(Filesystem, "create", lambda files, path: (go_on.wait(20), create(files, path))[1])
        answer = served.ask("/cache/clear", tier="all")
        assert answer.status_code == 503
        assert "did not confirm" in answer.json()["error"]["message"]
        go_on.set()
        eventually(lambda: served.ask("/cache/clear", tier="all").status_code == 200)


def test_replies_that_get_no_time_do_not_take_it_from_the_disk(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    with running(loaded, disk_cache_dir=tmp_path, options=NO_RESERVE, drain_timeout_s=0) as served:
        complete(served, LONG)
    with running(loaded, disk_cache_dir=tmp_path, options=NO_RESERVE) as served:
        explained = served.ask("/cache/explain", prompt=LONG).json()
    assert explained["ends_because"] == "complete"
    assert explained["by_tier"]["disk"] == explained["cached_tokens"] > 0


@pytest.mark.parametrize(("architecture", "kinds"), [("llama", {"full"}), ("qwen3_next", {"full", "recurrent"})])
def test_usage_tells_what_the_disk_holds(architecture: str, kinds: set[str], tmp_path: Path) -> None:
    loaded = tiny_loaded(architecture)
    with running(loaded, disk_cache_dir=tmp_path, cache_type_k="planes:8", cache_type_v="planes:4") as served:
        complete(served, LONG)
    with running(loaded, disk_cache_dir=tmp_path) as served:
        said = disk_usage(served)
        shown = CliRunner().invoke(app, ["cache", "usage"], env={"KVSTRATA_URL": served.url, "COLUMNS": "120"}).stdout
    assert set(said["by_precision"]) - {"raw"} == {"planes:8", "planes:4"}
    assert said["by_precision"]["planes:8"] > said["by_precision"]["planes:4"] > 0
    assert set(said["by_kind"]) == kinds
    assert sum(said["by_precision"].values()) == sum(said["by_kind"].values()) == payload_bytes(tmp_path)
    of_disk = shown[shown.index("disk") :]
    assert "planes:8" in of_disk
    assert "planes:4" in of_disk
    for path in tmp_path.glob("catalogue*"):
        path.unlink()
    with running(loaded, disk_cache_dir=tmp_path) as served:
        rebuilt = disk_usage(served)
        assert {**rebuilt, "bytes": 0} == {**said, "bytes": 0}
        served.ask("/cache/clear", tier="disk")
        assert (disk_usage(served)["by_precision"], disk_usage(served)["by_kind"]) == ({}, {})


def test_a_volume_without_room_is_told_at_the_start_and_in_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Filesystem, "free_bytes", lambda _self, _folder: 5 << 20)
    flags: dict[str, Any] = {"disk_cache_dir": tmp_path, "disk_cache_size": "50GiB"}
    with running(tiny_loaded("llama"), options={"disk": {"reserve_bytes": 1 << 20}}, **flags) as served:
        lines = start_lines(load_settings(flags=flags), served.server.state, device(), served.url)
        shown = CliRunner().invoke(app, ["cache", "usage"], env={"KVSTRATA_URL": served.url, "COLUMNS": "160"}).stdout
        counters = get(served, "/cache/usage")["counters"]
    assert 4 << 20 <= counters["disk_allowed_bytes"] < 5 << 20
    assert counters["disk_limit_bytes"] == 50 << 30
    (line,) = (line for line in lines if line.startswith("disk "))
    assert "MiB of 50GiB, because the volume is nearly full; each reply is" in line
    assert "has room for 4.1 MiB, not for 50.0 GiB" in shown


def disk_usage(served: Served) -> dict[str, Any]:
    return get(served, "/cache/usage")["tiers"]["disk"]


def payload_bytes(directory: Path) -> int:
    """Of all tensors, as the files' headers have it."""
    total = 0
    for path in directory.rglob("*.safetensors"):
        content = path.read_bytes()
        total += len(content) - 8 - int.from_bytes(content[:8], "little")
    return total
