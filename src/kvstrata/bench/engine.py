"""The engine beside mlx-lm's BatchGenerator: the same model, the same prompts, one process, taking turns.

Decoding is timed while the batch is full: from when every sequence has its first token to when the first of them ends.
Prefill is timed from handing in one prompt to its first token. Rates are medians over the rounds, ratios are medians of
the rounds' ratios.
"""

from __future__ import annotations

import queue
import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
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
    prompt_tokens: int = 64,  # of the shortest prompt
    reply_tokens: int = 48,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> EngineFigures:
    rng = random.Random(0)
    by_batch = {}
    for size in batches:
        progress(f"batch {size}")
        prompts = [_prompt(rng, loaded, prompt_tokens + 32 * i) for i in range(size)]
        by_batch[str(size)] = _compare(loaded, engine, prompts, reply_tokens, rounds, lambda run: run.decode_tokens_s)
    progress(f"prefill of {PREFILL_TOKENS} tokens")
    prompts = [_prompt(rng, loaded, PREFILL_TOKENS)]
    rate = lambda run: PREFILL_TOKENS / run.first_token_s  # noqa: E731
    return EngineFigures(by_batch, _compare(loaded, engine, prompts, 1, rounds, rate))


def _compare(
    loaded: LoadedModel, engine: Engine, prompts: Prompts, reply_tokens: int, rounds: int, rate: Callable[[Run], float]
) -> Comparison:
    runners = [lambda n: run_ours(engine, prompts, n), lambda n: run_mlx_lm(loaded, prompts, n)]
    for warm_up in runners:
        warm_up(2)
    ours, theirs, same = [], [], 1.0
    for turn in range(rounds):
        # The runner that goes second may find the machine warmer: take turns at that too.
        order = (0, 1) if turn % 2 == 0 else (1, 0)
        runs = {i: runners[i](reply_tokens) for i in order}
        ours.append(rate(runs[0]))
        theirs.append(rate(runs[1]))
        same = min(same, _same_share(runs[0].replies, runs[1].replies))
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Comparison(statistics.median(ours), statistics.median(theirs), ratio, same)


def _prompt(rng: random.Random, loaded: LoadedModel, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(loaded.vocab_size) for _ in range(num_tokens))


class Run:
    """Tokens as they arrive, and when."""

    def __init__(self, num_replies: int, reply_tokens: int) -> None:
        self.replies: Replies = [[] for _ in range(num_replies)]
        self._reply_tokens = reply_tokens
        self._began_s = time.perf_counter()
        self._all_began_s = 0.0  # when the last of them had its first token
        self._first_ended_s = 0.0
        self._num_between = 0

    def add(self, index: int, tokens: Sequence[int]) -> None:
        now_s = time.perf_counter()
        if all(self.replies) and not self._first_ended_s:
            self._num_between += len(tokens)
        self.replies[index].extend(tokens)
        if not self._all_began_s and all(self.replies):
            self._all_began_s = now_s
        if not self._first_ended_s and len(self.replies[index]) >= self._reply_tokens:
            self._first_ended_s = now_s

    @property
    def first_token_s(self) -> float:
        return self._all_began_s - self._began_s

    @property
    def decode_tokens_s(self) -> float:
        return self._num_between / (self._first_ended_s - self._all_began_s)


def run_ours(engine: Engine, prompts: Prompts, reply_tokens: int) -> Run:
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    run = Run(len(prompts), reply_tokens)
    salt = uuid.uuid4().hex  # what an earlier round stored is not found: mlx-lm's side computes all of it, too
    for i, prompt in enumerate(prompts):
        request = Request(f"bench-{i}", prompt, reply_tokens, Sampling(temperature=0), salt=salt)
        engine.submit(request, lambda event, i=i: events.put((i, event)))
    left = len(prompts)
    while left:
        i, event = events.get()
        if isinstance(event, Piece):
            run.add(i, event.ids)
        elif isinstance(event, Failed):
            raise KvstrataError(event.message)
        elif isinstance(event, Finished):
            left -= 1
    return run


def run_mlx_lm(loaded: LoadedModel, prompts: Prompts, reply_tokens: int) -> Run:
    generator = BatchGenerator(loaded.module)
    run = Run(len(prompts), reply_tokens)
    order = generator.insert([list(prompt) for prompt in prompts], [reply_tokens] * len(prompts))
    left = len(order)
    while left:
        for response in generator.next_generated():
            run.add(order.index(response.uid), [response.token])
            left -= response.finish_reason is not None
    generator.close()
    return run


def _same_share(a: Replies, b: Replies) -> float:
    total = sum(len(reply) for reply in a)
    return sum(_same_prefix(x, y) for x, y in zip(a, b, strict=True)) / total


def _same_prefix(a: list[int], b: list[int]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
