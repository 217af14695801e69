"""A load against any OpenAI-compatible server over HTTP: token times and cached tokens.

cached, reported    by the server's usage
cached, inferred    by the time to first token (`PrefillTime` of chat_client.py), for requests that ran alone
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx
import numpy as np

from kvstrata.bench.chat_client import Answer, ChatServer, PrefillTime, ask, fit
from kvstrata.bench.figures import Figure, lay_out
from kvstrata.bench.workloads import Lane, LoadRequest, Message, prompt_tokens, text, user
from kvstrata.errors import KvstrataError

T = TypeVar("T")


@dataclass(frozen=True)
class Watch:
    on_step: Callable[[str], None] = lambda _: None  # called with the name of the next step
    advanced: Callable[[], None] = lambda: None  # called after each pass
    title: str = ""

    def under(self, title: str) -> Watch:
        return replace(self, title=title)

    def say(self, what: str) -> None:
        self.on_step(f"{self.title}: {what}" if self.title else what)

    def passed(self, result: T) -> T:
        self.advanced()
        return result


UNWATCHED = Watch()
CALIBRATION_TOKENS = (64, 256, 1024)


@dataclass(frozen=True)
class SentRequest:
    """A request that was sent, and its answer."""

    ask: LoadRequest
    answer: Answer
    sent_tokens: int  # estimated by the client

    @property
    def prompt_tokens(self) -> int:
        return self.sent_tokens if self.answer.prompt_tokens is None else self.answer.prompt_tokens


@dataclass(frozen=True)
class Spread:
    """Distribution of times, in seconds."""

    p50: float
    p99: float
    largest: float


@dataclass(frozen=True)
class ServeFigures(Figure):
    url: str
    model: str
    load: str
    clients: int
    requests: int
    failures: list[str]
    seconds: float
    prompt_tokens: int
    reply_tokens: int
    prompt_tokens_counted_here: bool  # not reported by the server
    reply_tokens_s: float
    first_token: Spread | None
    between_tokens: Spread | None
    cached_reported: int | None
    judged_requests: int  # requests that the next two cover: alone and calibrated
    judged_tokens: int
    cached_inferred: int | None
    prefill_time: PrefillTime | None


class LoadClient:
    """Sender of a load's requests that keeps the chats' histories."""

    def __init__(self, http: httpx.AsyncClient, server: ChatServer, watch: Watch = UNWATCHED) -> None:
        self._http = http
        self._door = server
        self._watch = watch
        self._histories: dict[str, list[Message]] = {}
        self.sent: list[SentRequest] = []

    async def send(self, asking: LoadRequest, on_piece: Callable[[int], None] = lambda _: None) -> SentRequest:
        history = self._histories.setdefault(asking.chat, [])
        history.extend(asking.messages)
        num_tokens = prompt_tokens(history)
        answer = await ask(self._http, self._door, history, asking.reply_tokens, on_piece)
        history.append({"role": "assistant", "content": answer.text})
        self._watch.passed(None)
        done = SentRequest(asking, answer, num_tokens)
        self.sent.append(done)
        return done

    async def walk(self, lane: Lane, began_s: float) -> None:
        for asking in lane:
            await asyncio.sleep(max(0.0, began_s + asking.at_s - time.perf_counter()))
            await self.send(asking)


async def run_lanes(client: LoadClient, lanes: Sequence[Lane], clients: int) -> None:
    """Run lanes, at most `clients` at once. With 0 all run at once, each at its own times."""
    began_s = time.perf_counter()
    gate = asyncio.Semaphore(clients or len(lanes))

    async def walk(lane: Lane) -> None:
        async with gate:
            await client.walk(lane, began_s)

    await asyncio.gather(*(walk(lane) for lane in lanes))


async def calibrate(
    server: ChatServer,
    key: str,
    lengths: Sequence[int] = CALIBRATION_TOKENS,
    repeats: int = 2,
    watch: Watch = UNWATCHED,
) -> PrefillTime:
    """Time unseen prompts, one at a time, and fit the prefill time. `key` makes the prompts unseen."""
    samples = []
    async with server.open() as http:
        await _unseen(http, server, f"{key} warm up", min(lengths))
        for number in range(repeats):
            for length in lengths:
                samples.append(await _unseen(http, server, f"{key} {number} {length}", length))
                watch.passed(None)
    return fit(samples)


async def _unseen(http: httpx.AsyncClient, server: ChatServer, key: str, num_tokens: int) -> tuple[int, float]:
    messages = [user(text(key, num_tokens))]
    answer = await ask(http, server, messages, 2)
    if answer.failure:
        raise KvstrataError(f"{server.url} did not answer a prompt of {num_tokens} tokens: {answer.failure}")
    reported = answer.prompt_tokens
    return (prompt_tokens(messages) if reported is None else reported), answer.first_token_s


async def measure(
    server: ChatServer,
    name: str,
    lanes: Sequence[Lane],
    clients: int,
    known: PrefillTime | None,
    watch: Watch = UNWATCHED,
) -> ServeFigures:
    began_s = time.perf_counter()
    async with server.open() as http:
        client = LoadClient(http, server, watch.under(name))
        watch.under(name).say(f"{sum(map(len, lanes))} requests")
        await run_lanes(client, lanes, clients)
    took_s = time.perf_counter() - began_s
    return summarize(server, name, client.sent, took_s=took_s, clients=clients, known=known)


def summarize(
    server: ChatServer,
    name: str,
    sent: Sequence[SentRequest],
    *,
    took_s: float,
    clients: int,
    known: PrefillTime | None,
) -> ServeFigures:
    good = [each for each in sent if not each.answer.failure]
    judged = alone(good, sent) if known else []
    reported = [each.answer.cached_tokens for each in good if each.answer.cached_tokens is not None]
    reply_tokens = sum(each.answer.num_pieces for each in good)
    return ServeFigures(
        url=server.url,
        model=server.model,
        load=name,
        clients=clients,
        requests=len(sent),
        failures=[each.answer.failure for each in sent if each.answer.failure],
        seconds=took_s,
        prompt_tokens=sum(each.prompt_tokens for each in good),
        reply_tokens=reply_tokens,
        prompt_tokens_counted_here=any(each.answer.prompt_tokens is None for each in good),
        reply_tokens_s=reply_tokens / took_s,
        first_token=spread([each.answer.first_token_s for each in good]),
        between_tokens=spread([gap for each in good for gap in each.answer.between_s]),
        cached_reported=sum(reported) if reported else None,
        judged_requests=len(judged),
        judged_tokens=sum(each.prompt_tokens for each in judged),
        cached_inferred=sum(inferred_cached(known, each) for each in judged) if known and judged else None,
        prefill_time=known,
    )


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    middle, high = np.percentile(values, [50, 99])
    return Spread(float(middle), float(high), max(values))


def alone(good: Sequence[SentRequest], everyone: Sequence[SentRequest]) -> list[SentRequest]:
    """Return the requests during which no other one was served before their first token."""
    return [one for one in good if not any(_overlaps(one.answer, two.answer) for two in everyone if two is not one)]


def _overlaps(one: Answer, other: Answer) -> bool:
    return other.began_s < one.began_s + one.first_token_s and one.began_s < other.ended_s


def inferred_cached(known: PrefillTime, sent: SentRequest) -> int:
    return sent.prompt_tokens - known.computed_tokens(sent.prompt_tokens, sent.answer.first_token_s)


def table(rows: Sequence[ServeFigures]) -> str:
    notes = [f"{rows[0].url}, model {rows[0].model}; times in ms; cached tokens as a share of the prompts'"]
    if any(row.prompt_tokens_counted_here for row in rows):
        notes.append("The server does not tell how many tokens its prompts have: they were counted here, about right")
    notes += [
        f"{row.load}: {len(row.failures)} requests failed. The first: {row.failures[0]}" for row in rows if row.failures
    ]
    notes += [
        f"{row.load}: inferred from {row.judged_requests} of {row.requests} requests, which were alone"
        for row in rows
        if row.cached_inferred is not None and row.judged_requests < row.requests
    ]
    return lay_out(
        rows,
        [
            ("", "<16", lambda row: row.load),
            ("requests", ">9", lambda row: row.requests),
            ("prompt", ">9", lambda row: row.prompt_tokens),
            ("reported", ">10.1%", lambda row: _share(row.cached_reported, row.prompt_tokens)),
            ("inferred", ">10.1%", lambda row: _share(row.cached_inferred, row.judged_tokens)),
            ("first p50", ">11.1f", lambda row: _ms(row.first_token, "p50")),
            ("p99", ">10.1f", lambda row: _ms(row.first_token, "p99")),
            ("between p50", ">13.1f", lambda row: _ms(row.between_tokens, "p50")),
            ("p99", ">10.1f", lambda row: _ms(row.between_tokens, "p99")),
            ("tokens/s", ">10.1f", lambda row: row.reply_tokens_s),
        ],
        *notes,
    )


def _share(part: int | None, whole: int) -> float | str:
    return "-" if part is None or not whole else part / whole


def _ms(found: Spread | None, name: str) -> float | str:
    return "-" if found is None else 1000 * getattr(found, name)
