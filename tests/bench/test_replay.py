"""Replaying traces: made-up ones for what must hold always, the shared ones (where they are) for the figures."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from kvstrata.bench.replay import (
    KvstrataPolicy,
    LruPolicy,
    ReplayHits,
    ReplayRow,
    difference,
    replay,
    serve_all,
    serve_knowing_the_future,
)
from kvstrata.bench.trace import ReplayRequest, ReplayTrace, load_trace, made_up, trace_of
from kvstrata.cli.bench import app
from kvstrata.errors import ConfigError

SHARED = Path(__file__).parents[3] / "shared" / "traces"
NOISE = 0.002

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)


def of(prompts: list[list[int]]) -> ReplayTrace:
    return trace_of("t", [ReplayRequest(float(at), np.array(ids, dtype=np.int32)) for at, ids in enumerate(prompts)])


def write(path: Path, trace: ReplayTrace) -> Path:
    lines = [
        {"timestamp": 1000 * each.time_s, "input_length": 1, "output_length": 1, "hash_ids": each.blocks.tolist()}
        for each in trace.requests
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def assert_not_below_lru(row: ReplayRow) -> None:
    """By more than chance, that is: few requests decide at small sizes."""
    assert (row.above_lru is None) == (row.policy != "kvstrata")
    if row.above_lru is not None and row.above_lru_error is not None:
        assert row.above_lru >= -max(NOISE, 2 * row.above_lru_error)


def lru_by_hand(trace: ReplayTrace, num_blocks: int) -> int:
    """Over single blocks: the one used longest ago goes, of those used together the last one first."""
    used: dict[int, tuple[int, int]] = {}
    found = 0
    for at, numbers in enumerate(trace.numbers):
        found += sum(1 for _ in itertools.takewhile(used.__contains__, numbers.tolist()))
        used.update({block: (at, -depth) for depth, block in enumerate(numbers.tolist())})
        for block in sorted(used, key=used.__getitem__)[: max(0, len(used) - num_blocks)]:
            del used[block]
    return found


def best_by_search(trace: ReplayTrace, num_blocks: int) -> int:
    """Every set of blocks that could be kept after every request."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    for numbers in trace.numbers:
        asked = numbers.tolist()
        following: dict[frozenset[int], int] = {}
        for held, found in reachable.items():
            hits = found + sum(1 for _ in itertools.takewhile(held.__contains__, asked))
            there = held | set(asked)
            for keep in itertools.combinations(there, min(num_blocks, len(there))):
                following[frozenset(keep)] = max(following.get(frozenset(keep), 0), hits)
        reachable = following
    return max(reachable.values())


@given(PROMPTS, st.integers(1, 20))
def test_lru_over_the_tree_is_lru_over_blocks(prompts: list[list[int]], num_blocks: int) -> None:
    # A prompt that ends inside a node uses all of it in the tree: let each end with a block of its own.
    trace = of([[*prompt, 100 + at] for at, prompt in enumerate(prompts)])
    assert serve_all(trace, LruPolicy(num_blocks)).num_found == lru_by_hand(trace, num_blocks)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7), st.integers(1, 3))
def test_the_optimum_is_the_best_of_all_ways_to_keep_blocks(prompts: list[list[int]], num_blocks: int) -> None:
    trace = of(prompts)
    assert serve_knowing_the_future(trace, num_blocks).num_found == best_by_search(trace, num_blocks)


@given(PROMPTS, st.integers(1, 20), st.integers(0, 24))
def test_nothing_finds_more_than_the_optimum_or_keeps_more_than_it_may(
    prompts: list[list[int]], num_blocks: int, count_from: int
) -> None:
    trace = of(prompts)
    best = serve_knowing_the_future(trace, num_blocks, count_from)
    store = KvstrataPolicy(num_blocks)
    found = serve_all(trace, store, count_from)
    assert found.num_found <= best.num_found
    assert found.num_asked == best.num_asked == sum(len(prompt) for prompt in prompts[count_from:])
    assert store.tree.num_tokens <= num_blocks
    assert serve_all(trace, LruPolicy(num_blocks), count_from).num_found <= best.num_found


def test_with_room_for_all_everything_that_was_asked_before_is_found() -> None:
    trace = made_up(300)
    for row in replay(trace, [1.0], [16]):
        assert row.hit_rate == pytest.approx(1 - trace.num_distinct / trace.num_blocks)


