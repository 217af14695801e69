"""Time of a decode step by place in the code, beside plain work on this machine.

The engine's thread is sampled every two milliseconds while a batch decodes. A sample counts for the innermost frame
that belongs to a package of kvstrata, so the time of a kernel is attributed to the code that calls it. On a GPU the
thread builds and issues work and then waits for its result; only the wait is the GPU's own time.

Each part is compared with plain work: reading all weights and all KV as fast as a memory copy, and on a CPU the matrix
products as fast as one large float32 product. On a GPU the parts cannot be separated, so the whole step is compared.
The comparison exists only for models whose steps are known to read all weights and have no windows. It is a yardstick
rather than a bound: reading alone can be somewhat faster than a copy, and products of bytes faster than float32 ones.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Annotated, Any

import mlx.core as mx
import numpy as np
import typer

from benchmarks.common import MAX_BATCH, Streams, answer, command_line, greedy, random_prompt, run_app, running
from benchmarks.random_model import RandomWeights, load_model
from kvstrata.bench.figures import MIB, Figure, Progress, lay_out, seconds, silent
from kvstrata.cli.bench_options import Json, Model, numbers, say, show
from kvstrata.cli.doctor import mlx_gflops
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.platform.device import usable_cores

COPY_BYTES = 256 * MIB  # more than caches hold
COPIES = 5
GPU_COPIES = 8  # in one evaluation: the wait for a single one would be most of its time
# Dense, with gated MLPs, and all of whose layers attend to everything.
KNOWN = ("llama", "mistral", "qwen2", "qwen3")


def copy_gb_s() -> float:
    """Return the rate of a memory copy on all cores or on the GPU, counting bytes read and written."""
    copy = _copy_by_cores if mx.default_device() == mx.cpu else _copy_by_gpu
    return 2 * COPY_BYTES / copy() / 1e9


def _copy_by_gpu() -> float:
    x = mx.zeros((COPY_BYTES // 4,), mx.uint32)

    def copy() -> None:
        mx.eval([x | number for number in range(GPU_COPIES)])

    copy()
    return statistics.median(seconds(copy) for _ in range(COPIES)) / GPU_COPIES


def _copy_by_cores() -> float:
    """Time a copy into allocated memory: mapping new pages takes longer than filling them."""
    num_cores = usable_cores()
    pieces = np.array_split(np.ones(COPY_BYTES, np.uint8), num_cores)
    places = np.array_split(np.ones(COPY_BYTES, np.uint8), num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        return statistics.median(seconds(lambda: list(pool.map(np.copyto, places, pieces))) for _ in range(COPIES))


@dataclass(frozen=True)
class Products:
    """Multiplications for one token."""

    in_layers: int
    in_output: int  # needed once per prompt


def products(config: Mapping[str, Any]) -> Products | None:
    """Return the multiplications of a model by its config, or None for a model type that is not known."""
    if config.get("model_type") not in KNOWN:
        return None
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Products(layers * (attention + mlp), hidden * config["vocab_size"])


SAMPLE_S = 0.002  # shorter intervals would distort the figures

PREFILL_TOKENS, PREFILLS = 512, 3

# Part of a source path -> place that the time counts for. `place_of` searches from the innermost frame outwards.
PLACES = (
    ("kvstrata/packed/", "products of packed weights"),
    ("kvstrata/attention/", "attention"),
    ("kvstrata/codecs/", "attention"),
    ("kvstrata/kv/", "the cache's own books"),
    ("kvstrata/engine/sampling", "sampling, and waiting for its result"),
    ("kvstrata/engine/runner", "handing the step to MLX"),
    ("kvstrata/text/", "text of new tokens"),
    ("kvstrata/", "scheduling"),
    ("mlx_lm/", "the model's own code"),
    ("mlx/nn/", "the model's own code"),
)

OTHER = "other"
PRODUCTS = ("products of packed weights", "the model's own code")
ATTENTION = ("attention",)


@dataclass(frozen=True)
class StepShare(Figure):
    what: str
    share: float
    step_ms: float


@dataclass(frozen=True)
class StepLimit(Figure):
    """A part of a step, beside the time of plain work of the same size."""

    what: str
    plain_ms: float
    took_ms: float
    share: float


@dataclass(frozen=True)
class StepTime(Figure):
    batch: int
    tokens_s: float
    step_ms: float  # median time between two tokens of a stream
    num_samples: int
    shares: tuple[StepShare, ...]
    limits: tuple[StepLimit, ...] = ()


@dataclass(frozen=True)
class StepFigures(Figure):
    steps: tuple[StepTime, ...]
    prefill: StepLimit | None  # None: on a GPU, or how many products the model asks for is not known
    copy_gb_s: float  # read and written
    product_gflops: float
    weight_bytes: int


@dataclass(frozen=True)
class MachineRates:
    """Rates of this machine for plain work, and the work of a model's step."""

    copy_gb_s: float
    gflops: float
    weight_bytes: int
    token_bytes: int  # of KV
    products: Products | None

    def reading(self, what: str, nbytes: float, took_ms: float) -> StepLimit:
        plain_ms = nbytes / self.copy_gb_s / 1e6
        return StepLimit(what, plain_ms, took_ms, plain_ms / took_ms)

    def multiplying(self, what: str, num_products: int, took_ms: float) -> StepLimit:
        plain_ms = 2 * num_products / self.gflops / 1e6
        return StepLimit(what, plain_ms, took_ms, plain_ms / took_ms)


