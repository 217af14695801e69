"""`kvstrata bench compare`: scenarios are data, a peer that fails costs its own figures alone, a report tells all."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstrata.bench import chat_client
from kvstrata.bench.compare import QUICK, ComparisonPlan, Side, SideFigure, SideServer, TimeBudget, compare
from kvstrata.bench.peers.base import ComparedModel, Peer, ServerFailed, ServerProcess, ServerStart, free_port
from kvstrata.bench.peers.servers import Kvstrata, LlamaCppPython, LlamaServer, MlxLm, VllmMlx
from kvstrata.bench.report import markdown, plot_report, verdicts
from kvstrata.bench.scenario_run import Outcome, pause
from kvstrata.bench.scenarios import PromptLengths, Restart, scenarios
from kvstrata.cli.bench import app

MODEL = ComparedModel("words", "words", Path("nowhere"), Path("nowhere"), Path("words.gguf"), 8192, 100, 4)
SCRIPT = Path(__file__).with_name("chat_server.py")
# Texts of a twentieth: enough for every step, little enough for a test.
PLAN = replace(QUICK, share=0.05, scenario_s=20.0, start_s=20.0, calibration=(32, 128, 512), seed="test")


class Words(Peer):
    """The server in chat_server.py, as a peer."""

    name = "words"

    def __init__(self, mode: str = "good") -> None:
        super().__init__()
        self._mode = mode

    def missing(self, model: ComparedModel) -> str:  # noqa: ARG002
        return "" if self._mode != "missing" else "it is not installed. Next: make peers"

    def version(self) -> str:
        return "words 1.0"

    def command(self, start: ServerStart) -> list[str]:
        return [sys.executable, str(SCRIPT), str(start.port), self._mode, str(start.home)]

    def prefilled_in(self, log: str) -> int | None:
        return LlamaServer().prefilled_in(log)

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        return 1 << 20


def test_scenarios_are_the_same_for_the_same_key_and_all_nine_are_there() -> None:
    assert scenarios(PromptLengths(0.25, "a")) == scenarios(PromptLengths(0.25, "a"))
    assert scenarios(PromptLengths(0.25, "a")) != scenarios(PromptLengths(0.25, "b"))
    assert [scenario.number for scenario in scenarios(PromptLengths())] == list(range(1, 10))


def test_lengths_are_those_of_the_titles() -> None:
    one, _, three, four, five, six, seven, eight, nine = scenarios(PromptLengths())

    def words(scenario: Any, index: int, message: int = -1) -> int:
        return len(scenario.requests[index].ask.messages[message]["content"].split())

    assert [words(one, n) for n in range(3)] == [2000] * 3
    assert (words(three, 0, 0), words(four, 0, 0), len(four.requests), len(seven.requests)) == (400, 1500, 8, 32)
    assert words(eight, 1) == 3000
    assert [isinstance(step, Restart) for step in five.steps] == [False, False, True, False]
    assert len(nine.requests) == 12
    total = sum(len(str(m["content"]).split()) for request in nine.requests for m in request.ask.messages)
    assert 6500 < total < 7500
    first = sum(len(str(m["content"]).split()) for m in nine.requests[0].ask.messages)
    assert 900 < first < 1300
    need = sum(words(six, n) for n in range(len(six.requests)))
    assert six.limit_tokens == pytest.approx(need / 4, rel=0.1)


def test_other_lengths_have_unseen_prompts_to_match() -> None:
    assert QUICK.scaled(0.5).calibration == (64, 256, 1024)
    assert len(QUICK.scaled(0.01).calibration) >= 2


def answer(began_s: float, *times: float) -> chat_client.Answer:
    return chat_client.Answer(began_s, times, times[-1] if times else began_s)


def test_a_pause_is_the_longest_gap_while_the_other_waits() -> None:
    stream = answer(0, 1, 2, 3, 7, 8, 20)
    assert pause(stream, answer(2.5, 7.5)) == (4, "")
    # The gap of twelve was after it.
    assert pause(stream, answer(2.5, 30)) == (12, "the stream ended before the prompt had its first token")
    assert pause(answer(0, 1, 2), answer(5, 6))[0] is None


def run(sides: list[Side], plan: ComparisonPlan, logs: Path) -> tuple[list[SideFigure], list[Outcome]]:
    kept: list[tuple[list[SideFigure], list[Outcome]]] = []
    compare(sides, MODEL, plan, lambda about, outcomes: kept.append((about, list(outcomes))), logs)
    # Results are handed on after each scenario, so that none is lost.
    assert [len(outcomes) for _, outcomes in kept] == list(range(len(kept)))
    return kept[-1]


def test_every_scenario_runs_and_tokens_are_known_in_three_ways(tmp_path: Path) -> None:
    about, outcomes = run([Side(Words(), "words"), Side(Words("missing"), "absent")], PLAN, tmp_path)
    assert [side.missing for side in about] == ["", "it is not installed. Next: make peers"]
    found = {outcome.scenario: outcome for outcome in outcomes}
    assert {number: outcome.failure for number, outcome in found.items()} == dict.fromkeys(range(1, 10), "")
    assert all(outcome.answered == outcome.requests for outcome in outcomes)
    assert all(outcome.prefilled_reported == outcome.prefilled_logged for outcome in outcomes)
    # 100 words, whose role every prompt before had too; then one word each time.
    assert found[1].prefilled_reported == 100 + 2
    assert len(found[1].first_token_s) == 2
    # What it kept was there after the restart: only the follow-up is new.
    assert found[5].prefilled_reported is not None
    assert found[5].prefilled_reported < found[5].prompt_tokens / 2
    assert found[8].slowest_gap_s is not None
    if sys.platform == "linux":
        assert all(outcome.peak_bytes and outcome.peak_bytes > 1 << 20 for outcome in outcomes)
    inferred = found[9].prefilled_inferred
    assert inferred is not None
    assert inferred < found[9].prompt_tokens
    # No place of this machine goes into a report.
    assert about[0].command.endswith("good HOME")
    assert "prompt eval time" in (tmp_path / "words.log").read_text()


def test_a_peer_that_crashes_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    _, outcomes = run([Side(Words(mode), mode) for mode in ("crash", "good")], replace(PLAN, chosen=(1, 2)), tmp_path)
    crashed, good = ([each.failure for each in outcomes if each.side == name] for name in ("crash", "good"))
    assert all("the server is gone" in failure for failure in crashed)
    assert good == ["", ""]


def test_a_peer_that_hangs_is_stopped_and_reported(tmp_path: Path) -> None:
    _, (outcome,) = run([Side(Words("hang"), "hang")], replace(PLAN, chosen=(1,), scenario_s=1.0), tmp_path)
    assert outcome.failure == "stopped after 1 s"
    assert (outcome.answered, outcome.prefilled_reported) == (0, None)


def test_a_side_with_a_budget_stops_when_it_is_over(tmp_path: Path) -> None:
    plan = replace(PLAN, chosen=(1, 2), fresh=True)
    _, outcomes = run([Side(Words(), "words", budget_s=0.1)], plan, tmp_path)
    assert outcomes[1].failure == "not run: the time for this side was over"


def test_sides_share_the_time_that_there_is(tmp_path: Path) -> None:
    plan = replace(PLAN, total_s=1000.0, rounds=1)
    sides = [Side(Words(), "first"), Side(Words(), "second", budget_s=100.0), Side(Words(), "third")]
    servers = [SideServer(side, MODEL, plan, tmp_path) for side in sides]
    now_s = 0.0
    clock = TimeBudget(plan, len(servers), lambda: now_s)
    # A third, no more than it was given, and what the two before leave.
    assert [clock.left_s(each, 0) for each in servers] == [pytest.approx(left) for left in (1000 / 3, 100, 1000)]
    now_s = 334.0
    assert clock.left_s(servers[0], 0) < 0
    assert TimeBudget(PLAN, 1).left_s(servers[0], 0) == math.inf


def test_every_round_of_a_side_has_time_of_its_own(tmp_path: Path) -> None:
    plan = replace(PLAN, total_s=1000.0, rounds=2)
    first, second = (SideServer(Side(Words(), name), MODEL, plan, tmp_path) for name in ("first", "second"))
    now_s = 0.0
    clock = TimeBudget(plan, 2, lambda: now_s)
    left_s = []
    for each, number in ((first, 0), (second, 0), (second, 1), (first, 1)):
        left_s.append(clock.left_s(each, number))
        now_s += 200.0
    # What a round did not need is for those after it.
    assert left_s == [pytest.approx(left) for left in (1000 / 4, 800 / 3, 600 / 2, 400)]


def test_a_server_that_does_not_start_says_its_last_words(tmp_path: Path) -> None:
    process = ServerProcess([sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path / "log")
    with pytest.raises(ServerFailed, match="status 1: no such model"):
        process.wait_ready(f"http://127.0.0.1:{free_port()}/health", 20)
    process.end()


def test_peers_that_are_not_installed_say_so(tmp_path: Path) -> None:
    peers = [MlxLm(tmp_path), VllmMlx(tmp_path), LlamaServer(tmp_path), LlamaCppPython(tmp_path)]
    assert all("make peers" in peer.missing(MODEL) for peer in peers)
    assert "--gguf" in LlamaServer(tmp_path, Path(sys.executable)).missing(replace(MODEL, gguf=None))
    assert "--llama-server" in LlamaServer(tmp_path, tmp_path / "nothing").missing(MODEL)
    assert Kvstrata(tmp_path).missing(MODEL) == ""


def test_each_peer_is_started_with_its_own_limit() -> None:
    """Numbers of four bytes on MLX here, of two in llama.cpp."""
    start = ServerStart(replace(MODEL, token_values=1 << 18), 8000, Path("home"), limit_tokens=8, blas=Path("blas.so"))
    commands = {
        type(peer): " ".join(peer.command(start)) for peer in (Kvstrata(), MlxLm(), VllmMlx(), LlamaCppPython())
    }
    assert f"--hot-cache-size {8 << 20}" in commands[Kvstrata]
    assert f"--prompt-cache-bytes {8 << 20}" in commands[MlxLm]
    assert "--cache-memory-mb 8" in commands[VllmMlx]
    assert f"--cache_size {4 << 20}" in commands[LlamaCppPython]
    assert LlamaServer(binary=Path("llama-server")).command(start)[-4:] == ["-c", "8", "--cache-ram", "0"]
    assert MlxLm().environment(start)["LD_PRELOAD"] == "blas.so"
    assert "LD_PRELOAD" not in MlxLm().environment(replace(start, blas=None))
    assert Kvstrata().environment(start) == {}


def outcome(side: str, scenario: int, **changes: Any) -> dict[str, Any]:
    made = Outcome(
        side=side,
        scenario=scenario,
        round=1,
        requests=3,
        answered=3,
        prompt_tokens=6000,
        prefilled_reported=2002,
        prefilled_logged=None,
        prefilled_inferred=2100,
        known_by="reported",
        first_token_s=[0.1, 0.3],
        slowest_gap_s=None,
        reply_tokens=24,
        took_s=4.0,
        peak_bytes=300 << 20,
        held_bytes=50 << 20,
    )
    return replace(made, **changes).as_json()


def data() -> dict[str, Any]:
    peer = SideFigure(
        "mlx_lm.server", "mlx-lm 0.32.2", "", "reported", "", False, "mlx_lm server", "mlx_lm server --limit 1"
    )
    absent = SideFigure("vllm-mlx", "", "vllm-mlx is not installed. Next: make peers", "time", "why", False)
    about = {"date": "2026-01-01", "machine": "two cores", "model": "m", "command": "kvstrata bench compare"}
    theirs = {"prefilled_reported": 1001, "prefilled_inferred": 5900, "first_token_s": [0.4]}
    return {
        "about": {**about, "share": 0.25, "rounds": 1, "note": "busy machine", "interrupted": False},
        "sides": [replace(peer, name="kvstrata").as_json(), peer.as_json(), absent.as_json()],
        "results": [
            outcome("kvstrata", 1),
            outcome("kvstrata", 1, first_token_s=[0.4], round=2),
            outcome("mlx_lm.server", 1, **theirs),
            outcome("kvstrata", 7),
            outcome("mlx_lm.server", 7, took_s=3.0),
            outcome("kvstrata", 8, slowest_gap_s=0.2),
            outcome("mlx_lm.server", 8, failure="the server is gone: killed", answered=0, first_token_s=[]),
        ],
    }


def test_a_report_has_every_figure_and_says_what_is_missing_and_what_failed() -> None:
    text = markdown(data(), ["computed"])
    assert "0.25 of the full lengths" in text
    assert "busy machine" in text
    assert "| vllm-mlx | skipped: vllm-mlx is not installed. Next: make peers |" in text
    # Of two rounds: 100, 300 and 400 ms.
    assert "| kvstrata | 6,000 | 2,002 | 33.4% | 2,002 | 2,100 | 300 | 400 | 300 | 50.0 |" in text
    assert "mlx_lm.server: it reports 1001 computed tokens, time says 5900" in text
    assert "mlx_lm.server: the server is gone: killed" in text
    assert "computed-dark.svg" in text
    assert "### 2." not in text
    assert "- mlx_lm.server: `mlx_lm server --limit 1`" in text


def test_verdicts_say_where_we_are_behind() -> None:
    one, seven, eight = verdicts(data())
    assert "mlx_lm.server: computed tokens 2.00 x (behind), first token 0.75 x" in one
    assert "throughput 0.75 x (behind)" in seven
    assert "mlx_lm.server gave no whole figure" in eight


def test_plots_are_written_light_and_dark(tmp_path: Path) -> None:
    names = plot_report(data(), tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted(f"{name}-{theme}.svg" for name in names for theme in ("light", "dark"))
    assert "kvstrata" in (tmp_path / "first-token-dark.svg").read_text()


def test_a_report_can_be_written_again_from_its_json(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(data()))
    flags = ["compare", "--report-of", str(tmp_path / "results.json"), "--out", str(tmp_path / "again"), "--json"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == data()
    assert (tmp_path / "again" / "README.md").read_text().startswith("# kvstrata beside its peers")
