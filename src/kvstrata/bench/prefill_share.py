"""A long prompt beside running streams: how much slower their tokens come, and how much later its own first one, over
the share of the time that prompts may take."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.bench.requantize import Stream
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.request import Request, Sampling
from kvstrata.errors import KvstrataError
from kvstrata.layers.kinds import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
STREAM_PROMPT_TOKENS = 64
# Of each stream, before the prompt comes and after its first token: how long a step takes without it.
STEADY_TOKENS = 24
# At the default share: what a running stream and a new prompt may lose to each other.
BOUND = 2.5


@dataclass(frozen=True)
class Sharing:
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
        is_within = max(self.gap_ratio, self.first_ratio) <= BOUND
        ratios = {"gap_ratio": self.gap_ratio, "first_ratio": self.first_ratio}
        return {**asdict(self), **ratios, "bound": BOUND, "is_within_bound": is_within}


def measure(
    loaded: LoadedModel,
    *,
    memory_bytes: int,
    shares: Sequence[float] = SHARES,
    streams: int = 1,
    prompt_tokens: int = 3000,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Sharing]:
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    rows = []
    for share in shares:
        progress(f"share {share:g}: {prompt_tokens} prompt tokens, alone and beside {streams}")
        limits = Limits(memory_bytes=memory_bytes, max_running=streams + 1, prefill_share=share)
        engine = Engine(loaded, limits, Metrics())
        engine.start()
        try:
            rows.append(_measure(engine, loaded, share, streams, prompt_tokens))
        finally:
            engine.stop()
    return rows


def _measure(engine: Engine, loaded: LoadedModel, share: float, num_streams: int, prompt_tokens: int) -> Sharing:
    rng = random.Random(1)
    news = threading.Condition()

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(loaded.vocab_size) for _ in range(num_tokens))

    def start(name: str, num_tokens: int, reply_tokens: int) -> Stream:
        stream = Stream(news)
        engine.submit(Request(name, prompt(num_tokens), reply_tokens, Sampling(temperature=0)), stream.sink)
        return stream

    def first_token_s(name: str) -> float:
        began_s = time.perf_counter()
        stream = start(name, prompt_tokens, 1)
        stream.ended.wait()
        if stream.failure:
            raise KvstrataError(f"The prompt failed: {stream.failure}")
        return stream.times[0] - began_s

    reply_tokens = engine.context_tokens - STREAM_PROMPT_TOKENS
    alone_s = first_token_s("alone")
    running = [start(f"stream-{i}", STREAM_PROMPT_TOKENS, reply_tokens) for i in range(num_streams)]
    _wait(news, running, STEADY_TOKENS + 1)
    began_s = time.perf_counter()
    first_s = first_token_s("beside")
    ended_s = time.perf_counter()
    _wait(news, running, STEADY_TOKENS)
    for i in range(num_streams):
        engine.cancel(f"stream-{i}")
    beside = [gap for stream in running for a, gap in _gaps(stream) if began_s <= a and a + gap <= ended_s]
    alone = [gap for stream in running for a, gap in _gaps(stream) if a + gap < began_s or a > ended_s]
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


def _gaps(stream: Stream) -> list[tuple[float, float]]:
    """Between tokens: when the earlier one came, and how long after it the later one."""
    return [(a, b - a) for a, b in pairwise(list(stream.times))]


def _wait(news: threading.Condition, running: list[Stream], num_tokens: int) -> None:
    """Until every stream has so many tokens more. Raises if one ends: then it was too short."""
    with news:
        wanted = [len(stream.times) + num_tokens for stream in running]
        news.wait_for(lambda: all(len(s.times) >= n or s.ended.is_set() for s, n in zip(running, wanted, strict=True)))
    if any(stream.ended.is_set() for stream in running):
        raise KvstrataError("A stream ended while others were measured. Take a shorter prompt: --prompt-tokens.")
