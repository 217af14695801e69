"""Chats that need four times the available memory: step-down of precision, beside eviction at full precision.

Both policies get the same load, one after the other: every chat runs its first turn, then all of them return for more.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import mlx.core as mx
import typer

from benchmarks.common import Prompt, Stream, Streams, command_line, greedy, random_prompt, run_app, running
from kvstrata.bench.figures import MIB, Figure, Progress, lay_out, silent
from kvstrata.cli.bench_options import Json, Model, say, show
from kvstrata.engine.budget import least_token_bytes, sealed_pairs
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.memory_plan import limit_for
from kvstrata.engine.profiling import PassShape, max_chunk, remembered_scratch
from kvstrata.engine.runner import ModelRunner
from kvstrata.kv.layout import Layout, arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel, load
from kvstrata.models.probe import probe
from kvstrata.platform.device import device

SAMPLE_S = 0.1  # 10 Hz


@dataclass(frozen=True)
class LadderLoad:
    chats: int = 12
    turns: int = 3
    turn_tokens: int = 192  # added to the prompt by each turn
    reply_tokens: int = 24
    at_once: int = 2  # requests that run together

    @property
    def chat_tokens(self) -> int:
        """Return the length of one chat at its end."""
        return self.turns * (self.turn_tokens + self.reply_tokens)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens computed if every cached token is reused."""
        return self.chats * self.turns * (self.turn_tokens + self.reply_tokens)


@dataclass(frozen=True)
class LadderRun(Figure):
    policy: str  # "evict" at full precision, or "ladder"
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    limit_bytes: int  # of all memory: weights, KV and activations
    budget_bytes: int  # of KV
    needed_bytes: int  # of KV, to keep all of it at full precision
    sampled_peak_bytes: int  # active memory, looked at ten times a second
    peak_bytes: int  # the allocator's own peak
    samples: int
    stepped_down_spans: int
    evicted_tokens: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "hit_rate": self.hit_rate}


class PeakMemorySampler:
    """Sampler of the allocator's active memory, at a steady rate on a thread of its own."""

    def __init__(self, others_bytes: int) -> None:
        self._others_bytes = others_bytes
        self.peak_bytes = 0
        self.num_samples = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="memory-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, mx.get_active_memory() - self._others_bytes)
            self.num_samples += 1
            if ended.wait(SAMPLE_S):
                return


def measure(
    loaded: LoadedModel, load: LadderLoad, *, share: float = 0.25, progress: Progress = silent
) -> list[LadderRun]:
    """Run both policies under a memory limit that leaves KV `share` of the bytes that the load needs at full
    precision."""
    mx.eval(arrays_in(loaded.module))  # lazy arrays can be evaluated on this thread only
    layout = probe(loaded.module, None)
    limit_bytes = _limit_bytes(loaded, layout, load, share)
    runs = []
    for policy in ("evict", "ladder"):
        progress(policy)
        runs.append(_run(loaded, load, policy, limit_bytes, _needed_bytes(layout, load)))
    return runs


def table(rows: Sequence[LadderRun]) -> str:
    budget, needed = rows[0].budget_bytes / MIB, rows[0].needed_bytes / MIB
    return lay_out(
        rows,
        [
            ("policy", "<9", lambda row: row.policy),
            ("hit rate", ">9.1%", lambda row: row.hit_rate),
            ("failed", ">8", lambda row: row.failed),
            ("sampled MiB", ">13.1f", lambda row: row.sampled_peak_bytes / MIB),
            ("peak MiB", ">10.1f", lambda row: row.peak_bytes / MIB),
            ("limit MiB", ">11.1f", lambda row: row.limit_bytes / MIB),
            ("seconds", ">9.1f", lambda row: row.seconds),
        ],
        f"KV budget {budget:.1f} MiB; the load needs {needed:.1f} MiB at full precision",
    )


