"""Runs of `kvstrata bench compare`: the same scenarios on kvstrata and every installed peer, alternating in rounds.

Only one server runs at a time. A failure of a peer costs only that figure: it is reported, the server is ended, and the
next scenario starts a new one. Results are saved after each scenario, so a crash loses none.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvstrata.bench.chat_client import ChatServer, PrefillTime
from kvstrata.bench.figures import Figure
from kvstrata.bench.load import UNWATCHED, LoadClient, Watch, calibrate
from kvstrata.bench.peers.base import ROOT, ComparedModel, Peer, ServerFailed, ServerProcess, ServerStart, free_port
from kvstrata.bench.scenario_run import Outcome, ScenarioRun, tokens_of
from kvstrata.bench.scenarios import PromptLengths, Scenario, scenarios
from kvstrata.errors import KvstrataError


@dataclass(frozen=True)
class ComparisonPlan:
    share: float = 1.0  # of the full prompt lengths
    rounds: int = 3
    fresh: bool = True  # a new server for each scenario, so that memory peaks are its own
    chosen: tuple[int, ...] = tuple(range(1, 10))
    scenario_s: float = 900.0  # time limit of one scenario
    start_s: float = 300.0
    total_s: float | None = None  # for all sides together; see Clock
    calibration: tuple[int, ...] = (64, 512, 2000, 4000)
    seed: str = "0"

    def scaled(self, share: float) -> ComparisonPlan:
        """Return the plan with other lengths, and calibration prompts scaled to match."""
        lengths = (max(16, round(length * share / self.share)) for length in self.calibration)
        return replace(self, share=share, calibration=tuple(dict.fromkeys(lengths)))


QUICK = ComparisonPlan(share=0.25, rounds=1, fresh=False, scenario_s=120.0, calibration=(32, 128, 512))
LEAST_S = 5.0  # minimum time for a scenario whose server starts late


@dataclass(frozen=True)
class Side:
    """A peer in a certain set-up. On a CPU the MLX peers run with our BLAS, and a second time without it."""

    peer: Peer
    name: str
    blas: Path | None = None
    budget_s: float | None = None  # all scenarios together
    as_it_comes: bool = False


@dataclass(frozen=True)
class SideFigure(Figure):
    name: str
    version: str
    missing: str
    known_by: str
    known_note: str
    as_it_comes: bool
    command: str = ""  # the last commands without and with a limit
    limited_command: str = ""
    prefill_time: PrefillTime | None = None


class SideServer:
    """The server of a side, started when needed and kept while it works."""

    def __init__(
        self, side: Side, model: ComparedModel, plan: ComparisonPlan, folder: Path, log: Path | None = None
    ) -> None:
        """`folder` is for the server's files. `log` receives its output, by default a file in `folder`."""
        self.side = side
        self.prefill_time: PrefillTime | None = None
        self.used_s = 0.0
        self._plan = plan
        self._folder = folder / side.name.replace(" ", "-").replace(",", "")
        self._folder.mkdir(parents=True)
        self._start = ServerStart(model, 0, self._folder / "home", blas=side.blas)
        self._log = log or self._folder / "log"
        self._process: ServerProcess | None = None
        self._mark = 0
        self.commands: dict[bool, str] = {}  # has a limit -> last command

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._start.port}"

    def chat_server(self, timeout_s: float) -> ChatServer:
        return ChatServer(self.url, self.side.peer.model_name(self._start.model), timeout_s=timeout_s)

    def ready(self, limit_tokens: int) -> None:
        """Ensure that a server with this limit runs. Without `fresh` a running one is kept if its limit is the same."""
        process = self._process
        if (
            process is not None
            and process.is_alive
            and not self._plan.fresh
            and limit_tokens == self._start.limit_tokens
        ):
            process.forget_peak()
            return
        self.end()
        shutil.rmtree(self._start.home, ignore_errors=True)
        self._start = replace(self._start, port=free_port(), limit_tokens=limit_tokens)
        self._launch()

    def compile(self) -> None:
        """Start the server once so that it compiles to disk. A failure to start is reported by its scenarios."""
        with suppress(ServerFailed, OSError):
            self.ready(0)
        self.end()

    def restart(self) -> None:
        """Restart the server with its files and at the same address."""
        self.end()
        self._launch()

    def _launch(self) -> None:
        self._start.home.mkdir(parents=True, exist_ok=True)
        peer = self.side.peer
        command = peer.command(self._start)
        self.commands[self._start.limit_tokens > 0] = self.without_paths(" ".join(command))
        self._process = ServerProcess(command, peer.environment(self._start), self._log)
        self._process.wait_ready(self.url + peer.ready_path, self._plan.start_s)

    def mark_log(self) -> None:
        """Remember the end of the log, from which `read_figures` reads."""
        if self._process is not None:
            self._mark = self._process.log_end()

    def read_figures(self) -> tuple[int | None, int | None, int | None]:
        """Return prompt tokens computed since the mark by the log, and the current peak and held bytes."""
        if self._process is None or not self._process.is_alive:
            return None, None, None
        log, peer = self._process.log_from(self._mark), self.side.peer
        return peer.prefilled_in(log), self._process.peak_bytes(), peer.held_bytes(self.url, log)

    def exit_reason(self) -> str:
        """Return why the server has ended, or an empty string while it runs."""
        if self._process is None or self._process.is_alive:
            return ""
        return f"the server is gone: {self._process.last_words()}"

    def without_paths(self, text: str) -> str:
        """Replace this machine's paths, because the report is read elsewhere."""
        text = text.replace(f"{sys.executable} -c from kvstrata.cli import main; main()", "kvstrata")
        for place, name in ((self._start.home, "HOME"), (ROOT, "."), (Path.home(), "~")):
            text = text.replace(str(place), name)
        return text.replace("./", "")

    def end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def compare(
    sides: Sequence[Side],
    model: ComparedModel,
    plan: ComparisonPlan,
    keep: Callable[[list[SideFigure], list[Outcome]], None],
    logs: Path,
    watch: Watch = UNWATCHED,
) -> None:
    """Run all scenarios. `keep` is called with all results so far after each of them; `logs` is a folder for server
    logs."""
    about = [_about(side, model) for side in sides]
    present = [side for side, figure in zip(sides, about, strict=True) if not figure.missing]
    outcomes: list[Outcome] = []
    keep(about, outcomes)
    with _side_servers(present, model, plan, logs) as servers:
        for each in servers:
            if each.side.peer.compiles:
                watch.say(f"{each.side.name}, compiling kernels where they are new")
                each.compile()
        clock = TimeBudget(plan, len(servers))
        for number, scenario, each in in_turns(servers, plan):
            watch.under(f"round {number + 1}").say(f"{each.side.name}, {scenario.number}. {scenario.title}")
            outcomes.append(watch.passed(_outcome(each, scenario, plan, number, clock.left_s(each, number))))
            about = [_with_news(figure, servers) for figure in about]
            keep(about, outcomes)


