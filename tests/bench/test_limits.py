"""What the machine gives to plain work, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from kvstrata.bench import disk, limits, step
from kvstrata.bench.limits import Products, products
from kvstrata.bench.streams import running
from kvstrata.cli import app
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.tiers.interface import Refusal, Refused
from tests.tiny import tiny_loaded

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
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_copy_by_cores", lambda: 0.5)
    monkeypatch.setattr(limits, "_copy_by_gpu", lambda: 0.5)
    assert limits.copy_gb_s() == pytest.approx(4 * (1 << 20) / 1e9)


def test_a_step_is_shown_beside_plain_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
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


def test_blocks_are_compared_with_a_plain_file_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = iter([disk.Times(2.0, 1.0), disk.Times(8.0, 4.0), disk.Times(4.0, 2.0)])
    plain = iter([disk.Times(1.0, 1.0), disk.Times(2.0, 1.0), disk.Times(3.0, 1.0)])
    monkeypatch.setattr(disk, "_through_tier", lambda *_: next(ours))
    monkeypatch.setattr(disk, "_as_file", lambda *_: next(plain))
    write, read = disk.measure(tmp_path, num_blocks=4, block_bytes=1_000_000, rounds=3).rates
    assert write == disk.Rate("write", 1.0, 2.0, 0.5)
    assert read == disk.Rate("read", 2.0, 4.0, 0.5)


def test_blocks_and_a_file_are_written_and_read(tmp_path: Path) -> None:
    figures = disk.measure(tmp_path, num_blocks=3, block_bytes=4096, rounds=1)
    assert all(rate.blocks_mb_s > 0 and rate.file_mb_s > 0 for rate in figures.rates)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert "3 blocks of" in disk.table(figures)


def test_a_disk_that_takes_no_block_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.DiskTier, "put", lambda *_, **__: Refused(Refusal.PAUSED))
    with pytest.raises(KvstrataError, match="did not take a block: paused"):
        disk.measure(tmp_path, num_blocks=1, block_bytes=64, rounds=1)


def test_a_block_that_does_not_come_back_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(files: Iterable[Path]) -> None:
        next(iter(files)).unlink()

    monkeypatch.setattr(disk, "leave_page_cache", lose)
    with pytest.raises(KvstrataError, match="not all came back from the disk cache: "):
        disk.measure(tmp_path, num_blocks=2, block_bytes=4096, rounds=1)


def test_a_size_that_is_none_is_refused() -> None:
    said = CliRunner().invoke(app, ["bench", "disk", "--block-size", "20%"])
    assert said.exit_code
    assert "20% is not a number of bytes" in said.output
