"""Precision that changes under running streams: how long they pause, what is freed, and what it costs beside computing
the prompts again."""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx

from kvstrata.codecs.registry import parse
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.loop import Loop
from kvstrata.engine.operations import Operations
from kvstrata.engine.request import Event, Failed, Finished, Piece, Request, Sampling
from kvstrata.errors import KvstrataError
from kvstrata.layers.kinds import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.store.precision.requantize import Change, Changed, Progress

STEADY_TOKENS = 12  # of each stream, before anything is changed
USUAL_STEPS = 8  # before a change, that tell how long a step usually takes


@dataclass(frozen=True)
class Requantized:
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
        return {**asdict(self), "share": self.share}


class Stream:
    def __init__(self, news: threading.Condition) -> None:
        self._news = news  # told of each token and of the end
        self.times: list[float] = []
        self.ended = threading.Event()
        self.failure = ""

    def sink(self, event: Event) -> None:
        with self._news:
            if isinstance(event, Piece):
                self.times.append(time.perf_counter())
            elif isinstance(event, Finished | Failed):
                self.failure = event.message if isinstance(event, Failed) else ""
                self.ended.set()
            self._news.notify_all()

    def pauses(self, began_s: float, ended_s: float) -> list[float]:
        """Between tokens, as far as they lie in this time."""
        return [b - a for a, b in pairwise(self.times) if b >= began_s and a <= ended_s]


def measure(
    loaded: LoadedModel,
    *,
    memory_bytes: int,
    streams: int = 8,
    prompt_tokens: int = 512,
    reply_tokens: int = 160,
    precisions: tuple[str, ...] = ("planes:8", "planes:4"),
) -> list[Requantized]:
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    metrics = Metrics()
    # All prompts first: the streams then run together, however many there are.
    limits = Limits(memory_bytes=memory_bytes, max_running=streams, tail_step_tokens=reply_tokens, prefill_share=1.0)
    engine = Engine(loaded, limits, metrics)
    engine.start()
    try:
        news = threading.Condition()
        running = [Stream(news) for _ in range(streams)]
        _submit(engine, loaded, running, prompt_tokens, reply_tokens)
        _wait(news, running, 1)
        rows = []
        for precision in precisions:
            _wait(news, running, STEADY_TOKENS)
            rows.append(_change(engine, news, running, precision, _sample(metrics, "step_seconds_sum", kind="prefill")))
        for stream in running:
            stream.ended.wait()
    finally:
        engine.stop()
    if failures := [stream.failure for stream in running if stream.failure]:
        raise KvstrataError(f"A stream failed: {failures[0]}")
    finished = sum(len(stream.times) == reply_tokens for stream in running)
    again = int(_sample(metrics, "prefill_tokens_total")) - streams * (prompt_tokens - 1)
    return [replace(row, finished=finished, computed_again=again) for row in rows]


def _sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"kvstrata_{name}", labels) or 0.0


def _submit(engine: Engine, loaded: LoadedModel, running: list[Stream], prompt_tokens: int, reply_tokens: int) -> None:
    rng = random.Random(1)
    for number, stream in enumerate(running):
        prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(prompt_tokens))
        engine.submit(Request(f"stream-{number}", prompt, reply_tokens, Sampling(temperature=0)), stream.sink)


def _wait(news: threading.Condition, running: list[Stream], num_tokens: int) -> None:
    """Until every stream has so many tokens more, or has ended."""
    with news:
        wanted = [len(stream.times) + num_tokens for stream in running]
        news.wait_for(lambda: all(len(s.times) >= n or s.ended.is_set() for s, n in zip(running, wanted, strict=True)))


def _change(
    engine: Engine, news: threading.Condition, running: list[Stream], precision: str, prefill_s: float
) -> Requantized:
    usual = [b - a for stream in running for a, b in pairwise(stream.times[-USUAL_STEPS - 1 :])]
    step_s = statistics.median(usual)
    before, active_before = engine.ask(_held).result()
    began_s = time.perf_counter()
    said = engine.ask(lambda loop: _begin(loop, precision)).result()
    progress = _finish(engine)
    ended_s = time.perf_counter()
    # The token after the change tells how long the one before it had to wait; and what a step in flight holds goes.
    _wait(news, running, 2)
    after, active_after = engine.ask(_held).result()
    pauses = [pause for stream in running for pause in stream.pauses(began_s, ended_s)]
    return Requantized(
        precision=precision,
        streams=len(running),
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


def _begin(loop: Loop, precision: str) -> Changed:
    """A dry run and the change, between the same two steps: tokens that came between them would be in one only."""
    said = Operations(loop).requantize(Change(parse(precision), parse(precision), dry_run=True))
    Operations(loop).requantize(Change(parse(precision), parse(precision)))
    return said


def _finish(engine: Engine) -> Progress:
    """Each question is answered between two steps: this waits, it does not spin."""
    while (progress := engine.cache.requantize_progress().result()).is_running:
        pass
    return progress


def _held(loop: Loop) -> tuple[int, int]:
    """By our own count, and by MLX's."""
    usage = Operations(loop).usage()
    return usage.running_bytes + usage.tiers["hot"].nbytes, usage.allocator_bytes
