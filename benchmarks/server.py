"""Cost of HTTP: the same streams through a real server, read by another process, and through the engine alone."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from benchmarks.common import MAX_BATCH, Rounds, Streams, command_line, greedy, run_app
from kvstrata.bench.figures import Figure, in_turns, median_ratio, seconds
from kvstrata.cli.bench_options import Json, Model, show
from kvstrata.config import load as load_settings
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Sampling
from kvstrata.models.load import LoadedModel, load
from kvstrata.platform.device import device
from kvstrata.platform.network import bind, url_of
from kvstrata.server.build import build_server
from kvstrata.server.run import Server

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class ServerFigures(Figure):
    streams: int
    engine_tokens_s: float
    http_tokens_s: float
    overhead: float  # share of time that HTTP adds: median of the rounds


def measure(loaded: LoadedModel, *, streams: int = 8, reply_tokens: int = 32, rounds: int = 5) -> ServerFigures:
    with (
        _served(loaded) as (server, url),
        _client(url, _bodies(server.state.name, loaded, streams, reply_tokens)) as through_http,
    ):

        def alone() -> None:
            _through_engine(server.state.engine, loaded, streams, reply_tokens)

        alone()
        through_http()
        times = in_turns({"engine": lambda: seconds(alone), "http": lambda: seconds(through_http)}, rounds)
    engine_s, http_s = times.values()
    num_tokens = streams * reply_tokens
    return ServerFigures(
        streams,
        num_tokens / statistics.median(engine_s),
        num_tokens / statistics.median(http_s),
        median_ratio(http_s, engine_s) - 1,
    )


def table(figures: ServerFigures) -> str:
    line = f"{figures.streams} streams: engine alone {figures.engine_tokens_s:.1f} tokens/s, over HTTP "
    return line + f"{figures.http_tokens_s:.1f}, overhead {figures.overhead:.1%}"


def _through_engine(engine: Engine, loaded: LoadedModel, streams: int, reply_tokens: int) -> None:
    running = Streams(engine)
    sampling = Sampling(temperature=0, logit_bias=tuple((id_, -100.0) for id_ in sorted(loaded.eos_ids)))
    for i in range(streams):
        running.start(replace(greedy(_prompt(i), reply_tokens), sampling=sampling, stop_ids=loaded.eos_ids))
    running.finish()


def _prompt(index: int) -> tuple[int, ...]:
    return (index + 1,) * PROMPT_TOKENS


@contextmanager
def _served(loaded: LoadedModel) -> Iterator[tuple[Server, str]]:
    settings = load_settings(flags={"port": 0})
    state = build_server(settings, loaded, device())
    ready = threading.Event()
    server = Server(state, on_ready=ready.set, say=lambda _: None)
    listener = bind(settings.host, settings.port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield server, url_of(listener)
    finally:
        server.end()
        thread.join()


def _bodies(name: str, loaded: LoadedModel, streams: int, reply_tokens: int) -> list[dict[str, Any]]:
    """Return the same requests as `_through_engine`: replies that never end early."""
    bias = {str(id_): -100 for id_ in loaded.eos_ids}
    common = {"model": name, "max_tokens": reply_tokens, "temperature": 0, "stream": True, "logit_bias": bias}
    return [{**common, "prompt": list(_prompt(i))} for i in range(streams)]


@contextmanager
def _client(url: str, bodies: list[dict[str, Any]]) -> Iterator[Callable[[], None]]:
    command = [sys.executable, "-m", "benchmarks.http_client", url, json.dumps(bodies)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sending, receiving = process.stdin, process.stdout

        def one_round() -> None:
            sending.write("go\n")
            sending.flush()
            assert receiving.readline() == "done\n", "the client failed; its error is above"

        yield one_round
        sending.close()


app = command_line()


@app.command()
def main(
    model: Model = None,
    streams: Annotated[int, typer.Option(min=1, max=MAX_BATCH, help="Streams at once.")] = 8,
    reply_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each reply.")] = 32,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Measure the cost of HTTP: streams through a real server against the engine alone."""
    show(measure(load(model), streams=streams, reply_tokens=reply_tokens, rounds=rounds), table, as_json=as_json)


if __name__ == "__main__":
    run_app(app)
