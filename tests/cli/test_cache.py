"""`kvstrata cache` and `kvstrata top` against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvstrata.cli import app
from kvstrata.errors import KvstrataError
from tests.support.models import tiny_loaded
from tests.support.servers import Served, running

PROMPT = [5 + i % 80 for i in range(300)]
TOP = (sys.executable, "-c", "from kvstrata.cli import main; main()", "top")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Served]:
    with running(tiny_loaded("llama"), api_key=["plain"], admin_key=["secret"]) as one:
        yield one


@pytest.fixture(autouse=True)
def stored(tiny: Served) -> Iterator[None]:
    with tiny.openai("secret") as client:
        client.completions.create(model=tiny.name, prompt=PROMPT, max_tokens=1)
    yield
    run(tiny, "cache", "requantize", "--k", "raw", "--v", "raw")
    run(tiny, "cache", "clear", "all")


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"prompt": PROMPT, "max_tokens": 5}))
    return str(file)


def invoke(tiny: Served, *arguments: str, stdin: str | None = None) -> Result:
    # As on the server's own machine: what is asked there is an admin's to ask.
    keys = {"KVSTRATA_API_KEY": "plain", "KVSTRATA_ADMIN_KEY": "secret"}
    env = {"KVSTRATA_URL": tiny.url, **keys, "COLUMNS": "120"}
    return CliRunner().invoke(app, list(arguments), env=env, input=stdin)


def run(tiny: Served, *arguments: str, stdin: str | None = None) -> str:
    result = invoke(tiny, *arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(tiny: Served, *arguments: str) -> dict[str, Any]:
    return json.loads(run(tiny, *arguments, "--json"))


def refusal(tiny: Served, *arguments: str) -> str:
    error = invoke(tiny, *arguments).exception
    assert isinstance(error, KvstrataError)
    return str(error)


def test_usage_as_a_table_and_as_json(tiny: Served) -> None:
    usage = run_json(tiny, "cache", "usage")
    assert usage["tiers"]["hot"]["tokens"] == len(PROMPT)
    shown = run(tiny, "cache", "usage")
    assert "hot" in shown
    assert "raw" in shown
    assert "300" in shown
    assert "K raw, V raw" in shown


def test_explain_of_a_request_and_of_text(tiny: Served, request_file: str) -> None:
    said = run_json(tiny, "cache", "explain", "--request", request_file)
    assert (said["cached_tokens"], said["ends_because"]) == (299, "complete")
    shown = run(tiny, "cache", "explain", "--request", request_file)
    assert "299 of 300 tokens" in shown
    assert "(salt)" in run(tiny, "cache", "explain", "--request", request_file, "--salt", "other")
    assert "0 of 1 tokens" in run(tiny, "cache", "explain", "-", stdin="%")


def test_explain_shows_both_ways_where_prompts_part(tiny: Served, tmp_path: Path) -> None:
    text = "".join(chr(32 + token) for token in PROMPT)
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"tokens": [*PROMPT[:100], 94, *PROMPT[101:110]]}))
    shown = run(tiny, "cache", "explain", "--request", str(file))
    assert "100 (diverged)" in shown
    assert json.dumps("~" + text[101:110]) in shown
    assert json.dumps(text[100:112]) in shown


def test_pin_and_unpin_and_clear(tiny: Served, request_file: str) -> None:
    assert "first 300 of 300 tokens" in run(tiny, "cache", "pin", "--request", request_file)
    assert run_json(tiny, "cache", "clear", "hot")["tokens"] == 0
    assert "first 300" in run(tiny, "cache", "unpin", "--request", request_file)
    assert "Removed 300 tokens" in run(tiny, "cache", "clear", "hot")


def test_requantize(tiny: Served) -> None:
    dry = run_json(tiny, "cache", "requantize", "--k", "planes:4", "--v", "planes:4", "--dry-run")
    assert dry["dry_run"] is True
    shown = run(tiny, "cache", "requantize", "--k", "planes:4", "--dry-run")
    assert "dry run, nothing was changed" in shown
    assert "hot, 1 spans" in shown
    assert "freed (" in shown
    done = run(tiny, "cache", "requantize", "--k", "planes:4", "--v", "planes:4")
    assert "K planes:4, V planes:4" in done
    assert "of 1 spans" in run(tiny, "cache", "requantize", "--progress")
    assert run_json(tiny, "cache", "requantize", "--cancel")["is_running"] is False


def test_errors_are_one_clear_line(tiny: Served, tmp_path: Path) -> None:
    assert "affine:8" in refusal(tiny, "cache", "requantize", "--k", "nope")
    assert "'hot', 'disk' or 'all'" in refusal(tiny, "cache", "clear", "warm")
    assert "--request FILE" in refusal(tiny, "cache", "explain")
    (tmp_path / "bad.json").write_text("[1]")
    assert "JSON object" in refusal(tiny, "cache", "pin", "--request", str(tmp_path / "bad.json"))
    assert "wants a key" in refusal(tiny, "cache", "usage", "--api-key", "wrong")
    assert "kvstrata serve" in refusal(tiny, "cache", "usage", "--url", "http://127.0.0.1:9")
    assert "not an address" in refusal(tiny, "cache", "usage", "--url", "http://a:b")


def test_one_key_of_the_servers_variable_is_sent(tiny: Served) -> None:
    for command in (("cache", "usage"), ("top", "--once"), ("chat",)):
        env = {"KVSTRATA_URL": tiny.url, "KVSTRATA_API_KEY": "secret, other"}
        assert CliRunner().invoke(app, list(command), env=env, input="").exit_code == 0
        assert "wants a key" in refusal(tiny, *command, "--api-key", "secret,other")


def test_a_key_that_no_header_can_carry_is_refused(tiny: Served) -> None:
    for command in (("cache", "usage"), ("top", "--once"), ("chat",)):
        said = refusal(tiny, *command, "--api-key", "schlüssel")
        assert "printable ASCII" in said
        assert "schlüssel" not in said


def test_a_plain_key_is_told_of_its_own(tiny: Served) -> None:
    assert "300" in run(tiny, "cache", "usage")
    plain = ("--api-key", "plain")
    assert run_json(tiny, "cache", "usage", *plain)["tiers"]["hot"]["tokens"] == 0
    assert run_json(tiny, "cache", "clear", "all", *plain)["tokens"] == 0
    with tiny.openai("plain") as client:
        client.completions.create(model=tiny.name, prompt=PROMPT[:50], max_tokens=1)
    shown = run(tiny, "cache", "usage", *plain)
    assert "under this key" in shown
    assert "50" in run(tiny, "top", "--once", *plain)
    changed = run(tiny, "cache", "requantize", "--k", "planes:4", "--v", "planes:4", *plain)
    assert "admin key" in " ".join(changed.split())
    assert run_json(tiny, "cache", "usage")["target"] == {"k": "raw", "v": "raw"}


def test_top_once(tiny: Served) -> None:
    shown = run(tiny, "top", "--once")
    for words in ("tiny-llama", "0 running", "decode", "raw", "300", tiny.url):
        assert words in shown


def test_top_refreshes_until_ctrl_c(tiny: Served) -> None:
    env = {**os.environ, "KVSTRATA_URL": tiny.url, "KVSTRATA_API_KEY": "secret", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*TOP, "--every", "0.2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
    )
    assert process.stdout is not None
    # The heading was shown, and shown again.
    for _ in range(2):
        assert next(line for line in process.stdout if "tiny-llama" in line)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0, rest + errors
    assert "Traceback" not in errors


def test_a_session_id_is_never_folded(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "-".join(["a-name-of-a-client"] * 3)
    with tiny.openai("secret") as client:
        client.completions.create(model=tiny.name, prompt=PROMPT, max_tokens=1, extra_body={"prompt_cache_key": name})
    assert name in run(tiny, "cache", "sessions", "--limit", "1").splitlines()


def test_sessions_are_listed_shown_and_pinned_by_their_id(tiny: Served) -> None:
    for prompt in (PROMPT, [*PROMPT[:100], 1, *PROMPT[101:]]):
        with tiny.openai("secret") as client:
            client.completions.create(
                model=tiny.name, prompt=prompt, max_tokens=1, extra_body={"prompt_cache_key": "my-chat"}
            )
    listed = run(tiny, "cache", "sessions", "--limit", "1")
    assert "my-chat" in listed
    assert "hot 300" in listed
    assert "K raw, V raw" in listed
    shown = " ".join(run(tiny, "cache", "sessions", "my-chat").split())
    assert "my-chat (by prompt_cache_key)" in shown
    assert "Request 2 diverged from the last prompt at token 100" in shown
    answer = json.loads(run(tiny, "cache", "sessions", "--limit", "1", "--json"))
    assert [session["requests"] for session in answer["sessions"]] == [2]
    assert "the first 300 of 301 tokens" in run(tiny, "cache", "pin", "--session", "my-chat")
    assert "my-chat (by prompt_cache_key)" in run(tiny, "cache", "explain", "--session", "my-chat")
    run(tiny, "cache", "unpin", "--session", "my-chat")
    with pytest.raises(KvstrataError, match="No session 'nobody' is known"):
        raise invoke(tiny, "cache", "sessions", "nobody").exception or AssertionError
