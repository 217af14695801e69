"""Every figure on a tiny model: the fields that programs rely on, and what must hold whatever the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.bench import engine, first_token, grammar, ladder, prefill_share, requantize, server, spilling, step
from kvstrata.bench.driver import in_turns, lay_out
from kvstrata.bench.streams import running
from kvstrata.cli.bench import app
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.kv import buffers
from kvstrata.metrics import Metrics
from tests.byte_level import byte_model
from tests.tiny import tiny_loaded

WIKITEXT = Path(__file__).parents[3] / "shared" / "text" / "wikitext2_test_raw.txt"


def test_cases_take_turns_and_every_other_round_goes_backwards() -> None:
    said: list[str] = []
    assert in_turns({"a": lambda: 1, "b": lambda: 2}, 2, said.append) == {"a": [1, 1], "b": [2, 2]}
    assert said == ["a, round 1", "b, round 1", "b, round 2", "a, round 2"]


def test_a_table_has_its_names_over_its_values() -> None:
    text = lay_out(
        [("raw", 1.25), ("none", "why")], [("cache", "<7", lambda r: r[0]), ("MiB", ">6.1f", lambda r: r[1])]
    )
    assert text == "cache     MiB\nraw       1.2\nnone      why"


def test_engine_figures_have_both_rates_and_the_same_tokens() -> None:
    loaded = tiny_loaded("llama")
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as ours:
        figures = engine.measure(loaded, ours, engine.Load((1, 2), reply_tokens=6), rounds=1).as_json()
    assert set(figures["batch"]) == {"1", "2"}
    for row in (*figures["batch"].values(), figures["prefill"]):
        assert row["ours_tokens_s"] > 0
        assert row["mlx_lm_tokens_s"] > 0
        assert row["ratio"] == pytest.approx(row["ours_tokens_s"] / row["mlx_lm_tokens_s"])
        assert row["same_tokens"] == 1.0


def test_step_figures_say_where_the_time_went() -> None:
    loaded = tiny_loaded("llama")
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as ours:
        figures = step.measure(loaded, ours, (1, 2), prompt_tokens=8, reply_tokens=64)

    assert [each.batch for each in figures.steps] == [1, 2]
    for each in figures.steps:
        assert each.num_looks > 0
        assert sum(share.share for share in each.shares) == pytest.approx(1)
        assert sum(share.step_ms for share in each.shares) == pytest.approx(each.step_ms)
        assert {share.what for share in each.shares} <= {name for _, name in step.PLACES} | {step.OTHER}
    assert "batch 2" in step.table(figures)


def test_grammar_figures_have_both_steps() -> None:
    loaded = byte_model()
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as ours:
        rows = grammar.measure(loaded, ours, rows=(1, 2), reply_tokens=60, rounds=2)
    assert [row.rows for row in rows] == [1, 2]
    for row in rows:
        assert row.free_s > 0
        assert row.held_s > 0
        figures = row.as_json()
        assert figures["cost_per_row"] == pytest.approx(row.cost / row.rows)
        assert figures["is_within_bound"] == (row.cost <= figures["bound"])


def test_server_figures_come_from_a_real_server() -> None:
    figures = server.measure(tiny_loaded("llama"), streams=2, reply_tokens=4, rounds=1)
    assert figures.streams == 2
    assert figures.http_tokens_s > 0
    assert figures.overhead == pytest.approx(figures.engine_tokens_s / figures.http_tokens_s - 1)


def test_first_token_figures_have_every_case() -> None:
    load = first_token.Load(prompt_tokens=600, slow_bytes_s=(1e3,))
    rows = first_token.measure(tiny_loaded("llama"), load, rounds=2)
    by_case = {row.case: row.as_json() for row in rows}
    assert len(by_case) == 5
    without, cold, memory, _disk, slow = by_case.values()
    assert (without["cached_tokens"], cold["cached_tokens"], memory["cached_tokens"]) == (0, 0, 599)
    assert slow["cached_tokens"] == 0  # it gave up
    assert without["ratio"] == without["largest_ratio"] == 1
    assert all(row["is_same_reply"] and row["seconds"] > 0 for row in by_case.values())


def test_prefill_share_figures_have_both_sides() -> None:
    """Half of the time against nearly all of it: more tokens of the stream come while the same prompt is computed."""
    loaded = tiny_loaded("llama")
    said: list[str] = []
    half, most = prefill_share.measure(loaded, shares=(0.5, 1.0), prompt_tokens=2500, progress=said.append)
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
    load = spilling.Load(streams=2, conversations=6, conversation_tokens=700)
    figures = spilling.measure(tiny_loaded("llama", 4), load, rounds=2)
    # 4 layers, K and V of 2 heads of 16 values in float32; the token of a reply of one is never fed.
    assert figures.spilled_bytes >= 2 * 6 * 700 * 4 * 2 * 2 * 16 * 4
    assert figures.num_intervals > 0
    assert 0 < figures.quiet_p50_s <= figures.quiet_p99_s
    assert figures.as_json()["p99_ratio"] == pytest.approx(figures.spilling_p99_s / figures.quiet_p99_s)


def test_json_is_one_value_and_nothing_else() -> None:
    command = ["kv-cache", "--layers", "2", "--seq-len", "32", "--heads", "2", "--head-dim", "64", "--json"]
    result = CliRunner().invoke(app, [*command, "--codecs", "raw,planes:4"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["codec"] for row in rows] == ["raw", "planes:4"]
    # Against 16 bits, and as much as is really allocated.
    assert rows[0]["full_bytes"] == 2 * 2 * 2 * 32 * 64 * 2
    assert rows[1]["allocated_bytes"] == pytest.approx(rows[1]["nbytes"], rel=0.02)


def test_a_quarter_of_the_memory_is_enough_with_the_ladder() -> None:
    load = ladder.Load(chats=8, turns=2, turn_tokens=280, reply_tokens=8, at_once=2)
    evict, stepping = ladder.measure(tiny_loaded("llama"), load)
    assert (evict.policy, stepping.policy) == ("evict", "ladder")
    for run in (evict, stepping):
        assert run.failed == 0
        assert run.requests == 16
        assert run.prompt_tokens == 8 * (280 + 568)
        assert run.samples >= 1
        # Not only when the sampler looked: never.
        assert run.sampled_peak_bytes <= run.peak_bytes <= run.limit_bytes
        assert run.budget_bytes < 0.3 * run.needed_bytes
    assert stepping.hit_rate > 1.2 * evict.hit_rate
    # 0.17 to 0.34: what passes take is measured at the start, and how far they overlap depends on the machine's load.
    assert stepping.hit_rate > 0.1
    assert stepping.stepped_down_spans > 0
    assert evict.stepped_down_spans == 0


@pytest.mark.parametrize("buffer_step", [1, 256], ids=["buffers of any size", "as on CUDA"])
def test_precision_changes_under_streams_that_all_finish(buffer_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "TOKENS_STEP", max(buffer_step, buffers.TOKENS_STEP))
    rows = requantize.measure(tiny_loaded("llama"), streams=3, prompt_tokens=600, reply_tokens=120)
    assert [row.precision for row in rows] == ["planes:8", "planes:4"]
    for row in rows:
        assert (row.finished, row.streams, row.computed_again) == (3, 3, 0)
        assert row.longest_pause_steps > 0
        assert row.freed_bytes > 0
        assert row.freed_bytes == pytest.approx(row.freed_said_bytes, rel=0.01)
        assert row.as_json()["share"] == row.seconds / row.prefill_s
