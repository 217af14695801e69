"""`kvstrata bench compare`: kvstrata and its peers in the same scenarios, in one report."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.bench_options import numbers, say, words
from kvstrata.errors import ConfigError

if TYPE_CHECKING:
    from kvstrata.bench.compare import ComparisonPlan, Side, SideFigure
    from kvstrata.bench.peers.base import ComparedModel
    from kvstrata.bench.scenario_run import Outcome

AS_THEY_COME_S = (30.0, 600.0)  # total per such side: quick, full
QUICK_MINUTES = 10.0
REPORT_SHARE = 0.02  # of the time budget


def compare(
    model: Annotated[
        Path | None,
        typer.Argument(exists=True, help="A GGUF file or a model's folder.", show_default="the default model"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report: README.md, results.json, plots.")] = Path(
        "comparison"
    ),
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Prompt lengths, as a share of the full ones; 0: 1, with --quick 0.25.")
    ] = 0.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Quarter lengths, one round, and one server for most scenarios.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds; 0: 3, with --quick 1.")] = 0,
    scenarios: Annotated[str, typer.Option(help="Numbers of scenarios, with commas between.")] = "1,2,3,4,5,6,7,8,9",
    peers: Annotated[str, typer.Option(help="First letters of the servers to run, with commas between.")] = "",
    gguf: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The model for llama.cpp, if MODEL is a folder.")
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="A llama-server to run instead of the prebuilt one.")
    ] = None,
    as_they_come: Annotated[
        bool | None,
        typer.Option(help="On a CPU, also run the peers on MLX without our BLAS.", show_default="in a full run"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Time limit in minutes; 0: 10 with --quick, else none.")] = 0.0,
    note: Annotated[str, typer.Option(help="Note for the report, such as: busy machine.")] = "",
    report_of: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Only write the report of this results.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON value, too.")] = False,
) -> None:
    """Compare kvstrata with each peer that `make peers` has installed: same model, same prompts, one report."""
    if report_of is not None:
        data = json.loads(report_of.read_text())
    else:
        chosen = numbers(scenarios, 1, 9)
        plan = _plan(quick=quick, minutes=minutes)
        plan = replace(plan, rounds=rounds or plan.rounds, chosen=chosen)
        plan = plan.scaled(share) if share else plan
        found = _subject(model, gguf)
        bare = not quick if as_they_come is None else as_they_come
        sides = _sides(peers, llama_server, AS_THEY_COME_S[0 if quick else 1] if bare else 0.0)
        data = _measured(found, sides, plan, out, note)
    _write(data, out)
    if as_json:
        typer.echo(json.dumps(data))
    typer.echo(f"The report is {out / 'README.md'}", err=True)


def _plan(*, quick: bool, minutes: float) -> ComparisonPlan:
    from kvstrata.bench.compare import QUICK, ComparisonPlan

    plan = QUICK if quick else ComparisonPlan()
    minutes = minutes or (QUICK_MINUTES if quick else 0.0)
    total_s = 60 * minutes * (1 - REPORT_SHARE) if minutes else None
    seed = str(time.time_ns() % 1_000_000)
    return replace(plan, total_s=total_s, seed=seed)


def _on_cpu() -> bool:
    from kvstrata.platform.device import device

    return device().backend == "cpu"


def _subject(model: Path | None, gguf: Path | None) -> ComparedModel:
    from kvstrata.bench.peers.models import subject

    say("looking for the model, and writing it in float32 where peers need that")
    return subject(model, gguf, on_cpu=_on_cpu())


def _sides(only: str, llama_server: Path | None, as_they_come_s: float) -> list[Side]:
    """Return the sides. `as_they_come_s` is the time for each MLX peer without our BLAS; 0 leaves those out."""
    from kvstrata.bench.compare import Side
    from kvstrata.bench.peers.servers import Kvstrata, LlamaCppPython, LlamaServer, MlxLm, VllmMlx
    from kvstrata.platform.blas import blas

    library = blas().path if _on_cpu() else None
    on_mlx = [MlxLm(), VllmMlx()]
    sides = [
        Side(Kvstrata(), Kvstrata.name),
        *(Side(peer, peer.name, library) for peer in on_mlx),
        Side(LlamaServer(binary=llama_server), LlamaServer.name),
        Side(LlamaCppPython(), LlamaCppPython.name),
    ]
    if library is not None and as_they_come_s:
        sides += [Side(peer, f"{peer.name}, as it comes", budget_s=as_they_come_s, as_it_comes=True) for peer in on_mlx]
    prefixes = tuple(words(only)) if only else ("",)
    return [side for side in sides if side.name.startswith(prefixes)]


def _measured(model: ComparedModel, sides: list[Side], plan: ComparisonPlan, out: Path, note: str) -> dict[str, Any]:
    from kvstrata.bench.compare import compare as run
    from kvstrata.bench.compare import num_outcomes
    from kvstrata.cli.bench_options import watched

    for side in sides:
        if missing := side.peer.missing(model):
            typer.echo(f"{side.name} is skipped: {missing}", err=True)
    data: dict[str, Any] = {"about": _about(model, plan, note), "sides": [], "results": []}
    out.mkdir(parents=True, exist_ok=True)

    def keep(about: list[SideFigure], outcomes: list[Outcome]) -> None:
        data.update(sides=[side.as_json() for side in about], results=[each.as_json() for each in outcomes])
        partial = out / "results.json.part"
        partial.write_text(json.dumps(data, indent=1))
        partial.rename(out / "results.json")

    with watched(num_outcomes(sides, model, plan)) as watch:
        try:
            run(sides, model, plan, keep, out / "logs", watch)
        except KeyboardInterrupt:
            data["about"]["interrupted"] = True
    return data


def _about(model: ComparedModel, plan: ComparisonPlan, note: str) -> dict[str, Any]:
    from kvstrata.platform.device import device, usable_cores

    machine = device()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{machine.name}, back-end {machine.backend}, {usable_cores()} cores, "
        f"{machine.memory_bytes / 2**30:.0f} GiB of memory",
        "model": model.name,
        "command": shlex.join(["kvstrata", *sys.argv[1:]]),
        "share": plan.share,
        "rounds": plan.rounds,
        "note": note,
        "interrupted": False,
    }


def _write(data: dict[str, Any], out: Path) -> None:
    from kvstrata.bench.report import markdown

    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    try:
        from kvstrata.bench.report import plot_report

        plots = plot_report(data, out)
    except ConfigError as error:
        typer.echo(f"No plots: {error}", err=True)
        plots = []
    (out / "README.md").write_text(markdown(data, plots))
