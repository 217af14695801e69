"""A GGUF file on a CPU: kvstrata with activations of 8, 16 and 32 bits and llama.cpp, alternating in one run.

Both get the same file, the same token ids and the same number of threads, and decode greedily. Each side is a process
of its own. Decoding is timed without the prompt, prefill without logits. Without llama.cpp only kvstrata is measured.

loaded    resident memory after loading the model less before, mapped pages included; libraries are loaded before.
          For llama.cpp without the V8 heap of Node, where its package keeps a second copy of the tokens
process   all resident memory of the process then, Node's or Python's included
KL        of each side to kvstrata with float32 activations, on a text. Changes made when converting the file (Q6_K,
          and plain weights that are quantized) count as llama.cpp's too
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import kvstrata.bench
from benchmarks.common import Rounds, command_line, run_app
from benchmarks.cpu_worker import LlamaCppPeer, SideFailed, WorkerProcess, find_peer, our_command, running
from kvstrata.bench.figures import MIB, Figure, Progress, in_turns, lay_out, median_ratio, silent
from kvstrata.bench.quality import kl_of
from kvstrata.cli.bench_options import Json, numbers, say, show
from kvstrata.models.cpu_options import CpuWeights
from kvstrata.models.default_model import ensure_default_gguf
from kvstrata.platform.device import usable_cores

LLAMA = "llama.cpp"
EXACT = 32  # activation bits of the reference
WARM_UP_TOKENS = 4
TEXT_WINDOW = 256  # tokens per pass
SAMPLE = Path(kvstrata.bench.__file__).with_name("sample.txt")
ACTIVATIONS = (8, 16, 32)


@dataclass(frozen=True)
class GgufModel:
    """The measured model: its GGUF file, and the name under which kvstrata loads it."""

    gguf: Path
    ours: str | None  # None: the default model, which was made from `gguf`


@dataclass(frozen=True)
class CpuLoad:
    weights: CpuWeights = "auto"
    activations: tuple[int, ...] = (8, 16, 32)
    batches: tuple[int, ...] = (1, 8)
    prefills: tuple[int, ...] = (512, 2048)
    prompt_tokens: int = 64  # per sequence, before decoding
    reply_tokens: int = 64
    text_tokens: int = TEXT_WINDOW  # for KL; 0: none
    text: str = field(default_factory=SAMPLE.read_text)


@dataclass(frozen=True)
class CpuRate(Figure):
    work: str
    side: str
    tokens_s: float
    ratio: float | None  # to llama.cpp, median of the rounds' ratios


@dataclass(frozen=True)
class SideFigures(Figure):
    side: str
    loaded_bytes: int
    loaded_ratio: float | None  # to llama.cpp
    process_bytes: int
    kl_mean: float | None  # to ours with float32 activations, in nats
    top1: float | None  # share of positions with the same most likely token
    weights: str = ""  # ours: the form that they are in


@dataclass(frozen=True)
class CpuFigures(Figure):
    model: str
    threads: int
    rounds: int
    peer: str  # version of llama.cpp; empty: none
    missing: str  # why there is none
    rates: list[CpuRate]
    sides: list[SideFigures]
    idle_share: float  # largest share of a core used by idle sides while another was timed


@dataclass(frozen=True)
class TimedTask:
    """A timed task that each side runs."""

    name: str
    do: str
    num_tokens: int
    command: Mapping[str, Any]

    def run(self, side: WorkerProcess) -> float:
        return float(side.ask(self.do, **self.command)["seconds"])

    def warm_up(self, side: WorkerProcess) -> None:
        """Run all shapes with few steps, so that kernels are compiled."""
        fewer = {"num_tokens": WARM_UP_TOKENS} if self.do == "decode" else {}
        side.ask(self.do, **{**self.command, **fewer})


def measure(
    subject: GgufModel, peer: LlamaCppPeer, load: CpuLoad | None = None, *, rounds: int = 5, progress: Progress = silent
) -> CpuFigures:
    load = load or CpuLoad()
    _compile(subject, load, progress)
    with ExitStack() as stack:
        loaded = _load_ours(stack, subject, load, progress)
        missing = peer.missing or _load_theirs(stack, subject, peer, loaded, progress)
        sides = list(loaded)
        ids: list[int] = sides[0].ask("ids", text=load.text)["ids"]
        works = _works(load, ids)
        for side in sides:
            progress(f"{side.name}, warming up")
            for work in works:
                work.warm_up(side)
        times, idle_share = _timed(works, sides, rounds, progress)
        return CpuFigures(
            model=subject.gguf.name,
            threads=usable_cores(),
            rounds=rounds,
            peer=next((answer["about"] for answer in loaded.values() if "about" in answer), ""),
            missing=missing,
            rates=_rates(works, sides, times),
            sides=_sides(loaded, _losses(load, ids, sides, progress)),
            idle_share=idle_share,
        )


Loaded = dict[WorkerProcess, dict[str, Any]]  # side -> response to its load command


def _compile(subject: GgufModel, load: CpuLoad, progress: Progress) -> None:
    """Compile kernels and convert the file in a separate process: the compiler's memory must not count as the
    model's."""
    progress("compiling kernels, and converting the file where it is new")
    with running("ours", our_command()) as side:
        side.ask("load", path=subject.ours, weights=load.weights, activations=load.activations[0])
        side.ask("decode", prompts=[[1, 2]], num_tokens=WARM_UP_TOKENS)


