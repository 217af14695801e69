"""A long prompt beside running streams: how much slower their tokens come, and how much later its own first one, over
the share of the time that prompts may take."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvstrata.bench.driver import Figure, Progress, lay_out, silent
from kvstrata.bench.streams import Streams, answer, greedy, random_prompt, running
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.errors import KvstrataError
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
STREAM_PROMPT_TOKENS = 64
# Of each stream, before the prompt comes and after its first token: how long a step takes without it.
STEADY_TOKENS = 24
# At the default share: what a running stream and a new prompt may lose to each other.
BOUND = 2.5


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
        is_within = max(self.gap_ratio, self.first_ratio) <= BOUND
        ratios = {"gap_ratio": self.gap_ratio, "first_ratio": self.first_ratio}
        return {**super().as_json(), **ratios, "bound": BOUND, "is_within_bound": is_within}


def measure(
    loaded: LoadedModel,
    *,
    shares: Sequence[float] = SHARES,
    streams: int = 1,
    prompt_tokens: int = 3000,
    progress: Progress = silent,
) -> list[Sharing]:
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    rows = []
    for share in shares:
        progress(f"share {share:g}: {prompt_tokens} prompt tokens, alone and beside {streams}")
        limits = EngineLimits(max_running=streams + 1, prefill_share=share)
        with running(Engine(loaded, limits, Metrics())) as engine:
            rows.append(_measure(engine, loaded, share, streams, prompt_tokens))
    return rows


def table(rows: Sequence[Sharing]) -> str:
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


def _measure(engine: Engine, loaded: LoadedModel, share: float, num_streams: int, prompt_tokens: int) -> Sharing:
    rng = random.Random(1)

    def first_token_s() -> float:
        return answer(engine, greedy(random_prompt(rng, loaded, prompt_tokens), 1)).first_token_s

    alone_s = first_token_s()
    streams = Streams(engine)
    for _ in range(num_streams):
        prompt = random_prompt(rng, loaded, STREAM_PROMPT_TOKENS)
        streams.start(greedy(prompt, engine.context_tokens - STREAM_PROMPT_TOKENS))
    _wait_for(streams, STEADY_TOKENS + 1)
    began_s = time.perf_counter()
    first_s = first_token_s()
    ended_s = time.perf_counter()
    _wait_for(streams, STEADY_TOKENS)
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
