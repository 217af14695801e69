"""Precision that changes under running streams: how long they pause, what is freed, and what it costs beside computing
the prompts again."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvstrata.bench.driver import MIB, Figure, lay_out
from kvstrata.bench.streams import Streams, greedy, random_prompt, running
from kvstrata.codecs.registry import parse
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.requantize import ChangeProgress, ChangeResult, PrecisionChange

STEADY_TOKENS = 12  # of each stream, before anything is changed
USUAL_STEPS = 8  # before a change, that tell how long a step usually takes


@dataclass(frozen=True)
class Requantized(Figure):
    precision: str
    streams: int
    finished: int  # streams that got all of their reply, at the end of the run
    step_s: float  # usual time between two tokens of a stream
    longest_pause_steps: float  # of any stream while it changed
    freed_said_bytes: int  # by the dry run
    freed_bytes: int
    allocator_freed_bytes: int  # by MLX's own count, a step after the change
    computed_again: int  # prompt tokens, in the whole run
    seconds: float  # from the request to the last span, with the streams' own steps in between
    prefill_s: float  # of the same prompts, as they were computed in this run

    @property
    def share(self) -> float:
        return self.seconds / self.prefill_s

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "share": self.share}


def measure(
    loaded: LoadedModel,
    *,
    streams: int = 8,
    prompt_tokens: int = 512,
    reply_tokens: int = 160,
    precisions: tuple[str, ...] = ("planes:8", "planes:4"),
) -> list[Requantized]:
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    metrics, rng = Metrics(), random.Random(1)
    # All prompts first: the streams then run together, however many there are.
    limits = EngineLimits(max_running=streams, buffer_step_tokens=reply_tokens, prefill_share=1.0)
    with running(Engine(loaded, limits, metrics)) as engine:
        started = Streams(engine)
        for stream in range(streams):
            # A salt each: two random prompts may begin with the same token, and would share it.
            started.start(greedy(random_prompt(rng, loaded, prompt_tokens), reply_tokens, salt=str(stream)))
        started.wait_for(1)
        rows = []
        for precision in precisions:
            started.wait_for(STEADY_TOKENS)
            rows.append(_change(engine, started, precision, _sample(metrics, "step_seconds_sum", kind="prefill")))
        started.finish()
    finished = sum(len(stream.ids) == reply_tokens for stream in started)
    again = int(_sample(metrics, "prefill_tokens_total")) - streams * (prompt_tokens - 1)
    return [replace(row, finished=finished, computed_again=again) for row in rows]


def table(rows: Sequence[Requantized]) -> str:
    last = rows[-1]
    return lay_out(
        rows,
        [
            ("to", "<10", lambda row: row.precision),
            ("a step, ms", ">12.1f", lambda row: 1e3 * row.step_s),
            ("longest pause", ">15", lambda row: f"{row.longest_pause_steps:.1f} steps"),
            ("said MiB", ">10.1f", lambda row: row.freed_said_bytes / MIB),
            ("freed MiB", ">11.1f", lambda row: row.freed_bytes / MIB),
            ("by MLX", ">9.1f", lambda row: row.allocator_freed_bytes / MIB),
            ("seconds", ">9.2f", lambda row: row.seconds),
            ("of prefill", ">12.1%", lambda row: row.share),
        ],
        f"{last.finished} of {last.streams} streams finished; {last.computed_again} prompt tokens again",
    )


def _sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"kvstrata_{name}", labels) or 0.0


def _change(engine: Engine, streams: Streams, precision: str, prefill_s: float) -> Requantized:
    step_s = statistics.median(b - a for stream in streams for a, b in stream.gaps()[-USUAL_STEPS:])
    before, active_before = engine.ask(_held).result()
    began_s = time.perf_counter()
    said = engine.ask(lambda core: _begin(core, precision)).result()
    progress = _finish(engine)
    ended_s = time.perf_counter()
    # The token after the change tells how long the one before it had to wait; and what a step in flight holds goes.
    streams.wait_for(2)
    after, active_after = engine.ask(_held).result()
    pauses = [b - a for stream in streams for a, b in stream.gaps() if b >= began_s and a <= ended_s]
    return Requantized(
        precision=precision,
        streams=len(streams),
        finished=0,
        step_s=step_s,
        longest_pause_steps=max(pauses, default=0.0) / step_s,
        freed_said_bytes=said.tiers["hot"].bytes_freed,
        freed_bytes=before - after,
        allocator_freed_bytes=active_before - active_after,
        computed_again=0,
        seconds=progress.seconds,
        prefill_s=prefill_s,
    )


def _begin(core: EngineCore, precision: str) -> ChangeResult:
    """A dry run and the change, between the same two steps: tokens that came between them would be in one only."""
    said = CacheApi(core).requantize(PrecisionChange(parse(precision), parse(precision), dry_run=True))
    CacheApi(core).requantize(PrecisionChange(parse(precision), parse(precision)))
    return said


def _finish(engine: Engine) -> ChangeProgress:
    """Each question is answered between two steps: this waits, it does not spin."""
    while (progress := engine.ask_cache(lambda cache: cache.requantize_progress()).result()).is_running:
        pass
    return progress


def _held(core: EngineCore) -> tuple[int, int]:
    """By our own count, and by MLX's."""
    usage = CacheApi(core).usage()
    return usage.running_bytes + usage.tiers["hot"].nbytes, usage.allocator_bytes
