"""Request traces, read from a file or synthetic: the time and the blocks of 512 tokens of each request.

A block's id stands for its tokens and all tokens before them, at the same position of the prompt.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.prefix_cache.keys import TokenIds, as_ids

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class ReplayRequest:
    """A request of a trace."""

    time_s: float
    blocks: TokenIds
    num_tokens: int | None = None  # of the prompt, if known: its last block may be partial
    num_reply_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS if self.num_tokens is None else self.num_tokens


@dataclass(frozen=True)
class ReplayTrace:
    name: str
    requests: tuple[ReplayRequest, ...]
    num_distinct: int  # blocks, of all requests together
    numbers: tuple[TokenIds, ...]  # block numbers of each request: equal only for equal prefixes

    @property
    def num_blocks(self) -> int:
        return sum(len(request.blocks) for request in self.requests)


def load_trace(path: Path) -> ReplayTrace:
    """Load JSON lines, possibly gzipped, sorted by time: `timestamp` in ms, `hash_ids`, optional `input_length` and
    `output_length`."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            requests = [_request(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}. It must be .jsonl or .jsonl.gz") from None
    return trace_of(path.name.removesuffix(".gz").removesuffix(".jsonl"), requests)


def trace_of(name: str, requests: Sequence[ReplayRequest]) -> ReplayTrace:
    if not requests:
        raise ConfigError(f"The trace '{name}' has no requests")
    in_order = tuple(sorted(requests, key=lambda request: request.time_s))
    known: dict[int, int] = {}
    numbers = tuple(_numbers(request.blocks, known) for request in in_order)
    return ReplayTrace(name, in_order, len(known), numbers)


def _numbers(blocks: TokenIds, known: dict[int, int]) -> TokenIds:
    """Number the blocks of a request. The keys of `known` join prefix and block to one integer, which takes half the
    memory of a pair."""
    number, found = 0, []
    for block in blocks.tolist():
        number = known.setdefault((number << 32) + block, len(known) + 1)
        found.append(number)
    return np.array(found, dtype=np.int32)


def _request(line: str, number: int) -> ReplayRequest:
    try:
        value = json.loads(line)
        blocks = as_ids(value["hash_ids"])
        num_tokens = int(value.get("input_length", len(blocks) * BLOCK_TOKENS))
        return ReplayRequest(float(value["timestamp"]) / 1000, blocks, num_tokens, int(value.get("output_length", 0)))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        wanted = '{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [ids]}'
        raise ConfigError(f"Line {number} of the trace is no request: {error}. Wanted: {wanted}") from None


def sessions(trace: ReplayTrace) -> tuple[int, ...]:
    """Return the session number of each request; traces do not contain sessions.

    A request continues a session if it begins with all whole blocks of an earlier request of that session. These must
    be more than other sessions began with, otherwise a common system prompt would join all requests to one session.
    """
    ends: dict[int, int] = {}  # last whole block of a request -> its session
    found = list[int]()
    num_sessions = num_known = 0
    for request, numbers in zip(trace.requests, trace.numbers, strict=True):
        ids = numbers.tolist()
        session = next((ends[block] for block in reversed(ids) if block in ends), num_sessions)
        goes_on = session < num_sessions
        num_sessions += not goes_on
        whole = ids[: request.prompt_tokens // BLOCK_TOKENS]
        if whole and (goes_on or whole[-1] > num_known):
            ends[whole[-1]] = session
        num_known = max(num_known, *ids, 0)
        found.append(session)
    return tuple(found)


def made_up(num_requests: int, seed: int = 0, requests_s: float = 3.0) -> ReplayTrace:
    """Return a synthetic trace: chats over a few system prompts that continue after a while or end, and one-off
    prompts."""
    return trace_of(f"made-up-{num_requests}", list(_made_up(num_requests, seed, requests_s)))


def _made_up(num_requests: int, seed: int, requests_s: float) -> Iterator[ReplayRequest]:
    rng = random.Random(seed)
    systems = [list(range(8 * which, 8 * which + rng.randint(1, 8))) for which in range(16)]
    next_id = 8 * len(systems)
    waiting: list[tuple[float, list[int]]] = []  # chats that will continue, by time
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(requests_s)
        if waiting and waiting[0][0] <= now:
            _, blocks = heappop(waiting)
        else:
            blocks = rng.choice(systems) if rng.random() < 0.8 else []
        num_new = min(1 + int(rng.expovariate(1 / 6)), 200)
        blocks = [*blocks, *range(next_id, next_id + num_new)]
        next_id += num_new
        if rng.random() < 0.6 and len(blocks) < 400:
            heappush(waiting, (now + rng.lognormvariate(4.0, 1.0), blocks))
        yield ReplayRequest(now, np.array(blocks, dtype=np.int32))
