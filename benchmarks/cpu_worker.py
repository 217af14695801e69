"""Processes of the CPU benchmark, kvstrata's and llama.cpp's. Both take the same commands, one at a time.

A command is one JSON line on stdin, its response one line on stdout; `peers/llama.mjs` describes them. Run as a program
this module is kvstrata's side, which decodes through the engine's own runner.

Only one side works at a time: a process responds before the benchmark sends the next command, and an idle process
blocks on a pipe. The CPU time that idle processes use anyway is measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from kvstrata.engine.profiling import max_chunk
from kvstrata.engine.request import Sampling
from kvstrata.engine.runner import BatchRow, ModelRunner, PendingStep
from kvstrata.engine.sampling import Sampler
from kvstrata.errors import KvstrataError
from kvstrata.kv.sequence_cache import SequenceCache
from kvstrata.models.cpu_options import CpuOptions
from kvstrata.models.load import LoadedModel, load
from kvstrata.models.probe import probe
from kvstrata.text.tokenizer import encode_prompt

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "peers" / "llama.mjs"
PEERS = ROOT / ".peers"  # where `make peers` puts llama.cpp


class SideFailed(KvstrataError):
    """A side failed to run a command."""


class WorkerProcess:
    """A running side, started by `running`."""

    def __init__(self, name: str, popen: subprocess.Popen[str]) -> None:
        self.name = name
        self._popen = popen
        self._system = psutil.Process(popen.pid)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        line = ""
        try:
            self._popen.stdin.write(json.dumps({"do": do, **command}) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            pass  # the process has ended; the empty line shows that too
        if not line:
            raise SideFailed(f"{self.name} ended before it answered. What it said is above")
        answer = json.loads(line)
        if "error" in answer:
            raise SideFailed(f"{self.name}: {answer['error']}")
        return answer

    def cpu_s(self) -> float:
        """Return the CPU time of all threads since the process started."""
        times = self._system.cpu_times()
        return times.user + times.system


@contextmanager
def running(name: str, command: Sequence[str], folder: Path | None = None) -> Iterator[WorkerProcess]:
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield WorkerProcess(name, popen)
        finally:
            # Both sides end at the end of their input. A side that is running a command is not waited for.
            assert popen.stdin is not None
            popen.stdin.close()
            try:
                popen.wait(timeout=5)
            except subprocess.TimeoutExpired:
                popen.kill()


def our_command() -> list[str]:
    return [sys.executable, "-m", "benchmarks.cpu_worker"]


@dataclass(frozen=True)
class LlamaCppPeer:
    """An installed llama.cpp, or in `missing` the advice how to install it."""

    command: tuple[str, ...] = ()
    folder: Path = PEERS
    missing: str = ""


def find_peer(folder: Path = PEERS) -> LlamaCppPeer:
    if not SCRIPT.is_file():
        return LlamaCppPeer(
            missing="llama.cpp is compared with in a checkout of kvstrata only. Next: clone it, make peers"
        )
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        return LlamaCppPeer(missing="llama.cpp is not installed. Next: make peers")
    node = shutil.which("node")
    if node is None:
        return LlamaCppPeer(
            missing="llama.cpp is installed for Node, which is not here. Next: install Node 20 or newer"
        )
    # Collect garbage so that it does not count as memory.
    return LlamaCppPeer((node, "--expose-gc", str(SCRIPT)), folder)


Answer = dict[str, Any]


class WorkerModel:
    """A loaded model that runs commands."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._model: Any = loaded.module
        self._runner = ModelRunner(loaded.module, probe(loaded.module))

    def ids(self, text: str) -> Answer:
        return {"ids": encode_prompt(self._loaded.tokenizer, text)}

    def prefill(self, ids: Sequence[int]) -> Answer:
        began_s = time.perf_counter()
        self._prefilled(ids, len(ids))
        return {"seconds": time.perf_counter() - began_s}

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answer:
        """Decode from the last token of every prompt. Only the steps are timed, not the prompts."""
        sampling = Sampling(temperature=0)
        rows = [
            BatchRow(
                id=i,
                cache=self._prefilled(prompt[:-1], len(prompt) + num_tokens),
                sampler=Sampler(sampling, prompt, self._loaded.vocab_size),
                tokens=prompt[-1:],
            )
            for i, prompt in enumerate(prompts)
        ]
        began_s = time.perf_counter()
        steps = self._steps(rows, num_tokens)
        took_s = time.perf_counter() - began_s
        self._runner.disband()
        return {"seconds": took_s, "replies": [list(reply) for reply in zip(*steps, strict=True)]}

    def logits(self, ids: Sequence[int], into: str) -> Answer:
        cache = self._runner.new_cache(len(ids))
        logits = self._model(mx.array([ids]), cache=cache.caches())[0]
        cache.end_pass(len(ids))
        found = np.array(logits.astype(mx.float32))
        found.tofile(into)
        return {"rows": found.shape[0], "columns": found.shape[1]}

    def _prefilled(self, ids: Sequence[int], capacity: int) -> SequenceCache:
        """Prefill in chunks of the size that an idle engine uses."""
        cache = self._runner.new_cache(capacity)
        for start in range(0, len(ids), max_chunk()):
            self._runner.prefill(cache, list(ids[start : start + max_chunk()]))
        return cache

    def _steps(self, rows: Sequence[BatchRow], num_tokens: int) -> list[list[int]]:
        """Decode with one step in flight while the step before is read, as in the engine."""
        later = [BatchRow(row.id, row.cache, (), row.sampler) for row in rows]
        flying: PendingStep = self._runner.launch(rows, None)
        found = []
        for _ in range(num_tokens - 1):
            following = self._runner.launch(later, flying)
            found.append(flying.sampled.read())
            flying = following
        found.append(flying.sampled.read())
        return found


def resident_bytes() -> int:
    """Return the resident memory of this process, mapped pages included."""
    return psutil.Process().memory_info().rss


def _load(path: str | None, weights: Any, activations: Any) -> tuple[WorkerModel, Answer]:
    _import_libraries()
    before = resident_bytes()
    loaded = load(path, cpu=CpuOptions(weights, activations))
    after = resident_bytes()
    answer = {"before_bytes": before, "after_bytes": after, "process_bytes": after, "weights": loaded.weights}
    return WorkerModel(loaded), answer


def _import_libraries() -> None:
    """Import the libraries that every model needs, before memory is measured, as llama.cpp's are."""
    for name in ("mlx_lm.utils", *(("kvstrata.packed.block",) if find_spec("numba") else ())):
        import_module(name)


def main() -> None:
    # Other output must not be read as a response.
    answers, sys.stdout = sys.stdout, sys.stderr
    mx.set_default_device(mx.cpu)
    side: WorkerModel | None = None
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        name = command.pop("do")
        try:
            if name == "load":
                side, answer = _load(**command)
            else:
                assert side is not None, "load comes first"
                commands = {"ids": side.ids, "prefill": side.prefill, "decode": side.decode, "logits": side.logits}
                answer = partial(commands[name], **command)()
        except KvstrataError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
