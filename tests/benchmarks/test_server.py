"""The benchmark of HTTP on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import server
from tests.support.models import tiny_loaded

pytestmark = pytest.mark.slow


def test_server_figures_come_from_a_real_server() -> None:
    figures = server.measure(tiny_loaded("llama"), streams=2, reply_tokens=4, rounds=1)
    assert figures.streams == 2
    assert figures.http_tokens_s > 0
    assert figures.overhead == pytest.approx(figures.engine_tokens_s / figures.http_tokens_s - 1)


def test_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "load", lambda _: tiny_loaded("llama"))
    result = CliRunner().invoke(server.app, ["--streams", "2", "--reply-tokens", "4", "--rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["streams"] == 2