def _load_ours(stack: ExitStack, subject: GgufModel, load: CpuLoad, progress: Progress) -> Loaded:
    loaded: Loaded = {}
    for bits in load.activations:
        progress(f"loading {_name(bits)}")
        side = stack.enter_context(running(_name(bits), our_command()))
        loaded[side] = side.ask("load", path=subject.ours, weights=load.weights, activations=bits)
    return loaded


def _load_theirs(stack: ExitStack, subject: GgufModel, peer: LlamaCppPeer, loaded: Loaded, progress: Progress) -> str:
    """Load the model in llama.cpp and add it to `loaded`. Return the reason if that fails, else an empty string."""
    progress(f"loading {LLAMA}")
    side = stack.enter_context(running(LLAMA, peer.command, peer.folder))
    try:
        loaded[side] = side.ask("load", path=str(subject.gguf.absolute()), threads=usable_cores())
    except SideFailed as error:
        return str(error)
    return ""


def table(figures: CpuFigures) -> str:
    rates = lay_out(
        figures.rates,
        [
            ("", "<18", lambda row: row.work),
            ("", "<26", lambda row: row.side),
            ("tokens/s", ">10.1f", lambda row: row.tokens_s),
            ("ours/llama.cpp", ">16.2f", lambda row: _or_dash(row.ratio)),
        ],
    )
    sides = lay_out(
        figures.sides,
        [
            ("", "<26", lambda row: row.side),
            ("loaded MiB", ">12.1f", lambda row: row.loaded_bytes / MIB),
            ("ours/llama.cpp", ">16.2f", lambda row: _or_dash(row.loaded_ratio)),
            ("process MiB", ">13.1f", lambda row: row.process_bytes / MIB),
            ("KL mean", ">12.6f", lambda row: _or_dash(row.kl_mean)),
            ("same top", ">11.4f", lambda row: _or_dash(row.top1)),
        ],
    )
    notes = [
        f"{figures.model}, {figures.threads} threads on each side, medians of {figures.rounds} rounds in turns",
        f"waiting sides took at most {figures.idle_share:.1%} of a core while another was timed",
        *sorted({f"our weights: {row.weights.partition(';')[0]}" for row in figures.sides if row.weights}),
        figures.missing or f"{LLAMA}: {figures.peer}",
    ]
    return "\n".join([rates, "", sides, "", *notes])


def _or_dash(value: float | None) -> float | str:
    return "-" if value is None else value


def _name(bits: int) -> str:
    return f"ours, activations of {bits}"


def _works(load: CpuLoad, ids: Sequence[int]) -> list[TimedTask]:
    """Return the tasks. All prompts are cut from one repeated text; prompts of a batch begin at different places in
    it."""
    works: list[TimedTask] = []
    for rows in load.batches:
        starts = range(0, rows * load.prompt_tokens, load.prompt_tokens)
        prompts = [_cut(ids, start, load.prompt_tokens) for start in starts]
        command = {"prompts": prompts, "num_tokens": load.reply_tokens}
        name = "decode alone" if rows == 1 else f"decode at {rows}"
        works.append(TimedTask(name, "decode", rows * load.reply_tokens, command))
    lengths = load.prefills
    return works + [TimedTask(f"prefill of {n}", "prefill", n, {"ids": _cut(ids, 0, n)}) for n in lengths]


def _cut(ids: Sequence[int], start: int, length: int) -> list[int]:
    return list(islice(cycle(ids), start, start + length))


Times = dict[tuple[str, str], list[float]]  # by work and side, in seconds


def _timed(
    works: Sequence[TimedTask], sides: Sequence[WorkerProcess], rounds: int, progress: Progress
) -> tuple[Times, float]:
    idle_share = 0.0

    def timed(work: TimedTask, side: WorkerProcess) -> float:
        nonlocal idle_share
        waiting = [each for each in sides if each is not side]
        before_s = sum(each.cpu_s() for each in waiting)
        took_s = work.run(side)
        idle_share = max(idle_share, (sum(each.cpu_s() for each in waiting) - before_s) / took_s)
        return took_s

    keys = [(work, side) for work in works for side in sides]
    cases: dict[str, Callable[[], float]] = {
        f"{work.name}, {side.name}": lambda work=work, side=side: timed(work, side) for work, side in keys
    }
    found = in_turns(cases, rounds, progress)
    return {(work.name, side.name): found[f"{work.name}, {side.name}"] for work, side in keys}, idle_share


