"""Where the time of a decode step goes: the engine's thread is looked at every two milliseconds while a batch decodes.

A look counts for the innermost frame that belongs to a room, so the time of a kernel is that of the code that calls it.
On a GPU the thread builds and issues work and then waits for its result; only the wait is the GPU's own time. Limits
are what the machine gives to plain work: a copy of more memory than its caches hold, and one product.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import mlx.core as mx

from kvstrata.backend.speed import mlx_gflops
from kvstrata.bench.driver import MIB, Figure, Progress, lay_out, seconds, silent
from kvstrata.bench.streams import Streams, greedy, random_prompt
from kvstrata.engine.engine import Engine
from kvstrata.models.loaded import LoadedModel

LOOK_S = 0.002  # more often, and the looking shows in the figures
COPY_BYTES = 256 * MIB
# Innermost first: where a file's path has such a piece, that is what the time is for.
PLACES = (
    ("kvstrata/packed/", "products of packed weights"),
    ("kvstrata/attention/", "attention"),
    ("kvstrata/codecs/", "attention"),
    ("kvstrata/layers/", "the cache's own books"),
    ("kvstrata/spans/", "the cache's own books"),
    ("kvstrata/engine/sampling", "sampling, and waiting for its result"),
    ("kvstrata/engine/runner", "handing the step to MLX"),
    ("kvstrata/text/", "text of new tokens"),
    ("kvstrata/", "scheduling"),
    ("mlx_lm/", "the model's own code"),
    ("mlx/nn/", "the model's own code"),
)
OTHER = "other"


@dataclass(frozen=True)
class Share(Figure):
    what: str
    share: float
    step_ms: float


@dataclass(frozen=True)
class StepTime(Figure):
    batch: int
    tokens_s: float
    step_ms: float  # median time between two tokens of a stream
    num_looks: int
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class StepFigures(Figure):
    steps: tuple[StepTime, ...]
    copy_gb_s: float  # read and written
    product_gflops: float
    weight_bytes: int
    least_ms: float  # for reading all weights once, as fast as a copy reads and writes


class Looks:
    """What a thread does, looked at from another one."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._seen: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._looker = threading.Thread(target=self._look, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        # A thread that computes in Python lets others in this often.
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(LOOK_S / 2)
        self._looker.start()
        try:
            yield
        finally:
            self._over.set()
            self._looker.join()
            sys.setswitchinterval(before_s)

    def between(self, start_s: float, end_s: float) -> Counter[str]:
        return Counter(what for at_s, what in self._seen if start_s <= at_s <= end_s)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self._seen.append((time.perf_counter(), place_of(frame)))


def place_of(frame: FrameType | None) -> str:
    while frame is not None:
        path = frame.f_code.co_filename
        for piece, name in PLACES:
            if piece in path:
                return name
        frame = frame.f_back
    return OTHER


def measure(
    loaded: LoadedModel,
    engine: Engine,
    batches: Sequence[int],
    prompt_tokens: int,
    reply_tokens: int,
    progress: Progress = silent,
) -> StepFigures:
    thread = engine.ask(lambda _: threading.get_ident()).result()
    steps = []
    for batch in batches:
        progress(f"batch {batch}")
        _decode(loaded, engine, batch, prompt_tokens, 4)  # warm
        looks = Looks(thread)
        with looks.running():
            streams = _decode(loaded, engine, batch, prompt_tokens, reply_tokens)
        steps.append(_step_time(batch, streams, looks))
    progress("a copy, and a product")
    copied = _copy_gb_s()
    least_ms = loaded.weight_bytes / copied / 1e6
    return StepFigures(tuple(steps), copied, mlx_gflops(), loaded.weight_bytes, least_ms)


def _decode(loaded: LoadedModel, engine: Engine, batch: int, prompt_tokens: int, reply_tokens: int) -> Streams:
    rng, streams, salt = random.Random(batch), Streams(engine), uuid.uuid4().hex
    for _ in range(batch):
        streams.start(greedy(random_prompt(rng, loaded, prompt_tokens), reply_tokens, salt))
    streams.finish()
    return streams


def _step_time(batch: int, streams: Streams, looks: Looks) -> StepTime:
    start_s = max(stream.times[0] for stream in streams)
    end_s = min(stream.times[-1] for stream in streams)
    gaps = [b - a for stream in streams for a, b in stream.gaps() if start_s <= a and b <= end_s]
    step_ms = statistics.median(gaps) * 1e3
    counted = looks.between(start_s, end_s)
    total = max(1, counted.total())
    shares = [Share(what, count / total, count / total * step_ms) for what, count in counted.most_common()]
    num_tokens = sum(start_s < at_s <= end_s for stream in streams for at_s in stream.times)
    return StepTime(batch, num_tokens / (end_s - start_s), step_ms, counted.total(), tuple(shares))


def _copy_gb_s() -> float:
    x = mx.zeros((COPY_BYTES // 4,), mx.uint32)
    mx.eval(x | 1)
    times = [seconds(lambda: mx.eval(x | 1)) for _ in range(5)]
    return 2 * COPY_BYTES / statistics.median(times) / 1e9


def table(figures: StepFigures) -> str:
    parts = []
    for step in figures.steps:
        title = f"batch {step.batch}"
        columns: list[tuple[str, str, Callable[[Share], object]]] = [
            (title, "<40", lambda row: row.what),
            ("ms", ">8.2f", lambda row: row.step_ms),
            ("share", ">8.0%", lambda row: row.share),
        ]
        note = f"a step {step.step_ms:.2f} ms, {step.tokens_s:.1f} tokens/s, {step.num_looks} looks"
        parts += [lay_out(step.shares, columns, note), ""]
    reads = f"{figures.weight_bytes / MIB:,.0f} MiB of weights, read as fast as a copy goes: {figures.least_ms:.2f} ms"
    return "\n".join(
        [
            *parts,
            f"A copy moves {figures.copy_gb_s:,.1f} GB/s; {reads}.",
            f"A float32 product runs at {figures.product_gflops:,.0f} GFLOP/s.",
        ]
    )
