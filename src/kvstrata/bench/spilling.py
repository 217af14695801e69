"""Streams that run while stored conversations go to the disk: the time between two of their tokens, with and without.

One engine, one set of streams, windows in turn: in one nothing is spilled, in the next all that is stored is, as after
replies that have ended, until the last byte is on the disk. Then the disk is emptied, outside of any window, and it
begins again.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.bench.driver import MIB, Figure, Progress, lay_out, silent
from kvstrata.bench.streams import Streams, greedy, random_prompt, running
from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.tiers.options import DiskOptions

DISK_BYTES = 8 << 30
STREAM_PROMPT_TOKENS = 64
MAX_REPLY_TOKENS = 4096
STEADY_TOKENS = 8
# What a server may add to the time between two tokens by spilling.
BOUND = 1.2


@dataclass(frozen=True)
class Spilling(Figure):
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
        return {**super().as_json(), **ratios, "bound": BOUND, "is_within_bound": self.p99_ratio <= BOUND}


@dataclass(frozen=True)
class Load:
    streams: int = 4
    conversations: int = 8  # that are spilled in each round
    conversation_tokens: int = 512
    precision: str = "raw"


@dataclass(frozen=True)
class _Window:
    began_s: float
    ended_s: float

    def intervals(self, streams: Streams) -> list[float]:
        """Between two tokens of a stream that both came in this window."""
        gaps = [gap for stream in streams for gap in stream.gaps()]
        return [b - a for a, b in gaps if self.began_s <= a and b <= self.ended_s]


def measure(loaded: LoadedModel, load: Load, *, rounds: int = 12, progress: Progress = silent) -> Spilling:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        disk = DiskOptions(Path(folder), DISK_BYTES, reserve_bytes=0, flush_s=0)
        # Stored before the windows, written in them.
        storage = KvConfig(k=parse(load.precision), v=parse(load.precision), disk_write="at-eviction")
        limits = EngineLimits(max_running=load.streams)
        with running(Engine(loaded, limits, Metrics(), storage, disk)) as engine:
            progress(f"storing {load.conversations} conversations")
            _store(engine, loaded, load)
            streams = _start_streams(engine, loaded, load.streams)
            try:
                return _windows(engine, streams, rounds, progress)
            finally:
                streams.cancel()


def table(figures: Spilling) -> str:
    spilled = f"{figures.spilled_bytes / MIB:.0f} MiB spilled in {figures.rounds} rounds"
    rows = [
        ("nothing is spilled", 1e3 * figures.quiet_p50_s, 1e3 * figures.quiet_p99_s),
        ("while it spills", 1e3 * figures.spilling_p50_s, 1e3 * figures.spilling_p99_s),
        ("ratio", f"{figures.p50_ratio:.2f}", f"{figures.p99_ratio:.2f}"),
    ]
    return lay_out(
        rows,
        [
            ("between two tokens", "<20", lambda row: row[0]),
            ("p50 ms", ">9.1f", lambda row: row[1]),
            ("p99 ms", ">9.1f", lambda row: row[2]),
        ],
        f"{figures.streams} streams, {figures.num_intervals} intervals, {spilled}",
    )


def _windows(engine: Engine, streams: Streams, rounds: int, progress: Progress) -> Spilling:
    quiet: list[float] = []
    spilling: list[float] = []
    spilled_bytes = 0
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        before = engine.ask(_written_bytes).result()
        busy = _spill(engine)
        spilled_bytes += engine.ask(_written_bytes).result() - before
        spilling += busy.intervals(streams)
        engine.ask(_empty_disk).result()
        quiet += _rest(engine, busy.ended_s - busy.began_s).intervals(streams)
        streams.require_running("take fewer --rounds")
    if not spilling or not quiet:
        raise KvstrataError("No token came while it spilled. Store more: --conversations.")
    (quiet_p50, quiet_p99), (busy_p50, busy_p99) = (np.percentile(times, (50, 99)) for times in (quiet, spilling))
    return Spilling(
        streams=len(streams),
        rounds=rounds,
        num_intervals=len(spilling),
        spilled_bytes=spilled_bytes,
        quiet_p50_s=float(quiet_p50),
        quiet_p99_s=float(quiet_p99),
        spilling_p50_s=float(busy_p50),
        spilling_p99_s=float(busy_p99),
    )


def _spill(engine: Engine) -> _Window:
    engine.ask(lambda core: _cache_of(core).offloader.offer_changed()).result()
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


def _is_spilling(core: EngineCore) -> bool:
    cache = _cache_of(core)
    return cache.has_work or cache.disk.tier.usage().num_queued > 0


def _written_bytes(core: EngineCore) -> int:
    return _cache_of(core).usage.counters()["disk_written_bytes"]


def _empty_disk(core: EngineCore) -> None:
    _cache_of(core).evictor.clear(tier="disk")


def _cache_of(core: EngineCore) -> PrefixCache:
    if not core.prefix_cache.can_share:
        raise KvstrataError("This model brings caches of its own kind, which are not stored.")
    return core.prefix_cache


def _store(engine: Engine, loaded: LoadedModel, load: Load) -> None:
    rng = random.Random(1)
    stored = Streams(engine)
    for _ in range(load.conversations):
        stored.start(greedy(random_prompt(rng, loaded, load.conversation_tokens), 1))
    stored.wait()
    # Trimmed or encoded: from here on there is nothing to do but to spill.
    while engine.ask(lambda core: core.pacer.has_work).result():
        engine.ask(lambda core: core.pacer.run_slice(1.0)).result()


def _start_streams(engine: Engine, loaded: LoadedModel, count: int) -> Streams:
    rng = random.Random(2)
    streams = Streams(engine)
    reply_tokens = min(MAX_REPLY_TOKENS, engine.context_tokens - STREAM_PROMPT_TOKENS)
    for _ in range(count):
        streams.start(greedy(random_prompt(rng, loaded, STREAM_PROMPT_TOKENS), reply_tokens))
    streams.wait_for(STEADY_TOKENS)
    streams.require_running("take fewer --rounds")
    return streams