class StackSampler:
    """Samples of a thread's stack, taken from another thread."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._samples: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        # Interval at which a thread that runs Python code releases the GIL.
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SAMPLE_S / 2)
        self._sampler.start()
        try:
            yield
        finally:
            self._over.set()
            self._sampler.join()
            sys.setswitchinterval(before_s)

    def between(self, start_s: float, end_s: float) -> Counter[str]:
        return Counter(what for at_s, what in self._samples if start_s <= at_s <= end_s)

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                self._samples.append((time.perf_counter(), place_of(frame)))


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
    thread, token_bytes = engine.ask(lambda core: (threading.get_ident(), core.budget.token_bytes)).result()
    progress("a copy, and a product")
    machine = MachineRates(copy_gb_s(), mlx_gflops(), loaded.weight_bytes, token_bytes, products(loaded.config))
    steps = []
    for batch in batches:
        progress(f"batch {batch}")
        _decode(loaded, engine, batch, prompt_tokens, 4)  # warm
        sampler = StackSampler(thread)
        with sampler.running():
            streams = _decode(loaded, engine, batch, prompt_tokens, reply_tokens)
        step = _step_time(batch, streams, sampler)
        steps.append(replace(step, limits=tuple(_limits(step, machine, prompt_tokens + reply_tokens / 2))))
    progress("a prompt")
    prefill = _prefill(loaded, engine, machine)
    return StepFigures(tuple(steps), prefill, machine.copy_gb_s, machine.gflops, machine.weight_bytes)


def _limits(step: StepTime, machine: MachineRates, tokens: float) -> Iterator[StepLimit]:
    """Yield the limits of a step. `tokens` is the context that a row reads in the middle of its reply."""
    asked, on_cpu = machine.products, mx.default_device() == mx.cpu
    if asked is None:
        return

    def took_ms(places: Sequence[str]) -> float:
        found_ms = sum(share.step_ms for share in step.shares if share.what in places)
        return found_ms if found_ms and on_cpu else step.step_ms

    yield machine.reading("all weights, as in a copy", machine.weight_bytes, took_ms(PRODUCTS))
    if on_cpu:
        num_products = step.batch * (asked.in_layers + asked.in_output)
        yield machine.multiplying("products, as of float32", num_products, took_ms(PRODUCTS))
    yield machine.reading("KV, as in a copy", step.batch * tokens * machine.token_bytes, took_ms(ATTENTION))


def _prefill(loaded: LoadedModel, engine: Engine, machine: MachineRates) -> StepLimit | None:
    asked = machine.products
    if asked is None or mx.default_device() != mx.cpu:
        return None
    rng = random.Random(0)
    prompts = [random_prompt(rng, loaded, PREFILL_TOKENS) for _ in range(1 + PREFILLS)]
    times = [answer(engine, greedy(prompt, 2, uuid.uuid4().hex)).first_token_s for prompt in prompts]
    took_ms = 1e3 * statistics.median(times[1:])  # the first one is a warm-up
    num_products = PREFILL_TOKENS * asked.in_layers + asked.in_output
    return machine.multiplying(f"a prompt of {PREFILL_TOKENS} tokens, as a product", num_products, took_ms)


def _decode(loaded: LoadedModel, engine: Engine, batch: int, prompt_tokens: int, reply_tokens: int) -> Streams:
    rng, streams, salt = random.Random(batch), Streams(engine), uuid.uuid4().hex
    for _ in range(batch):
        streams.start(greedy(random_prompt(rng, loaded, prompt_tokens), reply_tokens, salt))
    streams.finish()
    return streams


def _step_time(batch: int, streams: Streams, sampler: StackSampler) -> StepTime:
    start_s = max(stream.times[0] for stream in streams)
    end_s = min(stream.times[-1] for stream in streams)
    gaps = [b - a for stream in streams for a, b in stream.gaps() if start_s <= a and b <= end_s]
    if not gaps:
        raise KvstrataError("The streams did not decode together. Next: --reply-tokens with a larger number")
    step_ms = statistics.median(gaps) * 1e3
    counted = sampler.between(start_s, end_s)
    total = max(1, counted.total())
    shares = [StepShare(what, count / total, count / total * step_ms) for what, count in counted.most_common()]
    num_tokens = sum(start_s < at_s <= end_s for stream in streams for at_s in stream.times)
    return StepTime(batch, num_tokens / (end_s - start_s), step_ms, counted.total(), tuple(shares))


def table(figures: StepFigures) -> str:
    parts = []
    for step in figures.steps:
        title = f"batch {step.batch}"
        columns: list[tuple[str, str, Callable[[StepShare], object]]] = [
            (title, "<40", lambda row: row.what),
            ("ms", ">8.2f", lambda row: row.step_ms),
            ("share", ">8.0%", lambda row: row.share),
        ]
        note = f"a step {step.step_ms:.2f} ms, {step.tokens_s:.1f} tokens/s, {step.num_samples} samples"
        parts += [lay_out(step.shares, columns, note), ""]
        if step.limits:
            parts += [_limits_table(f"batch {step.batch}, beside plain work", step.limits), ""]
    if figures.prefill is not None:
        parts += [_limits_table("a prompt, beside plain work", [figures.prefill]), ""]
    return "\n".join(
        [
            *parts,
            f"A copy moves {figures.copy_gb_s:,.1f} GB/s; there are {figures.weight_bytes / MIB:,.0f} MiB of weights.",
            f"A float32 product runs at {figures.product_gflops:,.0f} GFLOP/s.",
        ]
    )


def _limits_table(title: str, limits: Sequence[StepLimit]) -> str:
    columns: list[tuple[str, str, Callable[[StepLimit], object]]] = [
        (title, "<40", lambda row: row.what),
        ("plain ms", ">10.2f", lambda row: row.plain_ms),
        ("took ms", ">10.2f", lambda row: row.took_ms),
        ("share", ">8.0%", lambda row: row.share),
    ]
    return lay_out(limits, columns)


app = command_line()


@app.command()
def main(
    model: Model = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each prompt.")] = 256,
    reply_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each reply.")] = 96,
    random_weights: RandomWeights = False,
    as_json: Json = False,
) -> None:
    """Measure the time of a decode step by place, beside what the memory and the products of this machine allow."""
    loaded = load_model(model, random_weights=random_weights)
    sizes = numbers(batches, 1, MAX_BATCH)
    with running(Engine(loaded, EngineLimits(prefill_share=1.0), Metrics())) as engine:
        show(measure(loaded, engine, sizes, prompt_tokens, reply_tokens, progress=say), table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
