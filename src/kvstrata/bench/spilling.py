"""Streams that run while stored conversations go to the disk: the time between two of their tokens, with and without.

One engine, one set of streams, windows in turn: in one nothing is spilled, in the next all that is stored is, until the
last byte is on the disk. Then the disk is emptied, outside of any window, and it begins again.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.bench.requantize import Stream
from kvstrata.codecs.registry import parse
from kvstrata.disk.options import DiskOptions
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.loop import Loop
from kvstrata.engine.request import Request, Sampling
from kvstrata.engine.storage import Storage
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.store.stock import Stock

DISK_BYTES = 8 << 30
STREAM_PROMPT_TOKENS = 64
MAX_REPLY_TOKENS = 4096
STEADY_TOKENS = 8
# What a server may add to the time between two tokens by spilling.
BOUND = 1.2


@dataclass(frozen=True)
class Spilling:
    streams: int
    rounds: int
    num_intervals: int  # while it spilled
    spilled_bytes: int
    quiet_p50_s: float
    quiet_p99_s: float
    spilling_p50_s: float
    spilling_p99_s: float

    @property
    def p50_ratio(self) -> float:
        return self.spilling_p50_s / self.quiet_p50_s

    @property
    def p99_ratio(self) -> float:
        return self.spilling_p99_s / self.quiet_p99_s

    def as_json(self) -> dict[str, Any]:
        ratios = {"p50_ratio": self.p50_ratio, "p99_ratio": self.p99_ratio}
        return {**asdict(self), **ratios, "bound": BOUND, "is_within_bound": self.p99_ratio <= BOUND}


@dataclass(frozen=True)
class _Window:
    began_s: float
    ended_s: float

    def intervals(self, streams: Sequence[Stream]) -> list[float]:
        """Between two tokens of a stream that both came in this window."""
        found = []
        for stream in streams:
            times = [at for at in list(stream.times) if self.began_s <= at <= self.ended_s]
            found += [b - a for a, b in pairwise(times)]
        return found


def measure(
    loaded: LoadedModel,
    *,
    memory_bytes: int,
    streams: int = 4,
    conversations: int = 8,
    conversation_tokens: int = 512,
    precision: str = "raw",
    rounds: int = 12,
    progress: Callable[[str], None] = lambda _: None,
) -> Spilling:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        disk = DiskOptions(Path(folder), DISK_BYTES, reserve_bytes=0, queue_bytes=DISK_BYTES, flush_s=0)
        storage = Storage(k=parse(precision), v=parse(precision))
        limits = Limits(memory_bytes=memory_bytes, max_running=max(streams, 1))
        engine = Engine(loaded, limits, Metrics(), storage, disk)
        engine.start()
        try:
            progress(f"storing {conversations} conversations")
            _store(engine, loaded, conversations, conversation_tokens)
            running = _start_streams(engine, loaded, streams)
            return _windows(engine, running, rounds, progress)
        finally:
            for number in range(streams):
                engine.cancel(f"stream-{number}")
            engine.stop()


def _windows(engine: Engine, running: list[Stream], rounds: int, progress: Callable[[str], None]) -> Spilling:
    quiet: list[float] = []
    spilling: list[float] = []
    spilled_bytes = 0
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        before = engine.ask(_written_bytes).result()
        busy = _spill(engine)
        spilled_bytes += engine.ask(_written_bytes).result() - before
        spilling += busy.intervals(running)
        engine.ask(_empty_disk).result()
        quiet += _rest(engine, busy.ended_s - busy.began_s).intervals(running)
        _require_running(running)
    if not spilling or not quiet:
        raise KvstrataError("No token came while it spilled. Store more: --conversations.")
    (quiet_p50, quiet_p99), (busy_p50, busy_p99) = (np.percentile(times, (50, 99)) for times in (quiet, spilling))
    return Spilling(
        streams=len(running),
        rounds=rounds,
        num_intervals=len(spilling),
        spilled_bytes=spilled_bytes,
        quiet_p50_s=float(quiet_p50),
        quiet_p99_s=float(quiet_p99),
        spilling_p50_s=float(busy_p50),
        spilling_p99_s=float(busy_p99),
    )


def _spill(engine: Engine) -> _Window:
    engine.ask(lambda loop: _stock_of(loop).spills.add_free()).result()
    began = time.perf_counter()
    # Each question is answered between two steps: this waits, it does not spin.
    while engine.ask(_is_spilling).result():
        pass
    return _Window(began, time.perf_counter())


def _rest(engine: Engine, seconds: float) -> _Window:
    """As long, and asked as often."""
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        engine.ask(_is_spilling).result()
    return _Window(began, time.perf_counter())


def _is_spilling(loop: Loop) -> bool:
    stock = _stock_of(loop)
    return stock.chores.has_work or stock.cold.tier.usage().num_queued > 0


def _written_bytes(loop: Loop) -> int:
    return _stock_of(loop).reporter.count()["disk_written_bytes"]


def _empty_disk(loop: Loop) -> None:
    _stock_of(loop).clearing.clear(tier="disk")


def _stock_of(loop: Loop) -> Stock:
    if not loop.stock.store.can_share:
        raise KvstrataError("This model brings caches of its own kind, which are not stored.")
    return loop.stock


def _store(engine: Engine, loaded: LoadedModel, conversations: int, num_tokens: int) -> None:
    rng = random.Random(1)
    news = threading.Condition()
    stored = [Stream(news) for _ in range(conversations)]
    for number, stream in enumerate(stored):
        prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(num_tokens))
        engine.submit(Request(f"stored-{number}", prompt, 1, Sampling(temperature=0)), stream.sink)
    for stream in stored:
        stream.ended.wait()
    # Trimmed or encoded: from here on there is nothing to do but to spill.
    while engine.ask(lambda loop: loop.housekeeping.has_work).result():
        engine.ask(lambda loop: loop.housekeeping.work(1.0)).result()


def _start_streams(engine: Engine, loaded: LoadedModel, count: int) -> list[Stream]:
    rng = random.Random(2)
    news = threading.Condition()
    running = [Stream(news) for _ in range(count)]
    reply_tokens = min(MAX_REPLY_TOKENS, engine.context_tokens - STREAM_PROMPT_TOKENS)
    for number, stream in enumerate(running):
        prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(STREAM_PROMPT_TOKENS))
        engine.submit(Request(f"stream-{number}", prompt, reply_tokens, Sampling(temperature=0)), stream.sink)
    with news:
        news.wait_for(lambda: all(len(s.times) >= STEADY_TOKENS or s.ended.is_set() for s in running))
    _require_running(running)
    return running


def _require_running(running: Sequence[Stream]) -> None:
    if any(stream.ended.is_set() for stream in running):
        failures = [stream.failure for stream in running if stream.failure]
        raise KvstrataError(f"A stream ended early: {failures[0] if failures else 'take fewer --rounds'}")
