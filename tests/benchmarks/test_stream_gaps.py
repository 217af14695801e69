"""Gaps of running streams, on tiny models."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import stream_gaps
from kvstrata.kv import buffers
from tests.support.models import tiny_loaded

pytestmark = pytest.mark.slow


def test_prefill_share_figures_have_both_sides() -> None:
    """Half of the time against nearly all of it: more tokens of the stream come while the same prompt is computed."""
    loaded = tiny_loaded("llama")
    said: list[str] = []
    half, most = stream_gaps.measure_prefill_shares(loaded, shares=(0.5, 1.0), prompt_tokens=2500, progress=said.append)
    assert len(said) == 2
    assert (half.share, most.share) == (0.5, 1.0)
    assert half.num_gaps > 2 * most.num_gaps
    for row in (half, most):
        figures = row.as_json()
        assert 0 < row.gap_p50_s <= row.gap_p95_s
        assert figures["gap_ratio"] == pytest.approx(row.gap_p95_s / row.gap_alone_s)
        assert figures["first_ratio"] == pytest.approx(row.first_s / row.first_alone_s)
        assert figures["is_within_bound"] == (max(row.gap_ratio, row.first_ratio) <= figures["bound"])


def test_spilling_figures_come_from_bytes_that_were_spilled() -> None:
    load = stream_gaps.SpillingLoad(streams=2, conversations=6, conversation_tokens=700)
    figures = stream_gaps.measure_spilling(tiny_loaded("llama", 4), load, rounds=2)
    # 4 layers, K and V of 2 heads of 16 values in float32; the token of a reply of one is never fed.
    assert figures.spilled_bytes >= 2 * 6 * 700 * 4 * 2 * 2 * 16 * 4
    assert figures.num_intervals > 0
    assert 0 < figures.quiet_p50_s <= figures.quiet_p99_s
    assert figures.as_json()["p99_ratio"] == pytest.approx(figures.spilling_p99_s / figures.quiet_p99_s)


@pytest.mark.parametrize("buffer_step", [1, 256], ids=["buffers of any size", "as on CUDA"])
def test_precision_changes_under_streams_that_all_finish(buffer_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "TOKENS_STEP", max(buffer_step, buffers.TOKENS_STEP))
    rows = stream_gaps.measure_requantizing(tiny_loaded("llama"), streams=3, prompt_tokens=600, reply_tokens=120)
    assert [row.precision for row in rows] == ["planes:8", "planes:4"]
    for row in rows:
        assert (row.finished, row.streams, row.computed_again) == (3, 3, 0)
        assert row.longest_pause_steps > 0
        assert row.freed_bytes > 0
        assert row.freed_bytes == pytest.approx(row.freed_said_bytes, rel=0.01)
        assert row.as_json()["share"] == row.seconds / row.prefill_s


def test_commands_print_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_gaps, "load_model", lambda *_, **__: tiny_loaded("llama"))
    requantize = ["requantize", "--streams", "2", "--prompt-tokens", "600", "--reply-tokens", "120", "--json"]
    result = CliRunner().invoke(stream_gaps.app, requantize)
    assert result.exit_code == 0, result.output
    assert [row["precision"] for row in json.loads(result.stdout)] == ["planes:8", "planes:4"]
    result = CliRunner().invoke(stream_gaps.app, ["prefill-share", "--shares", "0.5", "--json"])
    assert result.exit_code == 0, result.output
    assert [row["share"] for row in json.loads(result.stdout)] == [0.5]
    assert CliRunner().invoke(stream_gaps.app, ["prefill-share", "--shares", "2"]).exit_code == 2
