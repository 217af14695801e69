"""Simulated fleets: what must hold for any trace, and small ones worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from kvstrata.bench.block_lru import BlockLru
from kvstrata.bench.fleet import Case, Grid, Row, facts, fleet_of, measure, row_of, table
from kvstrata.bench.fleet_keys import TraceKeys, TraceSummary
from kvstrata.bench.fleet_policies import ROUTINGS, RoutingName, policy_of
from kvstrata.bench.fleet_run import Ask, Fleet, Machine, Outcome, simulate
from kvstrata.bench.lru import LruTree
from kvstrata.bench.trace import BLOCK_TOKENS, Asked, Trace, made_up, sessions, trace_of
from kvstrata.cli.bench import app
from kvstrata.fleet.summary import PromptKeys, Summary, unpacked

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)
BLOCK_BYTES = 1000.0
SLOW = Machine(prefill_rate=BLOCK_TOKENS, decode_rate=10.0, link_bytes_s=1e6, batch=2)  # a block a second


def of(prompts: Sequence[Sequence[int]], every_s: float = 1.0, reply_tokens: int = 20) -> Trace:
    asked = [Asked(every_s * at, np.array(ids, dtype=np.int32), None, reply_tokens) for at, ids in enumerate(prompts)]
    return trace_of("t", asked)


def run(trace: Trace, routing: RoutingName, fleet: Fleet, seed: int = 0) -> Outcome:
    return simulate(trace, fleet, policy_of(routing, fleet, seed))


def found(outcome: Outcome) -> int:
    return sum(outcome.own_tokens) + sum(outcome.remote_tokens)


class Told:
    """Sends each request where it is told, and writes down what it hears."""

    hears_reports = True

    def __init__(self, where: Sequence[int]) -> None:
        self._where = iter(where)
        self.loads: list[list[int]] = []
        self.reports: list[tuple[int, int]] = []  # replica, number of keys
        self.ends: list[int] = []

    def choose(self, ask: Ask) -> int:
        self.loads.append(list(ask.in_flight))
        return next(self._where)

    def ended(self, replica: int) -> None:
        self.ends.append(replica)

    def reported(self, replica: int, keys: frozenset[int]) -> None:
        self.reports.append((replica, len(keys)))


@given(PROMPTS, st.integers(1, 12))
def test_block_lru_holds_what_a_tree_holds(prompts: list[list[int]], max_blocks: int) -> None:
    # A prompt that ends inside a node uses all of it in the tree: let each end with a block of its own.
    trace = of([[*prompt, 100 + at] for at, prompt in enumerate(prompts)])
    tree, blocks = LruTree(max_blocks), BlockLru(max_blocks)
    for request, numbers in zip(trace.requests, trace.numbers, strict=True):
        ids = numbers.tolist()
        assert blocks.leading(ids) == tree.asked(b"root", request.blocks, request.time_s)
        before = len(blocks)
        change = blocks.use(ids)
        assert len(blocks) == before + change.num_filed - len(change.evicted) <= max_blocks


@settings(deadline=None)
@given(PROMPTS, st.sampled_from(ROUTINGS), st.integers(1, 5), st.integers(1, 12), st.integers(0, 12))
def test_no_fleet_finds_more_than_one_cache_without_bounds(
    prompts: list[list[int]], routing: RoutingName, count: int, memory: int, remote: int
) -> None:
    trace = of(prompts)
    fleet = Fleet(count, memory, BLOCK_BYTES, remote, SLOW, summary_keys=4)
    outcome = run(trace, routing, fleet)
    asked = sum(outcome.prompt_tokens)
    assert found(outcome) <= facts(trace).findable * asked + 1e-6
    assert found(outcome) + sum(outcome.computed_tokens) == asked
    assert (outcome.read_bytes > 0) == (sum(outcome.remote_tokens) > 0)
    if not remote:
        assert outcome.read_bytes == outcome.written_bytes == 0
    assert min(outcome.first_token_s) >= 0
    assert len(outcome.computed_tokens) == count


@settings(deadline=None)
@given(PROMPTS, st.integers(1, 12), st.integers(0, 12), st.integers(1, 8))
def test_one_replica_is_the_same_for_all_routings(
    prompts: list[list[int]], memory: int, remote: int, summary_keys: int
) -> None:
    trace = of(prompts)
    fleet = Fleet(1, memory, BLOCK_BYTES, remote, SLOW, summary_keys=summary_keys)
    first, *others = (run(trace, routing, fleet) for routing in ROUTINGS)
    assert all(other == first for other in others)


@settings(deadline=None, max_examples=30)
@given(PROMPTS, st.sampled_from(ROUTINGS), st.integers(2, 5))
def test_with_a_store_without_bounds_and_time_between_all_is_found_anywhere(
    prompts: list[list[int]], routing: RoutingName, count: int
) -> None:
    trace = of(prompts, every_s=1000.0)
    outcome = run(trace, routing, Fleet(count, 2, BLOCK_BYTES, 1000, SLOW))
    assert found(outcome) == pytest.approx(facts(trace).findable * sum(outcome.prompt_tokens))
    # Everything is written once, however many replicas ask for it.
    assert outcome.written_bytes == trace.num_distinct * BLOCK_BYTES


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    trace, grid = made_up(200), Grid([4], ["random", "two", "session", "prefix"], memory_bytes=[2_000_000_000])
    assert measure([trace], grid) == measure([trace], grid)
    assert measure([trace], grid).rows[0] != measure([trace], grid, seed=1).rows[0]


def test_time_and_load_by_hand() -> None:
    # Blocks take a second each, replies two: the second request waits for the first, the third has a replica alone.
    trace = of([[1, 2, 3], [1, 2, 4, 5], [9]], every_s=1.0)
    told = Told([0, 0, 1])
    outcome = simulate(trace, Fleet(2, 100, BLOCK_BYTES, 0, SLOW, report_s=0.0), told)
    assert outcome.own_tokens == [0, 2 * BLOCK_TOKENS, 0]
    assert outcome.first_token_s == [3.0, 4.0, 1.0]  # 0 to 3, 1 to 5, 2 to 3
    assert outcome.computed_tokens == [5 * BLOCK_TOKENS, BLOCK_TOKENS]
    assert outcome.in_flight_s == [5.0 + 6.0, 3.0]
    assert outcome.duration_s == 7.0
    assert told.loads == [[0, 0], [1, 0], [2, 0]]
    assert told.ends == [0, 1, 0]
    # 32 tokens apart in the first two blocks, 64 in the next two.
    assert told.reports == [(0, 40), (1, 16), (0, 56)]
    row = row_of("t", Case(2, "prefix", "raw", 1, 0, None, 0.0), outcome)
    assert row.computed_balance == pytest.approx(5 / 3)
    assert row.in_flight_balance == pytest.approx(11 / 7)


def test_a_full_batch_keeps_the_next_prompt_waiting() -> None:
    trace = of([[1], [2], [3]], every_s=0.0, reply_tokens=100)  # a second, then ten
    outcome = simulate(trace, Fleet(1, 100, BLOCK_BYTES, 0, SLOW), Told([0, 0, 0]))
    assert outcome.first_token_s == [1.0, 2.0, 12.0]


def test_reports_come_in_a_beat_bounded_and_only_of_changes() -> None:
    # Requests are computed at 4, 5 and 201; the first two are told in one report.
    trace = trace_of(
        "t", [Asked(at, np.array(ids, dtype=np.int32)) for at, ids in ((0, [1, 2, 3, 4]), (1, [1, 2, 3, 5]))]
    )
    trace = trace_of("t", [*trace.requests, Asked(200.0, np.array([1], dtype=np.int32))])
    told = Told([1, 1, 0])
    simulate(trace, Fleet(2, 100, BLOCK_BYTES, 0, SLOW, report_s=16.0, summary_keys=45), told)
    assert told.reports == [(1, 45), (0, 16)]


def test_what_was_evicted_is_reported_no_more() -> None:
    told = Told([0, 0])
    simulate(of([[1, 2], [3, 4]], every_s=100.0), Fleet(1, 3, BLOCK_BYTES, 0, SLOW, report_s=0.0), told)
    assert told.reports == [(0, 32), (0, 48)]


@settings(deadline=None, max_examples=30)
@given(PROMPTS, st.integers(1, 120))
def test_keys_and_summaries_are_those_of_real_prompts(prompts: list[list[int]], max_keys: int) -> None:
    """Blocks of 512 equal tokens: two differ from their first token on, as keys of a trace have it."""
    trace = of(prompts)
    keys, real_keys = TraceKeys(trace), PromptKeys()
    summary, real = TraceSummary(max_keys), Summary(max_keys)
    same: dict[int, int] = {}
    for request, numbers in zip(trace.requests, trace.numbers, strict=True):
        ids = np.repeat(request.blocks, BLOCK_TOKENS)[:-100]
        ours, theirs = keys.of_prompt(numbers.tolist(), len(ids)), real_keys.of(bytes(32), ids)
        assert [position for position, _ in ours] == [position for position, _ in theirs]
        for (_, key), (_, real_key) in zip(ours, theirs, strict=True):
            assert same.setdefault(key, real_key) == real_key
        summary.stored(ours)
        real.stored(bytes(32), ids, 0)
        assert {same[key] for key in summary.reported()} == unpacked(real.packed())
    assert len(set(same.values())) == len(same)


def test_the_store_is_read_where_that_is_sooner_than_computing() -> None:
    trace = of([[1, 2, 3, 4], [1, 2, 3, 4]], every_s=100.0)
    for link_bytes_s, is_read in ((1001.0, True), (1000.0, False)):  # a block takes a second to compute
        machine = Machine(BLOCK_TOKENS, 10.0, link_bytes_s, 2)
        outcome = simulate(trace, Fleet(2, 100, BLOCK_BYTES, 100, machine), Told([0, 1]))
        assert outcome.remote_tokens == [0, 4 * BLOCK_TOKENS * is_read]
        assert outcome.read_bytes == 4 * BLOCK_BYTES * is_read
        assert outcome.first_token_s[1] == pytest.approx(4000 / link_bytes_s)
        assert max(outcome.reads.values(), default=0) == is_read


def test_a_prompt_is_in_the_store_when_its_reply_ended() -> None:
    fast = Machine(1e6, 10.0, 1e9, 2)
    for reply_tokens, loaded in ((9, 2), (11, 0)):  # the next one comes after a second
        trace = of([[1, 2], [1, 2]], reply_tokens=reply_tokens)
        outcome = simulate(trace, Fleet(2, 100, BLOCK_BYTES, 100, fast), Told([0, 1]))
        assert outcome.remote_tokens[1] == loaded * BLOCK_TOKENS


def test_sessions_are_told_by_prompts_that_go_on() -> None:
    # All begin with the same system prompt (7). The last block of a prompt may be a part of one.
    prompts = [
        ([7, 1, 2], 3),
        ([7, 5, 6], 3),
        ([7, 1, 2, 3, 8], 4.5),
        ([7, 1, 2, 3, 9], 5),
        ([7, 30], 1.5),
        ([7, 31], 2),
    ]
    asked = [
        Asked(float(at), np.array(ids, dtype=np.int32), int(num_blocks * BLOCK_TOKENS))
        for at, (ids, num_blocks) in enumerate(prompts)
    ]
    assert sessions(trace_of("t", asked)) == (0, 1, 0, 0, 2, 3)


def test_a_session_stays_where_it_is_and_new_ones_go_where_few_are() -> None:
    trace = of([[1], [2], [1, 3], [2, 4], [1, 3, 5]], every_s=0.5)
    outcome = run(trace, "session", Fleet(2, 100, BLOCK_BYTES, 0, SLOW))
    assert outcome.own_tokens == [0, 0, BLOCK_TOKENS, BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    assert sorted(outcome.computed_tokens) == [2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]


def test_conversations_are_found_by_prefix_and_session_and_hardly_at_random() -> None:
    rows = {row.routing: row for row in measure([made_up(600)], Grid([8], memory_bytes=[20_000_000_000])).rows}
    assert rows["prefix"].hit_rate > 2 * rows["random"].hit_rate
    assert rows["session"].hit_rate > 1.5 * rows["round-robin"].hit_rate
    assert rows["prefix"].hit_rate >= rows["session"].hit_rate - 0.01
    assert rows["pooled"].hit_rate >= rows["prefix"].hit_rate - 0.01


def test_fewer_bits_hold_more_and_move_less() -> None:
    grid = Grid([4], ["prefix"], ["raw", "planes:8", "planes:4"], [4_000_000_000], [0, 10**15])
    rows = measure([made_up(250)], grid).rows
    alone, shared = [rows[0], rows[2], rows[4]], [rows[1], rows[3], rows[5]]
    rates = [row.hit_rate for row in alone]
    assert rates == sorted(rates)
    assert rates[2] > rates[0] + 0.01
    moved = [row.written_bytes for row in shared]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] / moved[2] == pytest.approx(16 / 4.1875)


def test_routings_that_hear_no_reports_run_once_for_all_kinds_of_them() -> None:
    grid = Grid([2], ["random", "prefix"], summary_keys=[10, None], report_s=[0.0, 5.0])
    cases = list(grid.cases())
    assert [case.routing for case in cases].count("random") == 1
    assert [(case.summary_keys, case.report_s) for case in cases if case.routing == "prefix"] == [
        (10, 0.0),
        (10, 5.0),
        (None, 0.0),
        (None, 5.0),
    ]


def test_pooled_is_one_machine_with_everything() -> None:
    case = Case(4, "pooled", "raw", 10**9, 0, None, 5.0)
    pooled, single = fleet_of(case, Machine()), fleet_of(Case(1, "random", "raw", 10**9, 0, None, 5.0), Machine())
    assert pooled.num_replicas == 1
    assert pooled.memory_blocks == 4 * single.memory_blocks
    assert pooled.machine == Machine(80_000.0, 50.0, 5e9, 256)


def test_what_is_known_of_a_trace() -> None:
    known = facts(of([[1, 2], [1, 2], [1, 3], [1, 4]]))
    assert known.findable == pytest.approx(4 / 8)
    assert known.hottest_share == pytest.approx(4 / 8)
    assert (known.num_requests, known.num_distinct, known.prompt_tokens) == (4, 4, 8 * BLOCK_TOKENS)


def write(path: Path, trace: Trace) -> Path:
    lines = [
        {"timestamp": 1000 * each.time_s, "input_length": each.prompt_tokens, "output_length": 50}
        | {"hash_ids": each.blocks.tolist()}
        for each in trace.requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command_prints_one_json_value_and_draws(tmp_path: Path) -> None:
    path, picture = write(tmp_path / "chat.jsonl", made_up(60)), tmp_path / "fleet.svg"
    given_args = ["fleet", str(path), "--replicas", "1,3", "--precision", "raw,planes:4", "--store", "0,1TB"]
    ran = CliRunner().invoke(app, [*given_args, "--json", "--plot", str(picture)])
    assert ran.exit_code == 0, ran.output
    figures = json.loads(ran.stdout)
    assert [each["trace"] for each in figures["traces"]] == ["chat"]
    assert len(figures["rows"]) == 2 * 2 * 2 * len(ROUTINGS)
    assert {(row["replicas"], row["routing"]) for row in figures["rows"]} == {
        (count, routing) for count in (1, 3) for routing in ROUTINGS
    }
    assert set(figures["rows"][0]) == set(Row.__dataclass_fields__)
    assert "prefix" in picture.read_text()


def test_the_table_has_a_line_for_each_fleet() -> None:
    args = ["fleet", "--made-up", "50", "--replicas", "2", "--routing", "prefix", "--summary-keys", "0,5"]
    ran = CliRunner().invoke(app, args)
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.strip().splitlines()
    assert [line.split()[2] for line in lines[4:-1]] == ["prefix", "prefix"]
    assert table(measure([made_up(50)], Grid([2], ["prefix"], summary_keys=[None, 5]))) == ran.stdout.strip()


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--made-up", "5", "--routing", "guess"],
        ["--made-up", "5", "--replicas", "0"],
        ["--made-up", "5", "--memory", "20%"],
        ["--made-up", "5", "--memory", "1kB"],
        ["--made-up", "5", "--store", "1kB"],
        ["--made-up", "5", "--report-s", "-1"],
        ["--made-up", "5", "--precision", "planes:99"],
    ],
)
def test_fleets_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["fleet", *wrong]).exit_code != 0
