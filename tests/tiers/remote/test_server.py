"""Servers on one store: usage, metrics, commands and pages report it, and unusable settings fail the start."""

from __future__ import annotations

import json
import logging
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from openai.types import CompletionUsage
from rich.console import Console
from typer.testing import CliRunner

from kvstrata.cli.cache import app
from kvstrata.cli.cache_tables import totals
from kvstrata.cli.doctor import doctor
from kvstrata.config import load
from kvstrata.engine.executor import EngineCore
from kvstrata.errors import ConfigError
from kvstrata.platform.device import device
from kvstrata.server.build import build_server
from tests.engine.test_disk import make_computing_slow
from tests.support.models import VOCAB, tiny_loaded
from tests.support.servers import Served, running
from tests.tiers.remote.stores import S3, Valkey, private_folder, secret_file


def write_to_store(core: EngineCore) -> None:
    while core.pacer.has_work:
        core.pacer.run_slice(1.0)
    assert core.prefix_cache.sharing is not None
    core.prefix_cache.sharing.flush(30.0)


def engine_of(served: Served) -> Any:
    return served.server.state.engine


def complete(served: Served, prompt: list[int], max_tokens: int) -> CompletionUsage:
    with served.openai() as client:
        reply = client.completions.create(model=served.name, prompt=prompt, max_tokens=max_tokens, temperature=0)
    assert reply.usage is not None
    return reply.usage


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_server_loads_and_reports_a_prompt_of_another_server(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "valkey":
        url = request.getfixturevalue("redis_url")
    else:
        server: S3 = request.getfixturevalue("shared_s3")
        url = server.use_bucket(monkeypatch)
    flags = {"remote_cache": url, "remote_secret_file": secret_file(tmp_path)}
    prompt = [number * 11 % VOCAB for number in range(900)]
    with running(tiny_loaded("llama"), **flags) as first, running(tiny_loaded("llama"), **flags) as second:
        complete(first, prompt, 12)
        engine_of(first).ask(write_to_store).result(60)
        longer = [*prompt, *range(60)]
        with second.http() as client:
            told = client.post("/cache/explain", json={"tokens": longer}).json()
        assert told["by_tier"] == {"hot": 0, "remote": 768}
        engine_of(second).ask(make_computing_slow).result(60)
        details = complete(second, longer, 4).prompt_tokens_details
        assert details is not None
        assert details.cached_tokens == 768
        _assert_is_reported(second, url, 768)


def _assert_is_reported(served: Served, url: str, cached_tokens: int) -> None:
    with served.http() as client:
        usage, metrics = client.get("/cache/usage").json(), client.get("/metrics").text
    remote = usage["remote"]
    assert remote["url"] == url
    assert (remote["precision"], remote["paused_because"]) == ("planes:8", "")
    assert remote["read_tokens"] == cached_tokens
    assert remote["read_bytes"] == usage["counters"]["remote_read_bytes"] > 0
    assert remote["counters"]["read"] == {"base": cached_tokens // 256}
    assert remote["latency_s"] > 0
    assert f'kvstrata_cache_remote_events_total{{event="read",reason="base"}} {cached_tokens / 256}' in metrics
    assert "kvstrata_cache_remote_is_paused 0.0" in metrics
    assert set(usage["tiers"]) == {"hot"}


def test_server_unreachable_store_is_reported_everywhere(server: Valkey, tmp_path: Path) -> None:
    flags = {"remote_cache": server.url, "remote_secret_file": secret_file(tmp_path)}
    with running(tiny_loaded("llama"), **flags) as served:
        server.kill()
        with served.http() as client:
            told = client.post("/cache/explain", json={"tokens": [number % VOCAB for number in range(600)]}).json()
            usage, metrics = client.get("/cache/usage").json(), client.get("/metrics").text
        console = Console(width=200, record=True, file=StringIO())
        console.print(totals(usage))

    assert (told["by_tier"]["remote"], told["remote_paused_because"]) == (0, "unreachable")
    assert usage["remote"]["paused_because"] == "unreachable"
    assert usage["remote"]["counters"]["failed"] == {"unreachable": 1}
    assert "kvstrata_cache_remote_is_paused 1.0" in metrics
    assert 'kvstrata_cache_remote_events_total{event="failed",reason="unreachable"} 1.0' in metrics
    assert "paused: unreachable" in console.export_text()


def test_usage_without_a_remote_cache_is_null() -> None:
    with running(tiny_loaded("llama")) as served, served.http() as client:
        assert client.get("/cache/usage").json()["remote"] is None


def test_server_never_shows_or_logs_the_password_of_a_store(
    server: Valkey, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    secret = secret_file(tmp_path)
    server.require_password("hunter2-very-secret")
    caplog.set_level(logging.DEBUG)
    with running(tiny_loaded("llama"), remote_cache=server.url, remote_secret_file=secret) as served:
        with served.http() as client:
            seen = client.get("/cache/usage").text + client.get("/props").text + client.get("/metrics").text
        assert "redis://127.0.0.1" in seen
        assert "hunter2" not in seen
        assert "hunter2" not in repr(load(flags={"remote_cache": server.url}))
    wrong = server.url.replace("hunter2", "hunter3")
    with pytest.raises(ConfigError, match=r"cannot be used \(denied\)") as error:
        build_server(load(flags={"remote_cache": wrong, "remote_secret_file": secret}), tiny_loaded("llama"), device())
    assert "hunter" not in str(error.value) + caplog.text


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"remote_cache": "memcached://host"}, "unknown scheme 'memcached'"),
        ({"remote_cache": "redis://10.1.2.3:6379/0"}, "must be sealed with a secret"),
        ({"remote_cache": "s3://bucket", "remote_secret_file": "short"}, "has 5 bytes"),
        ({"remote_cache": "redis://127.0.0.1:6379/0"}, "must be sealed with a secret"),
        ({"remote_cache": "redis://127.0.0.1:1/0", "remote_secret_file": "long"}, "unreachable"),
        (
            {"remote_cache": "redis://127.0.0.1:1/0", "remote_secret_file": "long", "remote_precision": "planes:9"},
            "planes",
        ),
        ({"remote_secret_file": "long"}, "none is named"),
    ],
)
def test_build_server_unusable_remote_settings_are_refused(flags: dict[str, Any], word: str, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    files = {"short": secret_file(tmp_path, b"short", "short"), "long": secret_file(tmp_path, name="long")}
    given = {name: files.get(value, value) for name, value in flags.items()}
    with pytest.raises(ConfigError, match=word):
        build_server(load(flags=given), tiny_loaded("llama"), device())


def run_command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_cache_commands_list_verify_and_measure_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, secret = private_folder(tmp_path), secret_file(tmp_path)
    prompt = [number % 90 for number in range(600)]
    with running(tiny_loaded("llama"), remote_cache=url, remote_secret_file=secret) as served:
        served.ask("/v1/completions", prompt=prompt, max_tokens=2).raise_for_status()
        engine_of(served).ask(write_to_store).result(60)
    code, listed = run_command("ls", "--remote", url, "--json")
    names = [block["name"] for block in json.loads(listed)["blocks"]]

    assert (code, len(names)) == (0, 2)
    assert "2 blocks" in run_command("ls", "--remote", url)[1]
    checked = ("verify", "--remote", url, "--remote-secret-file", str(secret))
    assert run_command(*checked)[0] == 0
    assert "2 blocks are whole" in run_command(*checked)[1]
    victim = tmp_path / "shared" / "kvstrata2" / names[0][:2] / names[0]
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    code, text = run_command(*checked)
    assert (code, "1 are damaged" in text) == (1, True)
    other = secret_file(tmp_path, b"y" * 40, "other")
    assert "0 blocks are whole" in run_command("verify", "--remote", url, "--remote-secret-file", str(other))[1]
    doctor(as_json=True, remote=url)
    found = json.loads(capsys.readouterr().out)["remote"]
    assert found["read_bytes_per_s"] > 1e6
    assert found["latency_s"] > 0
    assert found["break_even_tokens_s"] > 10
    assert len(json.loads(run_command("ls", "--remote", url, "--json")[1])["blocks"]) == 2, "the probe is gone"
