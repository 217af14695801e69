"""What the machine gives to plain work, beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.bench import disk, limits, step
from kvstrata.bench.limits import Products, products
from kvstrata.bench.streams import running
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.tier.base import Refusal, Refused
from tests.tiny import tiny_loaded

CONFIG = {
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


@pytest.mark.parametrize("config", [{}, {**CONFIG, "num_experts": 4}, {**CONFIG, "intermediate_size": [1, 2]}])
def test_products_of_other_models_are_not_guessed(config: dict) -> None:
    assert products(config) is None


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_copy_by_cores", lambda: 0.5)
    monkeypatch.setattr(limits, "_copy_by_gpu", lambda: 0.5)
    assert limits.copy_gb_s() == pytest.approx(4 * (1 << 20) / 1e9)


def test_a_step_is_shown_beside_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(step, "PREFILL_TOKENS", 16)
    loaded = tiny_loaded("llama")
    with running(Engine(loaded, Limits(), Metrics())) as engine:
        figures = step.measure(loaded, engine, [2], prompt_tokens=8, reply_tokens=40)
        token_bytes = engine.ask(lambda loop: loop.budget.token_bytes).result()
    (found,) = figures.steps
    weights, multiplied, kv = found.limits
    assert weights.least_ms == pytest.approx(loaded.weight_bytes / figures.copy_gb_s / 1e6)
    asked = products(loaded.config)
    assert asked is not None
    assert multiplied.least_ms == pytest.approx(
        2 * 2 * (asked.in_layers + asked.in_output) / figures.product_gflops / 1e6
    )
    assert kv.least_ms == pytest.approx(2 * (8 + 20) * token_bytes / figures.copy_gb_s / 1e6)
    assert all(0 < limit.took_ms <= found.step_ms * 1.001 for limit in found.limits)
    assert figures.prefill is not None
    shown = step.table(figures)
    assert "KV from memory" in shown
    assert "a prompt of 16 tokens" in shown


def test_the_disk_is_shown_beside_a_plain_file(tmp_path: Path) -> None:
    figures = disk.measure(tmp_path, num_blocks=3, block_bytes=4096, rounds=1)
    assert [rate.what for rate in figures.rates] == ["write", "read"]
    assert all(rate.blocks_mb_s > 0 and rate.file_mb_s > 0 for rate in figures.rates)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert "3 blocks of" in disk.table(figures)


def test_a_disk_that_takes_no_block_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.DiskTier, "put", lambda *_, **__: Refused(Refusal.PAUSED))
    with pytest.raises(KvstrataError, match="did not take a block: paused"):
        disk.measure(tmp_path, num_blocks=1, block_bytes=64, rounds=1)
