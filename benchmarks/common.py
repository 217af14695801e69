"""Engine streams, and the options, models and output that the benchmarks share."""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated

import typer

from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Failed, Finished, Request, Sampling, TextDelta, TokenUsage
from kvstrata.errors import KvstrataError
from kvstrata.models.load import LoadedModel

Prompt = tuple[int, ...]

MAX_BATCH = 16  # sequences that the engine runs at once by default
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of measurement; medians are shown.")]


def command_line() -> typer.Typer:
    """Return a command line without commands."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run_app(app: typer.Typer) -> None:
    """Run a command line. Print an error of kvstrata as one line."""
    try:
        app()
    except KvstrataError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def random_prompt(rng: random.Random, loaded: LoadedModel, num_tokens: int) -> Prompt:
    return tuple(rng.randrange(loaded.vocab_size) for _ in range(num_tokens))


def greedy(prompt: Prompt, reply_tokens: int, salt: str = "") -> Request:
    return Request(uuid.uuid4().hex, prompt, reply_tokens, Sampling(temperature=0), salt=salt)


class TimedReply:
    """Tokens of a reply with their arrival times. The clock starts at construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []  # arrival times
        self._began_s = time.perf_counter()

    def add(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.times += [time.perf_counter()] * len(ids)

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self._began_s


class Stream(TimedReply):
    """The reply stream of a request in an engine."""

    def __init__(self, request_id: str, news: threading.Condition) -> None:
        super().__init__()
        self.request_id = request_id
        self._news = news  # notified of each token and of the end
        self.ended = threading.Event()
        self.failure = ""
        self.usage = TokenUsage()  # of a finished request

    def sink(self, event: Event) -> None:
        with self._news:
            if isinstance(event, TextDelta):
                self.add(event.ids)
            elif isinstance(event, Finished):
                self.usage = event.usage
            elif isinstance(event, Failed):
                self.failure = event.message
            if isinstance(event, Finished | Failed):
                self.ended.set()
            self._news.notify_all()

    def gaps(self) -> list[tuple[float, float]]:
        """Return the arrival times of each two consecutive tokens."""
        return list(pairwise(list(self.times)))


class Streams:
    """Streams that run together in one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._news = threading.Condition()
        self._streams: list[Stream] = []

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def start(self, request: Request) -> None:
        stream = Stream(request.id, self._news)
        self._streams.append(stream)
        self._engine.submit(request, stream.sink)

    def wait_for(self, num_tokens: int) -> None:
        """Wait until every stream has `num_tokens` more tokens or has ended."""
        with self._news:
            wanted = [(stream, len(stream.times) + num_tokens) for stream in self._streams]
            self._news.wait_for(lambda: all(s.ended.is_set() or len(s.times) >= count for s, count in wanted))

    def wait(self) -> None:
        """Wait until every stream has ended. Tokens do not wake the caller, so the timed work has the machine for
        itself."""
        for stream in self._streams:
            stream.ended.wait()

    def finish(self) -> None:
        """Wait until every stream has ended; raise KvstrataError if one failed."""
        self.wait()
        if failures := [stream.failure for stream in self._streams if stream.failure]:
            raise KvstrataError(f"A request failed: {failures[0]}")

    def require_running(self, hint: str) -> None:
        """Raise KvstrataError if a stream has ended. `hint` is the advice for a stream that ended with a complete
        reply."""
        if any(stream.ended.is_set() for stream in self._streams):
            failures = [stream.failure for stream in self._streams if stream.failure]
            raise KvstrataError(f"A stream ended early: {failures[0] if failures else hint}")

    def cancel(self) -> None:
        for stream in self._streams:
            self._engine.cancel(stream.request_id)


def answer(engine: Engine, request: Request) -> Stream:
    """Run a single request to its end and return its stream."""
    streams = Streams(engine)
    streams.start(request)
    streams.finish()
    return next(iter(streams))
