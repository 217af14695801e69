"""`kvstrata bench compare`: ours and its peers, the same scenarios, one report."""

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
    from kvstrata.bench.compare import Plan, Side, SideFigure
    from kvstrata.bench.compare_scenario import Outcome
    from kvstrata.bench.peers.base import Model

AS_THEY_COME_S = (30.0, 600.0)  # for each such side in all: quick, full
QUICK_MINUTES = 10.0
ENGINE_SHARE = 0.1  # of the time: for the engines alone, and the report


def compare(
    model: Annotated[
        Path | None,
        typer.Argument(exists=True, help="A GGUF file or a model's folder.", show_default="the default model"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report: README.md, results.json, plots.")] = Path(
        "comparison"
    ),
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Lengths, as a share of the full ones; 0: 1, with --quick 0.25.")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Quarter lengths, one round, one server for most.")] = False,
    rounds: Annotated[int, typer.Option(min=0, help="How often; 0: 3, with --quick 1.")] = 0,
    scenarios: Annotated[str, typer.Option(help="Which of the nine, with commas between.")] = "1,2,3,4,5,6,7,8,9",
    peers: Annotated[str, typer.Option(help="Only servers whose names begin so, with commas between.")] = "",
    gguf: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The model for llama.cpp, if MODEL is a folder.")
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(help="A llama-server to run instead of the prebuilt one.")
    ] = None,
    as_they_come: Annotated[
        bool | None,
        typer.Option(help="On a CPU run MLX's peers without our BLAS too.", show_default="in a full run"),
    ] = None,
    engine: Annotated[bool, typer.Option(help="On a CPU measure the engines alone too (node-llama-cpp).")] = True,
    minutes: Annotated[
        float, typer.Option(min=0, help="Longest that all may take; 0: 10 with --quick, else no limit.")
    ] = 0.0,
    note: Annotated[str, typer.Option(help="Put into the report, such as: busy machine.")] = "",
    report_of: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Only write the report of this results.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON value, too.")] = False,
) -> None:
    """Ours and every peer that make peers has installed, on the same model and the same prompts, in one report."""
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
        if engine and not peers and not data["about"]["interrupted"]:
            _write(data, out)  # what there is, before what may fail
            data["engine"] = _engine(found, quick=quick)
    _write(data, out)
    if as_json:
        typer.echo(json.dumps(data))
    typer.echo(f"The report is {out / 'README.md'}", err=True)


def random_model(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Where to write it; a new folder.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of the model whose tokenizer it gets.",
            show_default="the default model",
        ),
    ] = None,
    hybrid: Annotated[
        bool, typer.Option("--hybrid", help="As Qwen3-Next: three of four layers are recurrent.")
    ] = False,
) -> None:
    """Write a model of Qwen3-0.6B's shape, or a hybrid, with random bf16 weights: where no checkpoint can be had."""
    from kvstrata.bench.random_model import HYBRID, QWEN3_0_6B, write_random_model
    from kvstrata.models.default_model import ensure_default_model

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Name a new folder.")
    config = write_random_model(folder, tokenizer or ensure_default_model(), HYBRID if hybrid else QWEN3_0_6B)
    layers, tokens = config["num_hidden_layers"], config["vocab_size"]
    typer.echo(f"{folder} has {layers} layers of random weights and a vocabulary of {tokens:,} tokens.")


def _plan(*, quick: bool, minutes: float) -> Plan:
    from kvstrata.bench.compare import QUICK, Plan

    plan = QUICK if quick else Plan()
    minutes = minutes or (QUICK_MINUTES if quick else 0.0)
    total_s = 60 * minutes * (1 - ENGINE_SHARE) if minutes else None
    seed = str(time.time_ns() % 1_000_000)
    return replace(plan, total_s=total_s, seed=seed)


def _on_cpu() -> bool:
    from kvstrata.backend import device

    return device().backend == "cpu"


def _subject(model: Path | None, gguf: Path | None) -> Model:
    from kvstrata.bench.peers.subject import subject

    say("looking for the model, and writing it in float32 where peers need that")
    return subject(model, gguf, on_cpu=_on_cpu())


def _sides(only: str, llama_server: Path | None, as_they_come_s: float) -> list[Side]:
    """`as_they_come_s`: for MLX's peers without our BLAS; 0: none of them."""
    from kvstrata.backend import blas
    from kvstrata.bench.compare import Side
    from kvstrata.bench.peers.llama_cpp import LlamaCppPython, LlamaServer
    from kvstrata.bench.peers.mlx_lm import MlxLm
    from kvstrata.bench.peers.ours import Kvstrata
    from kvstrata.bench.peers.vllm_mlx import VllmMlx

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


def _measured(model: Model, sides: list[Side], plan: Plan, out: Path, note: str) -> dict[str, Any]:
    from kvstrata.bench.compare import compare as run
    from kvstrata.bench.compare import num_outcomes
    from kvstrata.cli.bench_progress import watched

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


def _about(model: Model, plan: Plan, note: str) -> dict[str, Any]:
    from kvstrata.backend import device, usable_cores

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


def _engine(model: Model, *, quick: bool) -> dict[str, Any]:
    """Ours and llama.cpp without servers. What fails here costs this table alone."""
    from kvstrata.bench.cpu import Load, Subject, measure
    from kvstrata.bench.cpu_process import find_peer
    from kvstrata.errors import KvstrataError

    if not _on_cpu() or model.gguf is None:
        return {"missing": "The engines alone are compared on a CPU, with a GGUF file."}
    prefill = 128 if quick else 512
    load = Load(activations=(16,), prefills=(prefill,), reply_tokens=16 if quick else 64, text_tokens=0)
    try:
        found = measure(Subject(model.gguf, model.ours), find_peer(), load, rounds=1 if quick else 5, progress=say)
    except KvstrataError as error:
        return {"missing": f"It failed: {error}"}
    return found.as_json()


def _write(data: dict[str, Any], out: Path) -> None:
    from kvstrata.bench.report import markdown
    from kvstrata.errors import ConfigError

    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    try:
        from kvstrata.bench.report_plots import plot_report

        plots = plot_report(data, out)
    except ConfigError as error:
        typer.echo(f"No plots: {error}", err=True)
        plots = []
    (out / "README.md").write_text(markdown(data, plots))
