"""The engine beside mlx-lm's BatchGenerator: the same model, the same prompts, one process, taking turns.

Rates are what a user sees: tokens of all replies by the time from handing in the prompts to the last token, and for
prefill the tokens of one prompt by the time to its first token. Medians over the rounds.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mlx_lm.generate import BatchGenerator

from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Failed, Finished, Piece, Request, Sampling
from kvstrata.errors import KvstrataError
from kvstrata.models.loaded import LoadedModel

Prompts = list[tuple[int, ...]]
Replies = list[list[int]]

PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Comparison:
    ours_tokens_s: float
    mlx_lm_tokens_s: float
    ratio: float  # median of the rounds' ratios
    same_tokens: float  # share of tokens before the first difference (float32 ties may differ)


@dataclass(frozen=True)
class EngineFigures:
    batch: dict[str, Comparison]
    prefill: Comparison

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    loaded: LoadedModel,
    engine: Engine,
    *,
    batches: tuple[int, ...] = (1, 8),
    reply_tokens: int = 32,
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> EngineFigures:
    rng = random.Random(0)
    by_batch = {}
    for size in batches:
        progress(f"batch {size}")
        prompts = [_prompt(rng, loaded, 16 + 4 * i) for i in range(size)]
        by_batch[str(size)] = _compare(loaded, engine, prompts, reply_tokens, rounds, size * reply_tokens)
    progress(f"prefill of {PREFILL_TOKENS} tokens")
    prompts = [_prompt(rng, loaded, PREFILL_TOKENS)]
    return EngineFigures(by_batch, _compare(loaded, engine, prompts, 1, rounds, PREFILL_TOKENS))


def _compare(
    loaded: LoadedModel, engine: Engine, prompts: Prompts, reply_tokens: int, rounds: int, num_tokens: int
) -> Comparison:
    ours, theirs, same = [], [], 1.0
    _run_ours(engine, prompts, 1)
    _run_mlx_lm(loaded, prompts, 1)
    for turn in range(rounds):
        runs = [lambda: _run_ours(engine, prompts, reply_tokens), lambda: _run_mlx_lm(loaded, prompts, reply_tokens)]
        # Whoever goes second may find the machine warmer: take turns at that too.
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        timed = {i: _timed(runs[i]) for i in order}
        ours.append(num_tokens / timed[0][1])
        theirs.append(num_tokens / timed[1][1])
        same = min(same, _same_share(timed[0][0], timed[1][0]))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Comparison(statistics.median(ours), statistics.median(theirs), ratio, same)


def _prompt(rng: random.Random, loaded: LoadedModel, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(loaded.vocab_size) for _ in range(num_tokens))


def _timed(run: Callable[[], Replies]) -> tuple[Replies, float]:
    began = time.perf_counter()
    return run(), time.perf_counter() - began


def _run_ours(engine: Engine, prompts: Prompts, reply_tokens: int) -> Replies:
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    for i, prompt in enumerate(prompts):
        request = Request(f"bench-{i}", prompt, reply_tokens, Sampling(temperature=0))
        engine.submit(request, lambda event, i=i: events.put((i, event)))
    replies: Replies = [[] for _ in prompts]
    left = len(prompts)
    while left:
        i, event = events.get()
        if isinstance(event, Piece):
            replies[i].extend(event.ids)
        elif isinstance(event, Failed):
            raise KvstrataError(event.message)
        elif isinstance(event, Finished):
            left -= 1
    return replies


def _run_mlx_lm(loaded: LoadedModel, prompts: Prompts, reply_tokens: int) -> Replies:
    generator = BatchGenerator(loaded.module)
    order = generator.insert([list(prompt) for prompt in prompts], [reply_tokens] * len(prompts))
    replies: dict[int, list[int]] = {uid: [] for uid in order}
    left = len(order)
    while left:
        for response in generator.next_generated():
            replies[response.uid].append(response.token)
            left -= response.finish_reason is not None
    generator.close()
    return [replies[uid] for uid in order]


def _same_share(a: Replies, b: Replies) -> float:
    total = sum(len(reply) for reply in a)
    return sum(_same_prefix(x, y) for x, y in zip(a, b, strict=True)) / total


def _same_prefix(a: list[int], b: list[int]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
