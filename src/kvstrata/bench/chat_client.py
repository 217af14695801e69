"""One chat completion over HTTP, and when its pieces came. Any server that speaks OpenAI's API.

A request that fails gives an answer that says so: a load goes on, and failures are counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import httpx

from kvstrata.bench.chats import Message

FAILURES = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Answer:
    """Times are those of `time.perf_counter`."""

    began_s: float
    times: tuple[float, ...] = ()  # when each piece of the reply came
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None  # what follows is None where the server did not tell
    cached_tokens: int | None = None
    reply_tokens: int | None = None
    failure: str = ""

    @property
    def first_token_s(self) -> float:
        """A reply that is empty has its end instead."""
        return (self.times[0] if self.times else self.ended_s) - self.began_s

    @property
    def between_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]

    @property
    def num_pieces(self) -> int:
        """Tokens of the reply: as told, else its pieces."""
        return len(self.times) if self.reply_tokens is None else self.reply_tokens


@dataclass(frozen=True)
class Door:
    """Where and as whom a server is asked."""

    url: str  # without /v1
    model: str
    key: str = "none"
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of each request

    def open(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # Proxies of the environment must not see a load, and reading certificates takes 65 ms where there is no TLS.
        secure = self.url.startswith("https:")
        return httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=self.timeout_s, limits=limits, trust_env=False, verify=secure
        )


async def ask(
    client: httpx.AsyncClient,
    door: Door,
    messages: Sequence[Message],
    reply_tokens: int,
    on_piece: Callable[[int], None] = lambda _: None,
) -> Answer:
    """`on_piece` hears how many pieces have come."""
    body = {
        "model": door.model,
        "messages": [dict(message) for message in messages],
        "max_tokens": reply_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **door.extra,
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
    """What has come of an answer so far."""

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
        """Whether it brought some of the reply. Comments and other fields of an event are skipped."""
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


async def first_model(door: Door) -> str:
    """The name of the first model that the server lists."""
    async with door.open() as client:
        response = await client.get("/v1/models")
        response.raise_for_status()
        listed = response.json()["data"]
    return listed[0]["id"] if listed else "default_model"