def test_made_up_traffic_is_served_no_worse_than_by_lru_and_fewer_bits_find_more() -> None:
    rows = replay(made_up(1000), [0.02, 0.1], [16, 4])
    rates = {(row.budget, row.bits, row.policy): row.hit_rate for row in rows}
    for (budget, bits, policy), rate in rates.items():
        assert rate <= rates[budget, bits, "optimal"]
        assert rate <= rates[budget, 4, policy]
    for row in rows:
        assert_not_below_lru(row)
    assert rates[0.02, 16, "kvstrata"] > rates[0.02, 16, "lru"] + 0.01  # the optimum leaves room there


def test_blocks_with_one_id_after_different_beginnings_are_different() -> None:
    trace = of([[1, 5], [2, 5], [1, 5]])
    assert trace.num_distinct == 4
    assert serve_knowing_the_future(trace, 4).num_found == serve_all(trace, KvstrataPolicy(4)).num_found == 2


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    made = made_up(50)
    read = load_trace(write(tmp_path / name, made))
    assert read.name == "t"
    assert [each.blocks.tolist() for each in read.requests] == [each.blocks.tolist() for each in made.requests]
    assert read.num_distinct == made.num_distinct


@pytest.mark.parametrize(
    ("text", "what"),
    [("", "no requests"), ("{}\n", "Line 1"), ("[1]\n", "Line 1"), ('{"timestamp": 0, "hash_ids": [-1]}', "Line 1")],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        load_trace(path)
    with pytest.raises(ConfigError, match=r"cannot be read"):
        load_trace(tmp_path / "missing.jsonl")
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        load_trace(tmp_path / "bad.jsonl.gz")


def test_the_command_prints_one_json_value_and_draws(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl.gz", made_up(120))
    picture = tmp_path / "replay.png"
    given_args = ["replay", str(path), "--budgets", "5%,1GiB", "--bits", "16,4", "--json", "--plot", str(picture)]
    ran = CliRunner().invoke(app, given_args)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)
    assert {"trace", "budget", "policy", "bits", "hit_rate"} <= set(rows[0])
    assert {(row["trace"], row["policy"], row["bits"]) for row in rows} == {
        ("chat", policy, bits) for policy in ("kvstrata", "lru", "optimal") for bits in (16, 4)
    }
    assert {row["budget"] for row in rows} >= {0.05}
    assert len(rows) == 2 * 2 * 3
    assert picture.stat().st_size > 1000


def test_the_table_has_a_line_for_each_budget_and_precision(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", made_up(60))
    ran = CliRunner().invoke(app, ["replay", str(path), "--budgets", "10%,50%", "--bits", "16", "--held-out"])
    assert ran.exit_code == 0, ran.output
    head, *lines = ran.stdout.strip().splitlines()
    assert len(lines) == 2
    assert "above lru" in head
    assert all("±" in line for line in lines)


@pytest.mark.parametrize(
    "wrong", [["--budgets", "0%"], ["--budgets", "20 percents"], ["--bits", "32"], ["--bits", "x"], ["--budgets", "1B"]]
)
def test_budgets_and_bits_that_make_no_sense_are_refused(tmp_path: Path, wrong: list[str]) -> None:
    path = write(tmp_path / "chat.jsonl", made_up(20))
    assert CliRunner().invoke(app, ["replay", str(path), *wrong]).exit_code != 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize("name", ["synthetic_trace.jsonl", "agentic_trace.jsonl.gz"])
def test_on_a_held_out_half_no_worse_than_lru(name: str) -> None:
    rows = replay(load_trace(SHARED / name), [0.05], [16], held_out=True)
    rates = {row.policy: row.hit_rate for row in rows}
    assert rates["kvstrata"] <= rates["optimal"]
    for row in rows:
        assert_not_below_lru(row)


def test_the_error_of_a_difference_is_that_of_pairs() -> None:
    asked = (10,) * 400
    found = tuple(int(each) for each in np.random.default_rng(0).integers(0, 8, 400))
    same = difference(ReplayHits(found, asked), ReplayHits(found, asked))
    assert (same.rate, same.standard_error) == (0.0, 0.0)
    # One block more of every request: however much the requests differ, that is certain.
    certain = difference(ReplayHits(tuple(each + 1 for each in found), asked), ReplayHits(found, asked))
    assert certain.rate == pytest.approx(0.1)
    assert certain.standard_error == pytest.approx(0.0, abs=1e-12)
    # Two blocks more of every second request: 1 in the mean, 1 of deviation.
    half = difference(
        ReplayHits(tuple(each + at % 2 * 2 for at, each in enumerate(found)), asked), ReplayHits(found, asked)
    )
    assert half.rate == pytest.approx(0.1)
    assert half.standard_error == pytest.approx(0.1 / 400**0.5, rel=0.01)
