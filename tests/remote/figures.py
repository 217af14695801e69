"""Figures of docs/remote.md, on this machine: python -m tests.remote.figures [tokens]

Time to the first token of a prompt that another server computed: computed again, loaded from a Valkey on loopback, and
through a network of 1 MB/s, where loading does not pay and must cost nothing. The default model, medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.request import Event, Finished, Piece, Request
from kvstrata.layers.kinds import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import load
from kvstrata.models.loaded import LoadedModel
from tests.engine.drive import GREEDY
from tests.engine.test_engine import Reply
from tests.remote.stores import Proxy, options_for, valkey
from tests.remote.test_servers import shared

ROUNDS = 3
SLOW_BYTES_PER_S = 1e6


@contextmanager
def engine_on(loaded: LoadedModel, url: str | None) -> Iterator[Engine]:
    mx.eval(arrays_in(loaded.module))
    engine = Engine(loaded, Limits(), Metrics(), remote=None if url is None else options_for(url))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def first_token(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds, and how many tokens were not computed."""
    reply, came = Reply(), list[float]()

    def sink(event: Event) -> None:
        if isinstance(event, Piece | Finished):
            came.append(time.perf_counter())
        reply.sink(event)

    began_s = time.perf_counter()
    engine.submit(Request(name, prompt, 2, GREEDY), sink)
    ended = reply.wait()
    assert isinstance(ended, Finished)
    return came[0] - began_s, ended.usage.cached_tokens


def main(num_tokens: int) -> None:
    loaded = load(None)
    generator = np.random.default_rng(1)
    prompts = [tuple(map(int, generator.integers(100, 40_000, num_tokens))) for _ in range(ROUNDS)]

    def round_of(engine: Engine, word: str) -> tuple[list[float], list[int]]:
        first_token(engine, f"{word} warm", tuple(map(int, generator.integers(100, 40_000, 300))))
        times = [first_token(engine, f"{word} {number}", prompt) for number, prompt in enumerate(prompts)]
        return [seconds for seconds, _ in times], [cached for _, cached in times]

    with valkey() as server:
        with engine_on(loaded, server.url) as engine:
            round_of(engine, "writes")
            engine.ask(shared).result(300)
            usage = engine.cache.usage().result(60).remote
            assert usage is not None
            written_bytes, written_tokens = usage.usage.written_bytes, usage.written_tokens
        with engine_on(loaded, None) as engine:
            computed, _ = round_of(engine, "computes")
        with engine_on(loaded, server.url) as engine:
            came, cached = round_of(engine, "loads")
        proxy = Proxy(server.port, bytes_per_s=SLOW_BYTES_PER_S)
        with engine_on(loaded, f"redis://127.0.0.1:{proxy.port}/0") as engine:
            slow, slow_cached = round_of(engine, "slow")
        proxy.close()
    alone = statistics.median(computed)
    print(f"{num_tokens} tokens, {ROUNDS} prompts; {written_bytes / max(1, written_tokens) / 1000:.1f} kB a token")
    print(f"computed      {alone:.3f} s  {[f'{each:.2f}' for each in computed]}")
    print(f"loaded        {statistics.median(came):.3f} s  {[f'{each:.2f}' for each in came]}  tokens {cached}")
    print(f"over 1 MB/s   {statistics.median(slow):.3f} s  {[f'{each:.2f}' for each in slow]}  tokens {slow_cached}")
    print(f"over 1 MB/s / computed: {statistics.median(slow) / alone:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
