"""HTTP client for one chat completion with token times, and an estimate of computed tokens from these times.

Works with any server that has OpenAI's API. A failed request returns an answer with the failure, so that a load
continues and counts failures.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

import httpx
import numpy as np

from kvstrata.bench.workloads import Message
from kvstrata.errors import KvstrataError

FAILURES = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Answer:
    """The reply to a request, or its failure. Times are those of `time.perf_counter`."""

    began_s: float
    times: tuple[float, ...] = ()  # arrival of each piece of the reply
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None  # this and the next two: None if not reported
    cached_tokens: int | None = None
    reply_tokens: int | None = None
    failure: str = ""

    @property
    def first_token_s(self) -> float:
        """Return the time to first token. For an empty reply it is the time to its end."""
        return (self.times[0] if self.times else self.ended_s) - self.began_s

    @property
    def between_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def num_pieces(self) -> int:
        """Return the reported number of reply tokens, or the number of pieces if the server reported none."""
        return len(self.times) if self.reply_tokens is None else self.reply_tokens


@dataclass(frozen=True)
class ChatServer:
    """Address of a server with the model, key and timeout to use there."""

    url: str  # without /v1
    model: str
    key: str = "none"
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # additional fields of each request

    def open(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Bypass proxies of the environment. Skip loading certificates without TLS: it takes 65 ms.
        secure = self.url.startswith("https:")
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=self.timeout_s, limits=limits, trust_env=False, verify=secure
        )


async def ask(
    client: httpx.AsyncClient,
    server: ChatServer,
    messages: Sequence[Message],
    reply_tokens: int,
    on_piece: Callable[[int], None] = lambda _: None,
) -> Answer:
    """Send a chat completion and read its stream. `on_piece` is called with the number of pieces received so far."""
    body = {
        "model": server.model,
        "messages": [dict(message) for message in messages],
        "max_tokens": reply_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.extra,
    }
    reading = _Reading(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                said = (await response.aread()).decode(errors="replace")
                return replace(reading.answer(), failure=f"status {response.status_code}: {said[:300]}")
            async for line in response.aiter_lines():
                if reading.take(line):
                    on_piece(reading.num_pieces)
    except FAILURES as error:
        return replace(reading.answer(), failure=f"{type(error).__name__}: {error}".rstrip(": "))
    return reading.answer()


class _Reading:
    """The part of a response received so far."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._times: list[float] = []
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._failure = ""
        self._is_whole = False

    @property
    def num_pieces(self) -> int:
        return len(self._times)

    def take(self, line: str) -> bool:
        """Read a line and return whether it added to the reply. Comments and other fields of an event are skipped."""
        before = self.num_pieces
        if line.startswith("data:"):
            self._event(line.removeprefix("data:").strip())
        return self.num_pieces > before

    def _event(self, payload: str) -> None:
        if payload == "[DONE]":
            self._is_whole = True
            return
        event = json.loads(payload)
        if "error" in event:
            self._failure = f"the stream says: {str(event['error'])[:300]}"
            return
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
        if piece or delta.get("tool_calls"):
            self._times.append(time.perf_counter())
            self._texts.append(delta.get("content") or "")
        if choice.get("finish_reason"):
            self._is_whole = True

    def answer(self) -> Answer:
        details = self._usage.get("prompt_tokens_details") or {}
        failure = self._failure or ("" if self._is_whole else "the stream ended before the reply did")
        return Answer(
            began_s=self._began_s,
            times=tuple(self._times),
            ended_s=time.perf_counter(),
            text="".join(self._texts),
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            reply_tokens=self._usage.get("completion_tokens"),
            failure=failure,
        )


async def first_model(server: ChatServer) -> str:
    """Return the name of the first model that the server lists."""
    async with server.open() as client:
        response = await client.get("/v1/models")
        response.raise_for_status()
        listed = response.json()["data"]
    return listed[0]["id"] if listed else "default_model"


@dataclass(frozen=True)
class PrefillTime:
    """Time to first token as a function of computed tokens, fitted to unseen prompts of several lengths.

    A prompt of n tokens takes a + b n + c n^2, where c is attention over earlier tokens. A prompt of n tokens of which
    m are computed behind n - m cached ones takes a + b m + c (n^2 - (n - m)^2), which is solved for m. All other work
    of a server (waiting for other requests, reading a disk) counts as computed, so only requests that had the server
    for themselves are judged.
    """

    fixed_s: float  # a
    token_s: float  # b
    pair_s: float  # c

    def seconds(self, num_tokens: int, computed: float) -> float:
        reused = num_tokens - computed
        return self.fixed_s + self.token_s * computed + self.pair_s * (num_tokens**2 - reused**2)

    def computed_tokens(self, num_tokens: int, took_s: float) -> int:
        """Return how many of a prompt's `num_tokens` were computed, from 0 to all of them."""
        left_s = took_s - self.fixed_s
        if left_s <= 0:
            return 0
        if left_s >= self.seconds(num_tokens, num_tokens) - self.fixed_s:
            return num_tokens
        # Smaller root of c m^2 - (b + 2 c n) m + left = 0, in the form that is stable for small c.
        slope = self.token_s + 2 * self.pair_s * num_tokens
        return round(2 * left_s / (slope + math.sqrt(slope**2 - 4 * self.pair_s * left_s)))


Sample = tuple[int, float]  # tokens of an unseen prompt, seconds to its first token


def fit(samples: Sequence[Sample]) -> PrefillTime:
    """Fit by least squares of the relative error, without negative coefficients."""
    if len({length for length, _ in samples}) < 2:
        raise KvstrataError("Prompts of two lengths at least are needed to tell computed tokens from time")
    lengths = np.array([length for length, _ in samples], dtype=np.float64)
    took = np.array([seconds for _, seconds in samples])
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / took[:, None]
    best, least = np.zeros(3), np.inf
    # With three coefficients, trying every subset finds the best fit without negative ones.
    for chosen in [c for size in (1, 2, 3) for c in combinations(range(3), size) if c != (0,)]:
        found, _, rank, _ = np.linalg.lstsq(columns[:, chosen], np.ones_like(took), rcond=None)
        error = float(((columns[:, chosen] @ found - 1) ** 2).sum())
        if rank == len(chosen) and (found >= 0).all() and error < least - 1e-12:
            best, least = np.zeros(3), error
            best[list(chosen)] = found
    return PrefillTime(*map(float, best))
