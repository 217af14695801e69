"""Precision that changes under running streams: how long they pause, what is freed, and what it costs beside computing
the prompts again."""

from __future__ import annotations

import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.loop import Loop
from kvstrata.engine.request import Event, Failed, Finished, Piece, Request, Sampling
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.store.requantize import Change, Changed

STEADY_TOKENS = 12  # of each stream, before anything is changed


@dataclass(frozen=True)
class Requantized:
    precision: str
    streams: int
    step_s: float  # usual time between two tokens of a stream
    longest_pause_steps: float  # of any stream while it changed
    freed_said_bytes: int  # by the dry run
    freed_bytes: int
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


def measure(
    loaded: LoadedModel,
    *,
    memory_bytes: int,
    streams: int = 8,
    prompt_tokens: int = 512,
    reply_tokens: int = 160,
    precisions: tuple[str, ...] = ("planes:8", "planes:4"),
) -> list[Requantized]:
    engine = Engine(loaded, Limits(memory_bytes=memory_bytes, max_running=streams), Metrics())
    engine.start()
    try:
        news = threading.Condition()
        running = [Stream(news) for _ in range(streams)]
        _submit(engine, loaded, running, prompt_tokens, reply_tokens)
        _wait(news, running, 1)
        prefill_s = streams * prompt_tokens / engine.state().prefill_tokens_s
        rows = []
        for precision in precisions:
            _wait(news, running, max(len(stream.times) for stream in running) + STEADY_TOKENS)
            rows.append(_change(engine, news, running, precision, prefill_s))
        for stream in running:
            stream.ended.wait()
    finally:
        engine.stop()
    if failures := [stream.failure for stream in running if stream.failure]:
        raise KvstrataError(f"A stream failed: {failures[0]}")
    return rows


def _submit(engine: Engine, loaded: LoadedModel, running: list[Stream], prompt_tokens: int, reply_tokens: int) -> None:
    rng = random.Random(1)
    for number, stream in enumerate(running):
        prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(prompt_tokens))
        engine.submit(Request(f"stream-{number}", prompt, reply_tokens, Sampling(temperature=0)), stream.sink)


def _wait(news: threading.Condition, running: list[Stream], num_tokens: int) -> None:
    """Until every stream has so many tokens, or has ended."""
    with news:
        news.wait_for(lambda: all(len(stream.times) >= num_tokens or stream.ended.is_set() for stream in running))


def _change(
    engine: Engine, news: threading.Condition, running: list[Stream], precision: str, prefill_s: float
) -> Requantized:
    step_s = statistics.median(b - a for s in running for a, b in zip(s.times[-9:-1], s.times[-8:], strict=True))
    said = engine.ask(lambda loop: loop.requantize(Change(precision, precision, dry_run=True))).result()
    before = engine.ask(_held).result()
    began = time.perf_counter()
    engine.ask(lambda loop: loop.requantize(Change(precision, precision))).result()
    # Each question is answered between two steps: this waits, it does not spin.
    while engine.ask(lambda loop: loop.requantize_progress()).result().is_running:
        pass
    ended = time.perf_counter()
    after = engine.ask(_held).result()
    # The token after the change tells how long the one before it had to wait.
    _wait(news, running, max(len(stream.times) for stream in running) + 1)
    pauses = [
        b - a for s in running for a, b in zip(s.times[:-1], s.times[1:], strict=True) if b >= began and a <= ended
    ]
    return Requantized(
        precision=precision,
        streams=len(running),
        step_s=step_s,
        longest_pause_steps=max(pauses, default=0.0) / step_s,
        freed_said_bytes=_freed(said),
        freed_bytes=before - after,
        seconds=ended - began,
        prefill_s=prefill_s,
    )


def _held(loop: Loop) -> int:
    usage = loop.usage()
    return usage.running_bytes + usage.tiers["hot"].nbytes


def _freed(changed: Changed) -> int:
    return changed.bytes_before - changed.bytes_after
