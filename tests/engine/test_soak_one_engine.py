"""One engine for many short requests: what each of them takes comes back.

    make soak                                50,000 requests, after the soak with restarts
    KVSTRATA_SOAK_REQUESTS=20000 make soak

Restarts hide what a request leaves behind, so nothing is restarted here: objects of every type and memory must be where
they were after a warm-up.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter

import mlx.core as mx
import psutil
import pytest

from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Request, Sampling
from kvstrata.metrics import Metrics
from kvstrata.platform.memory import trim_heap
from kvstrata.prefix_cache import entry_table
from tests.engine.test_engine import Reply
from tests.engine.test_object_counts import count_objects
from tests.support.models import VOCAB, tiny_loaded

# In a run of all slow tests; `make soak` asks for 50,000.
DEFAULT_REQUESTS = 50_000  # with far fewer the warm-up ends before the uses that are waited for have settled
KIB, MIB = 1 << 10, 1 << 20
MEMORY_BYTES = (2048 if mx.cuda.is_available() else 256) * MIB
HOT_BYTES = 256 * KIB
AT_ONCE = 16
# All that remembers tokens or sessions is full by then.
WARM_UP_SHARE = 0.3
# Of one type, for each request after the warm-up; and some that come and go.
MOST_GROWTH_PER_REQUEST = 0.01
MOST_NOISE = 500
MOST_ACTIVE_GROWTH_BYTES = MIB
MOST_RESIDENT_GROWTH_BYTES = (64 if mx.cuda.is_available() else 12) * MIB
NUM_SESSIONS = 40
SHARED = [[i * step % VOCAB for i in range(8)] for step in (3, 5, 7)]


def submit_batch(engine: Engine, rng: random.Random, first_number: int) -> None:
    """Short requests of many kinds, until all have ended: some begin alike, some stop early, some clients leave."""
    replies = [submit_one(engine, rng, f"short-{first_number + i}") for i in range(AT_ONCE)]
    for reply in replies:
        reply.wait()


def submit_one(engine: Engine, rng: random.Random, name: str) -> Reply:
    prompt = [*rng.choice([[], *SHARED]), *(rng.randrange(VOCAB) for _ in range(rng.randint(3, 16)))]
    leaves = rng.random() < 0.05

    def cancel(_: Event) -> None:
        if leaves:
            engine.cancel(name)

    reply = Reply(cancel)
    request = Request(
        name,
        tuple(prompt),
        rng.randint(1, 3),
        Sampling(temperature=rng.choice([0.0, 1.0]), num_logprobs=rng.choice([None, 2])),
        salt=rng.choice(["", "", "a salt"]),
        session=f"session-{rng.randrange(NUM_SESSIONS)}" if rng.random() < 0.3 else "",
    )
    engine.submit(request, reply.sink)
    return reply


def settled_objects(engine: Engine) -> Counter[str]:
    """Objects by type, when all work on what is cached is done. Counted on the engine's thread: no other runs then."""

    def count(core: object) -> Counter[str]:
        pacer = core.pacer  # pyright: ignore[reportAttributeAccessIssue]
        while pacer.has_work:
            pacer.run_slice(1.0)
        return count_objects()

    return engine.ask(count).result(60)


def resident_bytes() -> int:
    gc.collect()
    mx.clear_cache()
    trim_heap()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_objects_and_memory_stay_flat_over_many_short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # What was evicted is remembered for a million tokens: as many requests would not fill that.
    monkeypatch.setattr(entry_table, "GHOST_TOKENS", 1 << 11)
    num_requests = int(os.environ.get("KVSTRATA_SOAK_REQUESTS", DEFAULT_REQUESTS))
    rng = random.Random(os.environ.get("KVSTRATA_SOAK_SEED", "1"))
    engine = Engine(
        tiny_loaded("llama", 1), EngineLimits(memory_bytes=MEMORY_BYTES), Metrics(), KvConfig(hot_bytes=HOT_BYTES)
    )
    engine.start()
    try:
        num_warm_up = int(WARM_UP_SHARE * num_requests)
        serve(engine, rng, 0, num_warm_up)
        before, active_before, resident_before = settled_objects(engine), mx.get_active_memory(), resident_bytes()
        serve(engine, rng, num_warm_up, num_requests)
        after, active_after, resident_after = settled_objects(engine), mx.get_active_memory(), resident_bytes()
        usage = engine.ask(lambda core: CacheApi(core).usage()).result(60)
    finally:
        engine.stop()
    assert usage.counters["evicted_tokens"] > num_requests
    most = MOST_NOISE + MOST_GROWTH_PER_REQUEST * (num_requests - num_warm_up)
    grown = {name: after[name] - before[name] for name in after if after[name] - before[name] > most}
    print(
        f"objects {before.total()} -> {after.total()}, resident {resident_before // MIB} -> {resident_after // MIB} MiB"
    )
    assert not grown
    assert active_after - active_before <= MOST_ACTIVE_GROWTH_BYTES
    assert resident_after - resident_before <= MOST_RESIDENT_GROWTH_BYTES


def serve(engine: Engine, rng: random.Random, start: int, end: int) -> None:
    began_s = time.monotonic()
    for number in range(start, end, AT_ONCE):
        submit_batch(engine, rng, number)
        if number % 4096 < AT_ONCE:
            resident = psutil.Process().memory_info().rss // MIB
            print(f"{number} requests after {time.monotonic() - began_s:.0f} s, {resident} MiB resident", flush=True)
