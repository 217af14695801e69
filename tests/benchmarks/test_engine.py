"""The engine benchmark on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import engine
from benchmarks.common import running
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.metrics import Metrics
from tests.support.models import tiny_loaded

pytestmark = pytest.mark.slow


def test_engine_figures_have_both_rates_and_the_same_tokens() -> None:
    loaded = tiny_loaded("llama")
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as ours:
        figures = engine.measure(loaded, ours, engine.EngineLoad((1, 2), reply_tokens=6), rounds=1).as_json()
    assert set(figures["batch"]) == {"1", "2"}
    for row in (*figures["batch"].values(), figures["prefill"]):
        assert row["ours_tokens_s"] > 0
        assert row["mlx_lm_tokens_s"] > 0
        assert row["ratio"] == pytest.approx(row["ours_tokens_s"] / row["mlx_lm_tokens_s"])
        assert row["same_tokens"] == 1.0


def test_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "load_model", lambda *_, **__: tiny_loaded("llama"))
    options = ["--reply-tokens", "4", "--prompt-tokens", "8", "--rounds", "1", "--batches", "1", "--json"]
    result = CliRunner().invoke(engine.app, options)
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["batch"]) == {"1"}
