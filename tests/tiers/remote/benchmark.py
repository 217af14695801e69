"""Measurements of docs/remote.md on this machine, with the default model.

    python -m tests.tiers.remote.benchmark [NUM_TOKENS]
    python -m tests.tiers.remote.benchmark troubles [NAME ...]

The first form measures the time to first token of a prompt that another server computed: computed again, loaded from a
Valkey on loopback, and loaded over 1 MB/s, where loading does not pay and must cost nothing. `troubles` measures the
99th percentile of the time between two tokens of a stream beside other prompts, with a store that works or is in
trouble, as a ratio to a server without a store. Results are medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import numpy as np

from kvstrata.engine.config import EngineLimits
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Finished, Request, TextDelta
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel, load
from kvstrata.tiers.options import RemoteOptions
from kvstrata.tiers.remote.url import parse_url
from tests.engine.drive import GREEDY
from tests.engine.test_engine import Reply
from tests.tiers.remote.stores import SLOW_S, TROUBLES, Proxy, valkey
from tests.tiers.remote.test_server import write_to_store

ROUNDS = 5
SLOW_BYTES_PER_S = 1e6
STREAM_TOKENS = 150


@contextmanager
def engine_on(loaded: LoadedModel, url: str | None) -> Iterator[Engine]:
    mx.eval(arrays_in(loaded.module))
    engine = Engine(loaded, EngineLimits(), Metrics(), remote=None if url is None else RemoteOptions(parse_url(url)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def first_token(engine: Engine, name: str, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Return the time to first token in seconds, and the number of cached tokens."""
    reply, came = Reply(), list[float]()

    def sink(event: Event) -> None:
        if isinstance(event, TextDelta | Finished):
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

    with valkey() as server:
        with engine_on(loaded, server.url) as engine:
            for number, prompt in enumerate(prompts):
                first_token(engine, f"writes {number}", prompt)
            engine.ask(write_to_store).result(300)
            usage = engine.ask_cache(lambda cache: cache.usage()).result(60).remote
            assert usage is not None
            token_bytes = usage.usage.written_bytes / max(1, usage.written_tokens)
        proxy = Proxy(server.port, bytes_per_s=SLOW_BYTES_PER_S)
        urls = {"computed": None, "loaded": server.url, "over 1 MB/s": f"redis://127.0.0.1:{proxy.port}/0"}
        times: dict[str, list[float]] = {name: [] for name in urls}
        cached: dict[str, list[int]] = {name: [] for name in urls}
        with ExitStack() as stack:
            engines = {name: stack.enter_context(engine_on(loaded, url)) for name, url in urls.items()}
            for number, prompt in enumerate(prompts):
                # In turns, because the other load of the machine changes from minute to minute.
                for name, engine in engines.items():
                    seconds, tokens = first_token(engine, f"{name} {number}", prompt)
                    times[name].append(seconds)
                    cached[name].append(tokens)
        proxy.close()
    print(f"{num_tokens} tokens, {ROUNDS} prompts in turns; {token_bytes / 1000:.1f} kB a token")
    for name in urls:
        ratios = [mine / alone for mine, alone in zip(times[name], times["computed"], strict=True)]
        print(
            f"{name:<12} {statistics.median(times[name]):.3f} s, of computed {statistics.median(ratios):.3f}; "
            f"each {[f'{each:.2f}' for each in times[name]]}, tokens found {cached[name]}"
        )


def pauses(engine: Engine, name: str, prompts: Sequence[tuple[int, ...]]) -> float:
    """Return the 99th percentile of the seconds between two tokens of a stream, while these prompts are served, too."""
    reply, came = Reply(), list[float]()

    def sink(event: Event) -> None:
        if isinstance(event, TextDelta):
            came.append(time.perf_counter())
        reply.sink(event)

    engine.submit(Request(f"{name} stream", prompts[0][:32], STREAM_TOKENS, GREEDY), sink)
    for number, prompt in enumerate(prompts):
        first_token(engine, f"{name} {number}", prompt)
    reply.wait()
    return float(np.percentile(np.diff(came), 99))


def troubles(asked: Sequence[str], rounds: int = ROUNDS) -> None:
    loaded = load(None)
    generator = np.random.default_rng(2)
    for trouble in asked:
        ratios = []
        with valkey() as server, ExitStack() as stack:
            url = server.url
            if trouble == "slow":
                proxy = Proxy(server.port)
                stack.callback(proxy.close)
                url = f"redis://127.0.0.1:{proxy.port}/0"
                proxy.delay_s = SLOW_S
            alone = stack.enter_context(engine_on(loaded, None))
            shares = stack.enter_context(engine_on(loaded, url))
            if trouble not in ("none", "slow"):
                server.cause(trouble)
            for number in range(rounds):
                shape = (2, 300)
                prompts = [tuple(map(int, row)) for row in generator.integers(100, 40_000, shape)]
                both = {"alone": alone, "shares": shares}
                took = {name: pauses(engine, f"{name} {number}", prompts) for name, engine in both.items()}
                ratios.append(took["shares"] / took["alone"])
        print(
            f"{trouble:<10} p99 of {statistics.median(ratios):.3f} beside no tier; each {np.round(ratios, 2)}",
            flush=True,
        )


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else "2000"
    troubles(sys.argv[2:] or ("none", *TROUBLES)) if asked == "troubles" else main(int(asked))
