"""An engine core without a thread, stepped by the test, and the events of its requests."""

from __future__ import annotations

import gc
import itertools
import time

import mlx.core as mx

from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.budget import Budget
from kvstrata.engine.build import OpenTiers, ServedModel, build_core
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.memory_plan import MemoryPlan
from kvstrata.engine.request import Event, Failed, Finished, PrefillProgress, Request, Sampling, TextDelta, TokenLogprob
from kvstrata.engine.sequence import Sequence
from kvstrata.kv.layout import Layout
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.tier_client import TierClient
from kvstrata.tiers.interface import NoTier, Tier
from tests.support.models import layout_of

GIB = 1 << 30
GREEDY = Sampling(temperature=0, num_logprobs=0)


class Client:
    """A request as its client sees it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.events: list[Event] = []

    @property
    def ids(self) -> list[int]:
        return [id_ for event in self.events if isinstance(event, TextDelta) for id_ in event.ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for event in self.events if isinstance(event, TextDelta) for logprob in event.logprobs]

    @property
    def prefilled(self) -> list[int]:
        return [event.num_done for event in self.events if isinstance(event, PrefillProgress)]

    @property
    def end(self) -> Finished | Failed | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished)
        return self.end


class MovableClock:
    """Monotonic clock that a test can advance."""

    def __init__(self) -> None:
        self._advanced_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._advanced_s

    def advance(self, seconds: float) -> None:
        self._advanced_s += seconds


class Drive:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: EngineLimits | None = None,
        *,
        kv_bytes: int | None = None,
        storage: KvConfig | None = None,
        tier: Tier | None = None,
        patience_s: float = 60.0,
        layout: Layout | None = None,
    ) -> None:
        limits = limits or EngineLimits()
        layout = layout or layout_of(loaded, limits.max_kv_size)
        cold = TierClient(tier or NoTier(), layout, post=lambda _: None, patience_s=patience_s)
        plan = MemoryPlan(8 * GIB, 0, 0, 0, 0, kv_bytes or 4 * GIB)
        self.budget = Budget(plan.kv_bytes, layout.fixed_bytes, layout.token_bytes)
        self.metrics = Metrics()
        self.clock = MovableClock()
        served = ServedModel(loaded, layout, plan, self.budget, limits, storage or KvConfig())
        self.core = build_core(served, OpenTiers(cold), self.metrics, self.clock)
        # Steps overlap as on a GPU. Tests of a whole engine run it as this machine does.
        self.core.executor.overlaps = True
        self._numbers = itertools.count()

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.core.prefix_cache

    @property
    def cache(self) -> CacheApi:
        return CacheApi(self.core)

    def clear(self) -> None:
        """Empty the cache."""
        while self.core.pacer.has_work:
            self.core.pacer.run_slice(1.0)
        self.prefix_cache.evictor.clear()
        gc.collect()  # what earlier tests left must not go while this one measures
        mx.clear_cache()

    def submit(self, prompt: list[int], max_tokens: int = 8, sampling: Sampling = GREEDY, **fields: object) -> Client:
        number = next(self._numbers)
        request = Request(f"r{number}", tuple(prompt), max_tokens, sampling, **fields)  # pyright: ignore[reportArgumentType]
        client = Client(request)
        reply_tokens = self.core.budget.reply_tokens(len(prompt), max_tokens)
        self.core.executor.enqueue_sequence(Sequence(request, client.events.append, reply_tokens, number))
        return client

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if self.core.executor.is_idle:
                return
            self.core.executor.step()
        raise AssertionError(f"not done after {most_steps} steps")

    def num_preempted(self) -> float:
        return self.metrics.registry.get_sample_value("kvstrata_preemptions_total") or 0.0


def do_one_step(pacer: BackgroundPacer) -> None:
    """Make the pacer run the smallest slice between two steps, whatever its length."""
    pacer.run_between_steps = lambda **_: pacer.run_slice(0.0)
