"""All that a machine with an NVIDIA GPU is asked, stage by stage, each with a limit of time: make test-cuda.

    python -m tests.gpu.all FOLDER [--minutes 60] [--only doctor,right]

FOLDER gets what each stage says in a file of its own, as it comes, and summary.json. A stage that fails or takes too
long costs its own figures and no others. What there was no time for is said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import psutil

PYTHON = (sys.executable, "-u", "-m")
KVSTRATA = (*PYTHON, "kvstrata")
LEAST_S = 10.0  # a stage that would have less is not begun
END_S = 15.0  # to end by itself
LOOK_S = 0.5  # between two looks at what a stage has started


@dataclass(frozen=True)
class Stage:
    name: str
    limit_s: float
    command: tuple[str, ...]
    settings: tuple[tuple[str, str], ...] = ()  # of its environment
    makes: Path | None = None  # a folder that must not be there before


@dataclass(frozen=True)
class Result:
    name: str
    said: str  # "passed", or what went wrong
    seconds: float

    @property
    def passed(self) -> bool:
        return self.said == "passed"


def stages(folder: Path) -> list[Stage]:
    """What must be right first, then speed, then what takes long."""
    model = str(folder / "random-qwen3")
    limits = ("submit_refuses_impossible_requests_with_figures", "open_ended_reply_ends_at_the_memory_limit")
    memory = [f"tests/engine/test_engine.py::test_{name}" for name in limits]
    compare = ("--quick", "--share", "1", "--rounds", "1", "--minutes", "9", "--out", str(folder / "comparison"))
    return [
        Stage("doctor", 240, (*KVSTRATA, "doctor", "--report", str(folder / "doctor.json"))),
        Stage("right", 300, (*PYTHON, "tests.gpu.step", "--only", "hold,right,compiled")),
        Stage("requantize", 150, (*PYTHON, "benchmarks.stream_gaps", "requantize", "--random-weights")),
        Stage("soak", 480, (*PYTHON, "pytest", "-m", "slow", "-s", "tests/engine/test_soak.py"), (_minutes(5),)),
        Stage("memory", 150, (*PYTHON, "pytest", *memory)),
        Stage("speed", 300, (*PYTHON, "tests.gpu.step", "--only", "speed")),
        Stage("long", 300, (*PYTHON, "tests.gpu.step", "--only", "long,eight,far")),
        Stage("model", 60, (*PYTHON, "benchmarks.random_model", model), makes=Path(model)),
        Stage("compare", 600, (*KVSTRATA, "bench", "compare", model, *compare)),
        Stage("step", 120, (*PYTHON, "benchmarks.step", "--random-weights", "--prompt-tokens", "1024")),
        Stage("codecs", 120, (*PYTHON, "benchmarks.codecs", "--tokens", "32768", "--rounds", "7")),
        Stage("portable", 240, (*PYTHON, "tests.gpu.portable")),
        Stage("kernels", 600, (*PYTHON, "pytest", *sorted(map(str, Path("tests").glob("*/test_cuda*.py"))))),
    ]


def _minutes(number: int) -> tuple[str, str]:
    return "KVSTRATA_SOAK_MINUTES", str(number)


def run(stage: Stage, folder: Path, left_s: float) -> Result:
    """Ends the stage, and what it has started, when its time is over."""
    limit_s = min(stage.limit_s, left_s)
    if limit_s < LEAST_S:
        return Result(stage.name, "no time was left", 0.0)
    if stage.makes is not None:
        shutil.rmtree(stage.makes, ignore_errors=True)
    began_s = time.monotonic()
    with (folder / f"{stage.name}.log").open("w") as log:
        settings = os.environ | dict(stage.settings)
        family = Family(subprocess.Popen(stage.command, stdout=log, stderr=subprocess.STDOUT, env=settings))
        try:
            code = family.wait(limit_s)
            said = f"was ended after {limit_s:.0f} s" if code is None else "passed" if code == 0 else f"failed ({code})"
        finally:
            family.end()
    return Result(stage.name, said, time.monotonic() - began_s)


class Family:
    """A stage, and what it has started: servers have sessions of their own, and outlive a stage that was killed."""

    def __init__(self, stage: subprocess.Popen[bytes]) -> None:
        self._stage = stage
        self._seen: set[psutil.Process] = set()

    def wait(self, limit_s: float) -> int | None:
        """Its status; None: it still runs after so long."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            with suppress(psutil.NoSuchProcess):
                self._seen |= {*psutil.Process(self._stage.pid).children(recursive=True)}
            with suppress(subprocess.TimeoutExpired):
                return self._stage.wait(max(0.0, min(LOOK_S, until_s - time.monotonic())))
        return None

    def end(self) -> None:
        """The stage first gets time to end what it has started; whatever is left is killed."""
        if self._stage.poll() is None:
            self._stage.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._stage.wait(END_S)
        self._stage.kill()
        self._stage.wait()
        for each in self._seen:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def run_all(chosen: Sequence[Stage], folder: Path, minutes: float) -> list[Result]:
    """The summary is written after each, so that none is lost."""
    folder.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * minutes
    results: list[Result] = []
    for stage in chosen:
        result = run(stage, folder, until_s - time.monotonic())
        print(f"{result.name:12} {result.seconds:6.1f} s  {result.said}", flush=True)
        results.append(result)
        (folder / "summary.json").write_text(json.dumps([asdict(each) for each in results], indent=1))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0, help="for all stages together")
    parser.add_argument("--only", default="", help="some stages, with commas between")
    options = parser.parse_args()
    if not mx.cuda.is_available():
        parser.error(
            "MLX finds no NVIDIA GPU here: nvidia-smi must answer, and make setup must have installed CUDA's MLX"
        )
    known = {stage.name: stage for stage in stages(options.folder)}
    names = options.only.split(",") if options.only else [*known]
    if missing := [name for name in names if name not in known]:
        parser.error(f"no such stage: {', '.join(missing)}. There are: {', '.join(known)}")
    results = run_all([known[name] for name in names], options.folder, options.minutes)
    sys.exit(0 if all(result.passed for result in results) else 1)


if __name__ == "__main__":
    main()