def _rates(works: Sequence[TimedTask], sides: Sequence[WorkerProcess], times: Times) -> list[CpuRate]:
    rows = []
    for work in works:
        theirs = times.get((work.name, LLAMA))
        for side in sides:
            took = times[work.name, side.name]
            ratio = median_ratio(theirs, took) if theirs and side.name != LLAMA else None
            rows.append(CpuRate(work.name, side.name, work.num_tokens / statistics.median(took), ratio))
    return rows


Losses = dict[str, tuple[float, float]]  # by side: KL and same first choice


def _losses(load: CpuLoad, ids: Sequence[int], sides: Sequence[WorkerProcess], progress: Progress) -> Losses:
    """Return KL and top-1 agreement of each side over windows of the text; empty if the float32 side is not
    measured."""
    exact = next((side for side in sides if side.name == _name(EXACT)), None)
    if exact is None or not load.text_tokens:
        return {}
    kl: dict[str, list[np.ndarray]] = {side.name: [] for side in sides}
    same: dict[str, list[np.ndarray]] = {side.name: [] for side in sides}
    text = list(ids[: load.text_tokens])
    with tempfile.TemporaryDirectory(prefix="kvstrata-") as folder:
        for start in range(0, len(text), TEXT_WINDOW):
            window = text[start : start + TEXT_WINDOW]
            progress(f"KL, tokens {start} to {start + len(window)}")
            reference = _logprobs(exact, window, Path(folder))
            for side in sides:
                other = reference if side is exact else _logprobs(side, window, Path(folder))
                # A side may have more ids than the other; no token uses those.
                num_ids = min(reference.shape[-1], other.shape[-1])
                kl[side.name].append(kl_of(reference[:, :num_ids], other[:, :num_ids]))
                same[side.name].append(reference.argmax(-1) == other.argmax(-1))
    return {name: (float(np.concatenate(kl[name]).mean()), float(np.concatenate(same[name]).mean())) for name in kl}


def _logprobs(side: WorkerProcess, ids: Sequence[int], folder: Path) -> np.ndarray:  # [tokens, vocab]
    path = folder / "logits"
    answer = side.ask("logits", ids=list(ids), into=str(path))
    logits = np.fromfile(path, np.float32).reshape(answer["rows"], answer["columns"])
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _sides(loaded: Loaded, losses: Losses) -> list[SideFigures]:
    grown = {side.name: answer["after_bytes"] - answer["before_bytes"] for side, answer in loaded.items()}
    theirs = grown.get(LLAMA)
    rows = []
    for side, answer in loaded.items():
        kl, top1 = losses.get(side.name, (None, None))
        rows.append(
            SideFigures(
                side=side.name,
                loaded_bytes=grown[side.name],
                loaded_ratio=grown[side.name] / theirs if theirs and side.name != LLAMA else None,
                process_bytes=answer["process_bytes"],
                kl_mean=kl,
                top1=top1,
                weights=answer.get("weights", ""),
            )
        )
    return rows


app = command_line()


@app.command()
def main(
    model: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="A GGUF file.", show_default="the default model's"),
    ] = None,
    cpu_weights: Annotated[CpuWeights, typer.Option(help="As for kvstrata serve.")] = "auto",
    activations: Annotated[str, typer.Option(help="Bits of kvstrata's activations, with commas between.")] = "8,16,32",
    batches: Annotated[str, typer.Option(help="Sequences that decode at once, with commas between.")] = "1,8",
    prefills: Annotated[str, typer.Option(help="Tokens of prompts, with commas between.")] = "512,2048",
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 64,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text of the prompts.", show_default="a short one")
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the text for the KL divergence; 0: none.")] = 256,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Measure decode, prefill and memory on a CPU beside llama.cpp (make peers): same file, same token ids."""
    load = CpuLoad(
        weights=cpu_weights,
        activations=_bits(activations),
        batches=numbers(batches, 1),
        prefills=numbers(prefills, 1),
        reply_tokens=reply_tokens,
        text_tokens=text_tokens,
        text=(text or SAMPLE).read_text(),
    )
    subject = GgufModel(ensure_default_gguf(), None) if model is None else GgufModel(model, str(model.absolute()))
    peer = find_peer()
    if peer.missing:
        typer.echo(f"{peer.missing}. Ours alone:", err=True)
    show(measure(subject, peer, load, rounds=rounds, progress=say), table, as_json=as_json)


def _bits(text: str) -> tuple[int, ...]:
    chosen = numbers(text, min(ACTIVATIONS), max(ACTIVATIONS))
    if not set(chosen) <= set(ACTIVATIONS):
        raise typer.BadParameter(f"'{text}' is not a list of 8, 16 or 32, with commas between")
    return chosen


if __name__ == "__main__":
    run_app(app)
