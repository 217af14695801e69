"""Chats that need four times the memory there is: precision that steps down, beside eviction at full precision.

The same load twice, one after the other: every chat comes once, then all of them come back for their next turns.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.memory import limit_for
from kvstrata.engine.planned import least_token_bytes, sealed_pairs
from kvstrata.engine.remembered import remembered_scratch
from kvstrata.engine.request import Event, Failed, Finished, Piece, Request, Sampling
from kvstrata.engine.runner import Runner
from kvstrata.engine.scratch import Shape, max_chunk
from kvstrata.engine.storage import Storage
from kvstrata.layers.kinds import Layout, arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.models.probe import probe

SAMPLE_S = 0.1  # 10 Hz


@dataclass(frozen=True)
class Load:
    chats: int = 12
    turns: int = 3
    turn_tokens: int = 192  # that each turn adds to the prompt
    reply_tokens: int = 24
    at_once: int = 2  # requests that run together

    @property
    def chat_tokens(self) -> int:
        """Of one chat at its end."""
        return self.turns * (self.turn_tokens + self.reply_tokens)

    @property
    def num_tokens(self) -> int:
        """All that is computed once, if nothing is ever computed again."""
        return self.chats * self.turns * (self.turn_tokens + self.reply_tokens)


@dataclass(frozen=True)
class LadderRun:
    policy: str  # "evict" at full precision, or "ladder"
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    limit_bytes: int  # of all memory: weights, KV and what passes take
    budget_bytes: int  # of KV
    needed_bytes: int  # of KV, to keep all of it at full precision
    sampled_peak_bytes: int  # active memory, looked at ten times a second
    peak_bytes: int  # what the allocator says it ever was
    samples: int
    stepped_down_spans: int
    evicted_tokens: int
    seconds: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate}


class Sampler:
    """Looks at the allocator's active memory at a steady rate, on a thread of its own."""

    def __init__(self, others_bytes: int) -> None:
        self._others_bytes = others_bytes
        self.peak_bytes = 0
        self.num_samples = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="memory-sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, mx.get_active_memory() - self._others_bytes)
            self.num_samples += 1
            if ended.wait(SAMPLE_S):
                return


@dataclass
class Chat:
    """One conversation, a turn at a time."""

    name: str
    tokens: list[int] = field(default_factory=list)  # all turns so far, replies included
    ended: threading.Event = field(default_factory=threading.Event)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0

    def sink(self, event: Event) -> None:
        if isinstance(event, Piece):
            self.tokens += event.ids
        elif isinstance(event, Finished | Failed):
            if isinstance(event, Finished):
                self.prompt_tokens += event.usage.prompt_tokens
                self.cached_tokens += event.usage.cached_tokens
            else:
                self.failed += 1
            self.ended.set()


def measure(
    loaded: LoadedModel, load: Load, *, share: float = 0.25, progress: Callable[[str], None] = lambda _: None
) -> list[LadderRun]:
    """Both policies under a memory limit that leaves KV this share of what the load needs at full precision."""
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    layout = probe(loaded.module, None)
    limit_bytes = _limit_bytes(loaded, layout, load, share)
    runs = []
    for policy in ("evict", "ladder"):
        progress(policy)
        runs.append(_run(loaded, load, policy, limit_bytes, _needed_bytes(layout, load)))
    return runs


def _limit_bytes(loaded: LoadedModel, layout: Layout, load: Load, share: float) -> int:
    storage = Storage(dynamic=True)
    shape = Shape(
        rows=load.at_once,
        vocab_size=loaded.vocab_size,
        max_context_tokens=load.chat_tokens,
        chunk_tokens=max_chunk(),
        pairs=sealed_pairs(layout, storage),
    )
    return limit_for(
        int(share * _needed_bytes(layout, load)),
        loaded.weight_bytes,
        remembered_scratch(loaded, Runner(loaded.module, layout), shape),
        token_bytes=least_token_bytes(layout, storage),
        context_tokens=load.chat_tokens,
    )


def _needed_bytes(layout: Layout, load: Load) -> int:
    return load.num_tokens * layout.token_bytes + load.chats * layout.fixed_bytes


def _run(loaded: LoadedModel, load: Load, policy: str, limit_bytes: int, needed_bytes: int) -> LadderRun:
    gc.collect()
    # What else the process holds is not counted.
    others_bytes = max(0, mx.get_active_memory() - loaded.weight_bytes)
    # No longer context than a chat has: one policy must not get less KV because it could hold longer ones.
    limits = Limits(
        memory_bytes=limit_bytes,
        max_running=load.at_once,
        max_waiting=load.chats,
        context_tokens=load.chat_tokens,
    )
    engine = Engine(loaded, limits, Metrics(), Storage(dynamic=policy == "ladder"))
    engine.start()
    mx.clear_cache()
    mx.reset_peak_memory()
    sampler, began_s = Sampler(others_bytes), time.perf_counter()
    try:
        with sampler.running():
            chats = _talk(engine, loaded, load)
        seconds = time.perf_counter() - began_s
        peak_bytes = mx.get_peak_memory() - others_bytes
        usage = engine.cache.usage().result()
    finally:
        engine.stop()
    return LadderRun(
        policy=policy,
        requests=load.chats * load.turns,
        failed=sum(chat.failed for chat in chats),
        prompt_tokens=sum(chat.prompt_tokens for chat in chats),
        cached_tokens=sum(chat.cached_tokens for chat in chats),
        limit_bytes=limit_bytes,
        budget_bytes=usage.budget_bytes,
        needed_bytes=needed_bytes,
        sampled_peak_bytes=sampler.peak_bytes,
        peak_bytes=peak_bytes,
        samples=sampler.num_samples,
        stepped_down_spans=usage.counters["stepped_down_spans"],
        evicted_tokens=usage.counters["evicted_tokens"],
        seconds=seconds,
    )


def _talk(engine: Engine, loaded: LoadedModel, load: Load) -> list[Chat]:
    rng = random.Random(1)
    chats = [Chat(f"chat-{number}") for number in range(load.chats)]
    for turn in range(load.turns):
        for chat in chats:
            chat.tokens += [rng.randrange(loaded.vocab_size) for _ in range(load.turn_tokens)]
            chat.ended.clear()
            name = f"{chat.name}-{turn}"
            request = Request(name, tuple(chat.tokens), load.reply_tokens, Sampling(temperature=0))
            engine.submit(request, chat.sink)
        for chat in chats:
            chat.ended.wait()
    return chats