def num_outcomes(sides: Sequence[Side], model: ComparedModel, plan: ComparisonPlan) -> int:
    return sum(not side.peer.missing(model) for side in sides) * plan.rounds * len(plan.chosen)


def _about(side: Side, model: ComparedModel) -> SideFigure:
    peer = side.peer
    missing = peer.missing(model)
    version = "" if missing else peer.version()
    return SideFigure(side.name, version, missing, peer.known_by, peer.known_note, side.as_it_comes)


def _with_news(figure: SideFigure, servers: Sequence[SideServer]) -> SideFigure:
    for each in servers:
        if each.side.name == figure.name:
            plain, limited = each.commands.get(False, ""), each.commands.get(True, "")
            known = each.prefill_time or figure.prefill_time
            return replace(figure, command=plain, limited_command=limited, prefill_time=known)
    return figure


@contextmanager
def _side_servers(
    sides: Sequence[Side], model: ComparedModel, plan: ComparisonPlan, logs: Path
) -> Iterator[list[SideServer]]:
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvstrata-compare-", ignore_cleanup_errors=True) as folder:
        names = [side.name.replace(" ", "-").replace(",", "") for side in sides]
        servers = [
            SideServer(side, model, plan, Path(folder), logs / f"{name}.log")
            for side, name in zip(sides, names, strict=True)
        ]
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            yield servers
        finally:
            for each in servers:
                each.end()
            signal.signal(signal.SIGTERM, before)


def _leave(_number: int, _frame: object) -> None:
    """Turn SIGTERM into KeyboardInterrupt: servers have sessions of their own, so they must be ended before this
    process."""
    raise KeyboardInterrupt


Turn = tuple[int, Scenario, SideServer]


def in_turns(servers: Sequence[SideServer], plan: ComparisonPlan) -> Iterator[Turn]:
    """Yield the turns: by scenario if each gets a new server, else by side, whose server serves all scenarios that it
    can."""
    for number in range(plan.rounds):
        every = scenarios(PromptLengths(plan.share, f"{plan.seed} {number}"))
        chosen = [scenario for scenario in every if scenario.number in plan.chosen]
        # Alternate the first side as well.
        order = list(servers) if number % 2 == 0 else list(reversed(servers))
        for each in order:
            each.prefill_time = None
        if plan.fresh:
            for scenario in chosen:
                for each in order:
                    yield number, scenario, each
                    each.end()
        else:
            for each in order:
                # Scenarios that need a server of their own come last.
                for scenario in sorted(chosen, key=lambda scenario: scenario.limit_tokens > 0):
                    yield number, scenario, each
                each.end()


