"""What is shown while a server starts: a live line on a terminal, lines in a log, objects as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import signal
import subprocess
import threading
from typing import Any

import httpx
import pytest

from kvstrata.cli.serve import StartProgress
from kvstrata.platform.logging import STAGES_LOGGER, begin
from tests.models.conftest import write_model
from tests.server.test_process import KVSTRATA
from tests.support.models import tiny_config, tiny_module

STAGES = ["libraries", "model files", "weights", "tokenizer", "fingerprint", "kernels", "probe", "memory", "speed",
          "tiers", "template"]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return str(write_model(folder, tiny_module("llama"), tiny_config("llama")))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stages_are_timed_one_after_the_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvstrata"), "propagate", True)
    clock = Clock()
    with caplog.at_level("INFO", "kvstrata"), StartProgress(live=False, clock=clock) as starting:
        begin("weights", "Reading the weights")
        clock.now = 3.0
        begin("probe", "Trying it")
        clock.now = 3.01
        begin("weights", "Reading the weights again")
        clock.now = 4.0
        starting.end()
        begin("late", "Nobody listens any more")
    assert starting.seconds == pytest.approx({"weights": 3.99, "probe": 0.01})
    assert starting.summary() == "ready after 4.0 s: weights 4.0"
    said = [record.getMessage() for record in caplog.records if record.name == "kvstrata.serve"]
    assert said == [
        "start: Reading the weights (after 0.0 s)",
        "start: Trying it (after 3.0 s)",
        "start: Reading the weights again (after 3.0 s)",
    ]
    assert logging.getLogger(STAGES_LOGGER).handlers == []


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="no model"), StartProgress(live=True):
        raise ValueError("no model")
    assert logging.getLogger(STAGES_LOGGER).handlers == []


def test_everything_is_json_when_it_is_asked_for(model: str) -> None:
    command = [*KVSTRATA, "serve", model, "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        try:
            told = [json.loads(process.stderr.readline())]
            while "url" not in told[-1]:
                told.append(json.loads(process.stderr.readline()))
            url = told[-1]["url"]
            headers = {"x-request-id": "mine"}
            body = {"prompt": [5] * 20, "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
            request: dict[str, Any] = json.loads(process.stderr.readline())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            rest = [json.loads(line) for line in process.stderr]
            assert process.stdout.read() == ""
        finally:
            process.kill()
    assert [line["stage"] for line in told[:-1]] == STAGES
    assert list(told[-1]["stages"]) == STAGES
    elapsed = [line["elapsed_s"] for line in told[:-1]]
    assert elapsed == sorted(elapsed)
    assert told[-1]["model"] == "tiny"
    assert (request["request_id"], request["status"], request["path"]) == ("mine", 200, "/v1/completions")
    assert (request["prompt_tokens"], request["cached_tokens"], request["logger"]) == (20, 0, "kvstrata.requests")
    for line in [*told, request, *rest]:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
        assert line["level"] in ("info", "warning")


def test_a_terminal_has_one_live_line(model: str) -> None:
    """And none of a log; when it has ended it is gone, and the first lines say how long each stage took."""
    ours, theirs = pty.openpty()
    command = [*KVSTRATA, "serve", model, "--port", "0"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    drawn = bytearray()

    def watch() -> None:
        """What is not read would hold the server up. The last reading fails: the other end is closed."""
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 1 << 16):
                drawn.extend(piece)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, env=env) as process:
        os.close(theirs)
        watching = threading.Thread(target=watch)
        watching.start()
        assert process.stdout is not None
        try:
            start = [process.stdout.readline() for _ in range(2)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    watching.join(60)
    os.close(ours)
    assert re.match(r"start     ready after [\d.]+ s: libraries [\d.]+", start[1])
    text = drawn.decode()
    assert "Loading libraries" in text
    assert "s in all" in text
    assert "start:" not in text
