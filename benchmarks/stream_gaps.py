"""Gaps between the tokens of running streams while blocks are written, KV is requantized or a prompt is prefilled.

spilling       One engine and one set of streams, in alternating windows: one without writes, one in which the whole
               cache is written, until its last byte is on the disk. The disk is then emptied outside of any window.
requantize     Precision changes under running streams: pauses, freed bytes, and the cost beside a second prefill.
prefill-share  A long prompt beside running streams, for several shares of the time that prompts may take.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer

from benchmarks.common import Streams, answer, command_line, greedy, random_prompt, run_app, running
from benchmarks.random_model import RandomWeights, load_model
from kvstrata.bench.figures import MIB, Figure, Progress, lay_out, silent
from kvstrata.cli.bench_options import Json, Model, say, show
from kvstrata.codecs.registry import parse
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.errors import KvstrataError
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel, load
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import ChangeProgress, ChangeResult, PrecisionChange
from kvstrata.tiers.options import DiskOptions

DISK_BYTES = 8 << 30
STREAM_PROMPT_TOKENS = 64
MAX_REPLY_TOKENS = 4096
SPILLING_STEADY_TOKENS = 8
# Allowed increase of the time between two tokens by spilling.
SPILLING_BOUND = 1.2


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
        return {
            **super().as_json(),
            **ratios,
            "bound": SPILLING_BOUND,
            "is_within_bound": self.p99_ratio <= SPILLING_BOUND,
        }


@dataclass(frozen=True)
class SpillingLoad:
    streams: int = 4
    conversations: int = 8  # spilled in each round
    conversation_tokens: int = 512
    precision: str = "raw"


@dataclass(frozen=True)
class _Window:
    began_s: float
    ended_s: float

    def intervals(self, streams: Streams) -> list[float]:
        """Return the times between two tokens of a stream that both arrived in this window."""
        gaps = [gap for stream in streams for gap in stream.gaps()]
        return [b - a for a, b in gaps if self.began_s <= a and b <= self.ended_s]


def measure_spilling(
    loaded: LoadedModel, load: SpillingLoad, *, rounds: int = 12, progress: Progress = silent
) -> Spilling:
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        disk = DiskOptions(Path(folder), DISK_BYTES, reserve_bytes=0, flush_s=0)
        # Cached before the windows, written within them.
        storage = KvConfig(k=parse(load.precision), v=parse(load.precision), disk_write="on_evict")
        limits = EngineLimits(max_running=load.streams)
        with running(Engine(loaded, limits, Metrics(), storage, disk)) as engine:
            progress(f"storing {load.conversations} conversations")
            _store(engine, loaded, load)
            streams = _start_streams(engine, loaded, load.streams)
            try:
                return _windows(engine, streams, rounds, progress)
            finally:
                streams.cancel()


def spilling_table(figures: Spilling) -> str:
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
    # The engine responds between two steps, so this loop blocks rather than spins.
    while engine.ask(_is_spilling).result():
        pass
    return _Window(began, time.perf_counter())


def _rest(engine: Engine, seconds: float) -> _Window:
    """Run a window without writes, as long as the other one and with as many engine calls."""
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


def _store(engine: Engine, loaded: LoadedModel, load: SpillingLoad) -> None:
    rng = random.Random(1)
    stored = Streams(engine)
    for _ in range(load.conversations):
        stored.start(greedy(random_prompt(rng, loaded, load.conversation_tokens), 1))
    stored.wait()
    # Trimmed or encoded: from here on only spilling is left to do.
    while engine.ask(lambda core: core.pacer.has_work).result():
        engine.ask(lambda core: core.pacer.run_slice(1.0)).result()


def _start_streams(engine: Engine, loaded: LoadedModel, count: int) -> Streams:
    rng = random.Random(2)
    streams = Streams(engine)
    reply_tokens = min(MAX_REPLY_TOKENS, engine.context_tokens - STREAM_PROMPT_TOKENS)
    for _ in range(count):
        streams.start(greedy(random_prompt(rng, loaded, STREAM_PROMPT_TOKENS), reply_tokens))
    streams.wait_for(SPILLING_STEADY_TOKENS)
    streams.require_running("take fewer --rounds")
    return streams


REQUANTIZING_STEADY_TOKENS = 12  # of each stream, before anything is changed
USUAL_STEPS = 8  # before a change, to measure the usual time of a step


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


def measure_requantizing(
    loaded: LoadedModel,
    *,
    streams: int = 8,
    prompt_tokens: int = 512,
    reply_tokens: int = 160,
    precisions: tuple[str, ...] = ("planes:8", "planes:4"),
) -> list[Requantized]:
    mx.eval(arrays_in(loaded.module))  # lazy arrays can be evaluated on this thread only
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
            started.wait_for(REQUANTIZING_STEADY_TOKENS)
            rows.append(_change(engine, started, precision, _sample(metrics, "step_seconds_sum", kind="prefill")))
        started.finish()
    finished = sum(len(stream.ids) == reply_tokens for stream in started)
    again = int(_sample(metrics, "prefill_tokens_total")) - streams * (prompt_tokens - 1)
    return [replace(row, finished=finished, computed_again=again) for row in rows]


def requantizing_table(rows: Sequence[Requantized]) -> str:
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
    """Run the dry run and the change between the same two steps; tokens decoded between them would count in only
    one."""
    said = CacheApi(core).requantize(PrecisionChange(parse(precision), parse(precision), dry_run=True))
    CacheApi(core).requantize(PrecisionChange(parse(precision), parse(precision)))
    return said


def _finish(engine: Engine) -> ChangeProgress:
    """Wait for the change to end. The engine responds between two steps, so this loop blocks rather than spins."""
    while (progress := engine.ask_cache(lambda cache: cache.requantize_progress()).result()).is_running:
        pass
    return progress


def _held(core: EngineCore) -> tuple[int, int]:
    """Return the bytes held by kvstrata's count and by MLX's."""
    usage = CacheApi(core).usage()
    return usage.running_bytes + usage.tiers["hot"].nbytes, usage.allocator_bytes


SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
# Tokens of each stream before the prompt and after its first token, to measure a step without the prompt.
SHARING_STEADY_TOKENS = 24
# At the default share: what a running stream and a new prompt may lose to each other.
SHARING_BOUND = 2.5


@dataclass(frozen=True)
class Sharing(Figure):
    share: float
    streams: int
    prompt_tokens: int
    num_gaps: int  # between two tokens of a stream, while the prompt was computed
    gap_alone_s: float  # usual time between two tokens, without a prompt
    gap_p50_s: float
    gap_p95_s: float
    first_alone_s: float  # the prompt's first token, without streams
    first_s: float

    @property
    def gap_ratio(self) -> float:
        return self.gap_p95_s / self.gap_alone_s

    @property
    def first_ratio(self) -> float:
        return self.first_s / self.first_alone_s

    def as_json(self) -> dict[str, Any]:
        is_within = max(self.gap_ratio, self.first_ratio) <= SHARING_BOUND
        ratios = {"gap_ratio": self.gap_ratio, "first_ratio": self.first_ratio}
        return {**super().as_json(), **ratios, "bound": SHARING_BOUND, "is_within_bound": is_within}


def measure_prefill_shares(
    loaded: LoadedModel,
    *,
    shares: Sequence[float] = SHARES,
    streams: int = 1,
    prompt_tokens: int = 3000,
    progress: Progress = silent,
) -> list[Sharing]:
    mx.eval(arrays_in(loaded.module))  # lazy arrays can be evaluated on this thread only
    rows = []
    for share in shares:
        progress(f"share {share:g}: {prompt_tokens} prompt tokens, alone and beside {streams}")
        limits = EngineLimits(max_running=streams + 1, prefill_share=share)
        with running(Engine(loaded, limits, Metrics())) as engine:
            rows.append(_measure_share(engine, loaded, share, streams, prompt_tokens))
    return rows


def prefill_shares_table(rows: Sequence[Sharing]) -> str:
    return lay_out(
        rows,
        [
            ("share", "<7g", lambda row: row.share),
            ("gap alone", ">11", lambda row: f"{row.gap_alone_s * 1e3:.0f} ms"),
            ("p50", ">8.0f", lambda row: row.gap_p50_s * 1e3),
            ("p95", ">8.0f", lambda row: row.gap_p95_s * 1e3),
            ("ratio", ">7.2f", lambda row: row.gap_ratio),
            ("first alone", ">13", lambda row: f"{row.first_alone_s:.2f} s"),
            ("beside", ">9.2f", lambda row: row.first_s),
            ("ratio", ">7.2f", lambda row: row.first_ratio),
        ],
        "gap: between two tokens of a stream, p95 to alone; first: the prompt's first token",
    )


def _measure_share(engine: Engine, loaded: LoadedModel, share: float, num_streams: int, prompt_tokens: int) -> Sharing:
    rng = random.Random(1)

    def first_token_s() -> float:
        return answer(engine, greedy(random_prompt(rng, loaded, prompt_tokens), 1)).first_token_s

    alone_s = first_token_s()
    streams = Streams(engine)
    for _ in range(num_streams):
        prompt = random_prompt(rng, loaded, STREAM_PROMPT_TOKENS)
        streams.start(greedy(prompt, engine.context_tokens - STREAM_PROMPT_TOKENS))
    _wait_for(streams, SHARING_STEADY_TOKENS + 1)
    began_s = time.perf_counter()
    first_s = first_token_s()
    ended_s = time.perf_counter()
    _wait_for(streams, SHARING_STEADY_TOKENS)
    streams.cancel()
    gaps = [gap for stream in streams for gap in stream.gaps()]
    beside = [b - a for a, b in gaps if began_s <= a and b <= ended_s]
    alone = [b - a for a, b in gaps if b < began_s or a > ended_s]
    if not beside:
        raise KvstrataError("No token came while the prompt was computed. Take a longer one: --prompt-tokens.")
    p50, p95 = np.percentile(beside, (50, 95))
    return Sharing(
        share=share,
        streams=num_streams,
        prompt_tokens=prompt_tokens,
        num_gaps=len(beside),
        gap_alone_s=statistics.median(alone),
        gap_p50_s=float(p50),
        gap_p95_s=float(p95),
        first_alone_s=alone_s,
        first_s=first_s,
    )


def _wait_for(streams: Streams, num_tokens: int) -> None:
    streams.wait_for(num_tokens)
    streams.require_running("take a shorter prompt: --prompt-tokens")


app = command_line()


@app.command()
def spilling(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams that run meanwhile.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations that are spilled in each round.")] = 8,
    conversation_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 512,
    precision: Annotated[str, typer.Option(help="Precision of cached KV: raw, planes:8 and so on.")] = "raw",
    rounds: Annotated[int, typer.Option(min=1, help="Windows of spilling, and as many without.")] = 12,
    as_json: Json = False,
) -> None:
    """Measure the time between two tokens of running streams with and without writing blocks to the disk."""
    what = SpillingLoad(streams, conversations, conversation_tokens, precision)
    show(measure_spilling(load(model), what, rounds=rounds, progress=say), spilling_table, as_json=as_json)


@app.command()
def requantize(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams that run meanwhile.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=300, help="Tokens of each prompt.")] = 512,
    reply_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each reply.")] = 160,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Step everything down to planes:8, then planes:4, under running streams: pauses, bytes, time."""
    loaded = load_model(model, random_weights=random_weights)
    rows = measure_requantizing(loaded, streams=streams, prompt_tokens=prompt_tokens, reply_tokens=reply_tokens)
    show(rows, requantizing_table, as_json=as_json)


@app.command("prefill-share")
def prefill_share(
    model: Model = None,
    shares: Annotated[
        str, typer.Option(help="Values of --prefill-share, with commas between.", metavar="shares")
    ] = "0.1,0.25,0.5,0.75,1",
    streams: Annotated[int, typer.Option(min=1, max=15, help="Streams that run when the prompt comes.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Tokens of the prompt.")] = 3000,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Measure a long prompt beside running streams: the gaps of the streams, and the time to its first token."""
    loaded = load_model(model, random_weights=random_weights)
    rows = measure_prefill_shares(
        loaded, shares=_shares(shares), streams=streams, prompt_tokens=prompt_tokens, progress=say
    )
    show(rows, prefill_shares_table, as_json=as_json)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise typer.BadParameter("Give shares above 0 and up to 1, with commas between, as in 0.25,0.5,1.")
    return shares


if __name__ == "__main__":
    run_app(app)