class TimeBudget:
    """The time budget. Without `fresh`, each round of a side gets an equal share of the remaining time when it
    begins."""

    def __init__(self, plan: ComparisonPlan, num_sides: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan = plan
        self._num_waiting = num_sides * plan.rounds
        self._clock = clock
        self._until_s = clock() + (math.inf if plan.total_s is None else plan.total_s)
        self._ends_s: dict[tuple[SideServer, int], float] = {}  # of each round of a side that has begun

    def left_s(self, each: SideServer, number: int) -> float:
        """Return the time that a side has left in this round; zero or less if it is used up."""
        now_s = self._clock()
        if (each, number) not in self._ends_s:
            share_s = (self._until_s - now_s) / (1 if self._plan.fresh else self._num_waiting)
            self._ends_s[each, number] = now_s + share_s
            self._num_waiting -= 1
        budget_s = math.inf if each.side.budget_s is None else each.side.budget_s - each.used_s
        return min(budget_s, self._ends_s[each, number] - now_s)


def _outcome(each: SideServer, scenario: Scenario, plan: ComparisonPlan, number: int, left_s: float) -> Outcome:
    """Run a scenario and return an outcome even if it fails; a failed server is not used again."""
    blank = Outcome(
        side=each.side.name,
        scenario=scenario.number,
        round=number + 1,
        requests=len(scenario.requests),
        answered=0,
        prompt_tokens=0,
        prefilled_reported=None,
        prefilled_logged=None,
        prefilled_inferred=None,
        known_by=each.side.peer.known_by,
        first_token_s=[],
        slowest_gap_s=None,
        reply_tokens=0,
        took_s=0.0,
        peak_bytes=None,
        held_bytes=None,
    )
    if left_s <= 0:
        return replace(blank, failure="not run: the time for this side was over")
    began_s = time.monotonic()
    try:
        each.ready(scenario.limit_tokens)
        if each.prefill_time is None and each.side.budget_s is None:
            each.prefill_time = _calibrated(each, plan, number, min(left_s, plan.scenario_s))
        left_s = max(LEAST_S, left_s - (time.monotonic() - began_s))
        found = asyncio.run(_measured(each, scenario, blank, min(plan.scenario_s, left_s)))
    except (ServerFailed, OSError) as error:
        found = replace(blank, failure=each.without_paths(f"the server did not start: {error}"))
    each.used_s += time.monotonic() - began_s
    if found.failure:
        each.end()
    return found


def _calibrated(each: SideServer, plan: ComparisonPlan, number: int, limit_s: float) -> PrefillTime | None:
    """Fit the prefill time of a server. None if it fails at that; its scenarios will then report the reason."""
    key = f"{plan.seed} {number} calibration"

    async def timed() -> PrefillTime:
        lengths = plan.calibration
        return await asyncio.wait_for(calibrate(each.chat_server(limit_s), key, lengths, 2), limit_s)

    with suppress(KvstrataError, TimeoutError):
        return asyncio.run(timed())
    return None


async def _measured(each: SideServer, scenario: Scenario, blank: Outcome, limit_s: float) -> Outcome:
    server, failure = each.chat_server(limit_s), ""
    began_s = time.perf_counter()
    async with server.open() as http:
        run = ScenarioRun(LoadClient(http, server), each.restart, each.mark_log)
        try:
            await asyncio.wait_for(run.walk(scenario), limit_s)
        except TimeoutError:
            failure = f"stopped after {limit_s:.0f} s"
    took_s = time.perf_counter() - began_s
    return _figures(each, run, blank, took_s, failure)


def _figures(each: SideServer, run: ScenarioRun, blank: Outcome, took_s: float, failure: str) -> Outcome:
    good = [(request, sent) for request, sent in run.sent if not sent.answer.failure]
    bad = [sent.answer.failure for _, sent in run.sent if sent.answer.failure]
    said = [failure, f"{len(bad)} of {len(run.sent)} requests failed: {bad[0]}" if bad else "", each.exit_reason()]
    total, reported, inferred = tokens_of(run, each.prefill_time)
    logged, peak_bytes, held_bytes = each.read_figures()
    ends = [sent.answer.ended_s for _, sent in good]
    begins = [sent.answer.began_s for _, sent in good]
    return replace(
        blank,
        answered=len(good),
        prompt_tokens=total,
        prefilled_reported=reported,
        prefilled_logged=logged,
        prefilled_inferred=inferred,
        first_token_s=[sent.answer.first_token_s for request, sent in good if request.part == "timed"],
        slowest_gap_s=run.slowest_gap_s,
        reply_tokens=sum(sent.answer.num_pieces for _, sent in good),
        took_s=max(ends) - min(begins) if good else took_s,
        peak_bytes=peak_bytes,
        held_bytes=held_bytes,
        failure=each.without_paths("; ".join(filter(None, said))),
        notes=run.notes,
    )
