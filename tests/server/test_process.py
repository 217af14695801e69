"""The commands, as processes: what is printed, what is refused, and how Ctrl-C ends them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvstrata.config import Settings, env_name, flag_name
from kvstrata.models.load import LoadedModel
from tests.models.conftest import write_model
from tests.support.models import tiny_config, tiny_module
from tests.support.raw_http import answer, head
from tests.support.servers import Served

KVSTRATA = (sys.executable, "-c", "from kvstrata.cli import main; main()")


def kvstrata(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment}
    return subprocess.run(
        [*KVSTRATA, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False, env=env
    )


def test_help_names_default_unit_and_environment_of_every_flag() -> None:
    text = kvstrata("serve", "--help-all").stdout
    for name in Settings.model_fields:
        if name != "model":
            assert flag_name(name) in text
        assert env_name(name) in text
    assert text.count("default:") == len(Settings.model_fields) + 1  # and --config


def test_help_imports_nothing_heavy() -> None:
    heavy = {"mlx.core", "fastapi", "pydantic", "transformers", "numpy"}
    code = f"import sys, kvstrata.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_usage_is_2_and_wrong_settings_are_1() -> None:
    assert kvstrata("serve", "--nope").returncode == 2
    done = kvstrata("serve", "--port", "many", KVSTRATA_MEMORY_LIMIT="20 percents")
    assert done.returncode == 1
    assert "--port (KVSTRATA_PORT)" in done.stderr
    assert "--memory-limit (KVSTRATA_MEMORY_LIMIT)" in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = kvstrata("serve", "--port", str(port))
    assert done.returncode == 1
    assert f"Port {port} on 127.0.0.1 is in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["./no-such-model"], "There is no model folder ./no-such-model"),
        (["./no-such-model.gguf"], "There is no file no-such-model.gguf"),
        (["--adapter-path", "/no-such-adapter"], "There is no adapter folder /no-such-adapter"),
        (["--disk-cache-dir", "/dev/null/kv"], "--disk-cache-dir /dev/null/kv cannot be written to"),
    ],
)
def test_a_missing_path_is_told_before_the_libraries_are_loaded(arguments: list[str], said: str) -> None:
    done = kvstrata("serve", *arguments, "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvstrata: {said}")  # and no stage of a start before it
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_cache_folder_is_told_before_the_libraries_are_loaded(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = kvstrata("serve", "--disk-cache-dir", str(tmp_path), "--port", "0")
    assert done.stderr.startswith(f"kvstrata: --disk-cache-dir {tmp_path} cannot be written to")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--bogus", "There is no option --bogus. See: kvstrata serve --help-all"),
        ("--prot=3", "There is no option --prot. Did you mean --port?"),
    ],
)
def test_an_unknown_option_names_one_that_is_alike_or_the_help(given: str, said: str) -> None:
    done = kvstrata("serve", given)
    assert done.returncode == 2
    assert said in done.stderr


def test_chat_from_a_pipe(served: Served) -> None:
    done = kvstrata("chat", "--url", served.url, "--max-tokens", "3", "--temperature", "0", stdin="Quinces?\n\nAgain\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    said = re.findall(r"\[(\d+) of (\d+) prompt tokens cached, first token after [\d.]+ s\]", done.stderr)
    first, second = [(int(cached), int(total)) for cached, total in said]
    # Another test may have left the template's own beginning in the store, but not this first turn.
    assert first[0] < first[1] - 1
    assert second[0] >= first[1] - 1


def test_chat_without_a_server_says_what_to_do() -> None:
    done = kvstrata("chat", "--url", "http://127.0.0.1:9", stdin="Hello\n")
    assert done.returncode == 1
    assert "kvstrata serve" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def serving(log: Path, *model: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`kvstrata serve`, its address, and what it says when it starts."""
    # Where a crash happened is worth knowing; it leaves no other trace.
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    command = [*KVSTRATA, "serve", *model, "--port", "0"]
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=out, text=True, env=env) as process,
    ):
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("agents "):
                    break
            start = "".join(lines)
            address = re.search(r"http://[\d.:]+", start)
            assert address, log.read_text()
            yield process, address[0], start
        finally:
            process.kill()


def test_first_ctrl_c_drains_and_the_second_ends_at_once(tmp_path: Path, default_model: LoadedModel) -> None:
    with serving(tmp_path / "log") as (process, url, start):
        for word in ("SmolLM2-135M-Instruct", "back-end", "BLAS" if sys.platform == "linux" else "metal", "memory"):
            assert word in start
        endless = {"max_tokens": 4000, "logit_bias": {str(id_): -100 for id_ in default_model.eos_ids}}
        body = {"model": "SmolLM2-135M-Instruct", "prompt": "Once", "stream": True, **endless}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            chunks = response.iter_raw()  # an iterator that is not kept closes the connection
            next(chunks)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "Finishing 1 reply" in line, f"it ended with {process.wait(10)}"
            assert httpx.get(f"{url}/health").status_code == 503
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert time.monotonic() - began < 5


def test_sigterm_ends_an_idle_server_with_0(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
    with serving(tmp_path / "log", str(folder)) as (process, _, start):
        assert "tiny" in start
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_sigterm_with_a_half_sent_body_leaves_no_traceback(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", tiny_module("llama"), tiny_config("llama"))
    log = tmp_path / "log"
    with serving(log, str(folder)) as (process, url, _), socket.socket() as line:
        line.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        line.settimeout(60)
        line.sendall(head("/v1/completions", Content_Type="application/json", Content_Length=100) + b"{")
        assert httpx.get(f"{url}/health").status_code == 200  # the server has seen what came before
        process.send_signal(signal.SIGTERM)
        assert answer(line)[0] == 503
        assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()
