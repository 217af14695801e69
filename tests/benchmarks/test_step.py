"""What the machine gives to plain work, beside what was measured."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from benchmarks import step
from benchmarks.common import running
from benchmarks.step import Products, products
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.metrics import Metrics
from tests.support.models import tiny_loaded

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
    "vocab_size": 100,
}


def test_products_are_those_of_the_matrices() -> None:
    assert products(CONFIG) == Products(3 * (4 * 8 * 8 + 3 * 8 * 16), 800)
    shared = products({**CONFIG, "num_key_value_heads": 1, "head_dim": 16})
    assert shared == Products(3 * (8 * 16 * (2 * 2 + 2 * 1) + 3 * 8 * 16), 800)


@pytest.mark.parametrize("config", [{}, {**CONFIG, "model_type": "qwen3_moe"}, {**CONFIG, "model_type": "gpt_neox"}])
def test_products_of_other_models_are_not_guessed(config: dict) -> None:
    assert products(config) is None


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(step, "_copy_by_cores", lambda: 0.5)
    monkeypatch.setattr(step, "_copy_by_gpu", lambda: 0.5)
    assert step.copy_gb_s() == pytest.approx(4 * (1 << 20) / 1e9)


def test_a_step_is_shown_beside_plain_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(step, "PREFILL_TOKENS", 16)
    loaded = tiny_loaded("llama")
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        figures = step.measure(loaded, engine, [1], prompt_tokens=8, reply_tokens=40)
        token_bytes = engine.ask(lambda loop: loop.budget.token_bytes).result()
    (found,) = figures.steps
    asked = products(loaded.config)
    assert asked is not None
    reads = {limit.what: limit.plain_ms * figures.copy_gb_s * 1e6 for limit in found.limits if "copy" in limit.what}
    assert reads == {
        "all weights, as in a copy": pytest.approx(loaded.weight_bytes),
        "KV, as in a copy": pytest.approx((8 + 20) * token_bytes),
    }
    assert all(0 < limit.took_ms <= found.step_ms * 1.001 for limit in found.limits)
    assert all(limit.share == pytest.approx(limit.plain_ms / limit.took_ms) for limit in found.limits)
    shown = step.table(figures)
    assert "KV, as in a copy" in shown
    if mx.default_device() != mx.cpu:
        assert figures.prefill is None
        return
    assert figures.prefill is not None
    flops = {limit.what: limit.plain_ms * figures.product_gflops * 1e6 for limit in (*found.limits, figures.prefill)}
    assert flops["products, as of float32"] == pytest.approx(2 * (asked.in_layers + asked.in_output))
    assert flops["a prompt of 16 tokens, as a product"] == pytest.approx(2 * (16 * asked.in_layers + asked.in_output))
    assert "a prompt of 16 tokens" in shown


def test_a_model_of_which_too_little_is_known_has_shares_alone() -> None:
    loaded = tiny_loaded("gemma3_text")
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        figures = step.measure(loaded, engine, [1], prompt_tokens=8, reply_tokens=40)
    assert not figures.steps[0].limits
    assert figures.prefill is None
    assert "plain work" not in step.table(figures)


def test_step_figures_say_where_the_time_went() -> None:
    loaded = tiny_loaded("llama")
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as ours:
        figures = step.measure(loaded, ours, (1, 2), prompt_tokens=8, reply_tokens=64)

    assert [each.batch for each in figures.steps] == [1, 2]
    for each in figures.steps:
        assert each.num_samples > 0
        assert sum(share.share for share in each.shares) == pytest.approx(1)
        assert sum(share.step_ms for share in each.shares) == pytest.approx(each.step_ms)
        assert {share.what for share in each.shares} <= {name for _, name in step.PLACES} | {step.OTHER}
    assert "batch 2" in step.table(figures)


def test_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "load_model", lambda *_, **__: tiny_loaded("llama"))
    monkeypatch.setattr(step, "COPY_BYTES", 1 << 20)
    options = ["--batches", "1", "--prompt-tokens", "8", "--reply-tokens", "40", "--json"]
    result = CliRunner().invoke(step.app, options)
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["steps"]) == 1
