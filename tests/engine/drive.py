"""A loop without a thread, stepped by the test, and what its requests were told."""

from __future__ import annotations

import gc
import itertools

import mlx.core as mx

from kvstrata.disk.tier import DiskTier
from kvstrata.engine.limits import Limits, Storage
from kvstrata.engine.loop import Loop
from kvstrata.engine.memory import Budget
from kvstrata.engine.request import Event, Failed, Finished, Piece, Prefilled, Request, Sampling, TokenLogprob
from kvstrata.engine.resume import make_resume
from kvstrata.engine.runner import Runner
from kvstrata.engine.sequence import Sequence
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.store.cold.cold import Cold
from kvstrata.store.store import Store
from kvstrata.text.detokenizer import Detokenizer
from tests.tiny import layout_of

GIB = 1 << 30
GREEDY = Sampling(temperature=0, num_logprobs=0)


class Client:
    """One request as its sender sees it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: list[Event] = []

    @property
    def ids(self) -> list[int]:
        return [id_ for event in self.events if isinstance(event, Piece) for id_ in event.ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for event in self.events if isinstance(event, Piece) for logprob in event.logprobs]

    @property
    def prefilled(self) -> list[int]:
        return [event.done for event in self.events if isinstance(event, Prefilled)]

    @property
    def end(self) -> Finished | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished)
        return self.end


class Drive:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits | None = None,
        *,
        kv_bytes: int | None = None,
        storage: Storage | None = None,
        tier: DiskTier | None = None,
        patience_s: float = 60.0,
    ) -> None:
        limits = limits or Limits()
        layout = layout_of(loaded, limits.max_kv_size)
        cold = None if tier is None else Cold(tier, layout, post=lambda _: None, patience_s=patience_s)
        self.budget = Budget(kv_bytes or 4 * GIB, layout.fixed_bytes, layout.token_bytes)
        self.metrics = Metrics()
        self.loop = Loop(
            Runner(loaded.module, layout),
            make_resume(
                loaded,
                layout,
                self.budget,
                storage or Storage(),
                limits.max_kv_size,
                cold,
                limits.prefill_chunk_tokens,
            ),
            self.budget,
            limits,
            self.metrics,
            vocab_size=loaded.vocab_size,
            detokenizer=lambda _: Detokenizer(loaded.tokenizer),
        )
        self._numbers = itertools.count()

    @property
    def store(self) -> Store:
        assert self.loop._resume.store is not None
        return self.loop._resume.store

    def clear(self) -> None:
        """Forget all that is stored."""
        while self.loop.has_chores:
            self.loop.do_chores(1.0)
        self.store.clear()
        gc.collect()  # what earlier tests left must not go while this one measures
        mx.clear_cache()

    def submit(self, prompt: list[int], max_tokens: int = 8, sampling: Sampling = GREEDY, **fields: object) -> Client:
        number = next(self._numbers)
        request = Request(f"r{number}", tuple(prompt), max_tokens, sampling, **fields)  # pyright: ignore[reportArgumentType]
        client = Client(request)
        room = self.loop.budget.reply_tokens(len(prompt), max_tokens)
        self.loop.enqueue(Sequence(request, client.events.append, room, number))
        return client

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if self.loop.idle:
                return
            self.loop.step()
        raise AssertionError(f"not done after {most_steps} steps")

    def set_aside_count(self) -> float:
        return self.metrics.registry.get_sample_value("kvstrata_set_aside_total") or 0.0