def _limit_bytes(loaded: LoadedModel, layout: Layout, load: LadderLoad, share: float) -> int:
    storage = KvConfig(dynamic=True)
    shape = PassShape(
        rows=load.at_once,
        vocab_size=loaded.vocab_size,
        max_context_tokens=load.chat_tokens,
        chunk_tokens=max_chunk(),
        pairs=sealed_pairs(layout, storage),
    )
    return limit_for(
        int(share * _needed_bytes(layout, load)),
        loaded.weight_bytes,
        remembered_scratch(loaded, ModelRunner(loaded.module, layout), shape),
        token_bytes=least_token_bytes(layout, storage),
        context_tokens=load.chat_tokens,
        backend=device().backend,
    )


def _needed_bytes(layout: Layout, load: LadderLoad) -> int:
    return load.num_tokens * layout.token_bytes + load.chats * layout.fixed_bytes


def _run(loaded: LoadedModel, load: LadderLoad, policy: str, limit_bytes: int, needed_bytes: int) -> LadderRun:
    gc.collect()
    # Other memory of the process is not counted.
    others_bytes = max(0, mx.get_active_memory() - loaded.weight_bytes)
    # No longer context than a chat has: one policy must not get less KV because it could hold longer ones.
    limits = EngineLimits(
        memory_bytes=limit_bytes,
        max_running=load.at_once,
        max_waiting=load.chats,
        context_tokens=load.chat_tokens,
    )
    with running(Engine(loaded, limits, Metrics(), KvConfig(dynamic=policy == "ladder"))) as engine:
        mx.clear_cache()
        mx.reset_peak_memory()
        sampler, began_s = PeakMemorySampler(others_bytes), time.perf_counter()
        with sampler.running():
            streams = _talk(engine, loaded, load)
        seconds = time.perf_counter() - began_s
        peak_bytes = mx.get_peak_memory() - others_bytes
        usage = engine.ask_cache(lambda cache: cache.usage()).result()
    return LadderRun(
        policy=policy,
        requests=len(streams),
        failed=sum(bool(stream.failure) for stream in streams),
        prompt_tokens=sum(stream.usage.prompt_tokens for stream in streams),
        cached_tokens=sum(stream.usage.cached_tokens for stream in streams),
        limit_bytes=limit_bytes,
        budget_bytes=usage.budget_bytes,
        needed_bytes=needed_bytes,
        sampled_peak_bytes=sampler.peak_bytes,
        peak_bytes=peak_bytes,
        samples=sampler.num_samples,
        stepped_down_spans=usage.counters["stepped_down_spans"],
        evicted_tokens=usage.counters["evicted_tokens"],
        seconds=seconds,
    )


def _talk(engine: Engine, loaded: LoadedModel, load: LadderLoad) -> list[Stream]:
    rng = random.Random(1)
    chats: list[Prompt] = [()] * load.chats  # all turns so far, replies included
    streams: list[Stream] = []
    for _ in range(load.turns):
        turn = Streams(engine)
        for number, before in enumerate(chats):
            chats[number] = before + random_prompt(rng, loaded, load.turn_tokens)
            turn.start(greedy(chats[number], load.reply_tokens))
        turn.wait()
        chats = [prompt + tuple(stream.ids) for prompt, stream in zip(chats, turn, strict=True)]
        streams += turn
    return streams


app = command_line()


@app.command()
def main(
    model: Model = None,
    chats: Annotated[int, typer.Option(min=2, help="Conversations, each with several turns.")] = 12,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each.")] = 3,
    turn_tokens: Annotated[int, typer.Option(min=16, help="Tokens that a turn adds.")] = 192,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 24,
    at_once: Annotated[int, typer.Option(min=1, max=16, help="Requests that run together.")] = 2,
    share: Annotated[
        float,
        typer.Option(
            min=0.05, max=1.0, help="KV budget, as a share of the bytes that the load needs at full precision."
        ),
    ] = 0.25,
    as_json: Json = False,
) -> None:
    """Run a load that does not fit, with the step-down policy and with eviction: hit rates, failures, memory."""
    what = LadderLoad(chats, turns, turn_tokens, reply_tokens, at_once)
    show(measure(load(model), what, share=share, progress=say), table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
