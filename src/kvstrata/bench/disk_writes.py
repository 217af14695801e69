"""Bytes that a request trace writes to the disk cache: after each reply, or at eviction only.

The disk loses nothing. A trace does not tell how a reply goes into the next prompt, so there are two bounds:

- At least: the next prompt of a session begins with the whole last prompt and its reply. Nothing is written twice,
  because a chain of blocks goes on where the last one ended, wherever that was.
- At most: every next prompt has the last reply in other tokens. All that comes after the last whole block of 512 that
  both prompts share is written again.

At eviction a block is written once, when memory first lets it go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.bench.driver import Figure, lay_out
from kvstrata.bench.replay import StrataStore
from kvstrata.bench.trace import BLOCK_TOKENS, Trace, sessions

GIB = 1 << 30


@dataclass(frozen=True)
class DiskWrites(Figure):
    trace: str
    hours: float
    requests: int
    least_bytes: int  # after replies
    most_bytes: int
    memory_bytes: int  # for KV
    evicted_bytes: int  # at eviction from that, prompts alone: replies are no blocks of a trace

    def a_day(self, num_bytes: int) -> float:
        """Bytes, if the trace went on day and night."""
        return num_bytes * 24 / self.hours if self.hours else 0.0


def measure(trace: Trace, memories: Sequence[int], token_bytes: int) -> list[DiskWrites]:
    """A row for each size of memory for KV."""
    hours = (trace.requests[-1].time_s - trace.requests[0].time_s) / 3600
    least, most = (token_bytes * tokens for tokens in _written_tokens(trace))
    block_bytes = BLOCK_TOKENS * token_bytes
    return [
        DiskWrites(
            trace=trace.name,
            hours=hours,
            requests=len(trace.requests),
            least_bytes=least,
            most_bytes=most,
            memory_bytes=nbytes,
            evicted_bytes=block_bytes * _num_evicted(trace, max(1, nbytes // block_bytes)),
        )
        for nbytes in memories
    ]


def table(rows: Sequence[DiskWrites]) -> str:
    return lay_out(
        rows,
        [
            ("trace", "<22", lambda row: row.trace),
            ("hours", ">7.1f", lambda row: row.hours),
            ("requests", ">10", lambda row: row.requests),
            (
                "GiB a day",
                ">20",
                lambda row: f"{_gib_a_day(row, row.least_bytes)} to {_gib_a_day(row, row.most_bytes)}",
            ),
            ("memory GiB", ">12", lambda row: f"{row.memory_bytes / GIB:,.0f}"),
            ("at eviction", ">13", lambda row: _gib_a_day(row, row.evicted_bytes)),
        ],
        "GiB a day: written after replies, if the trace went on day and night",
    )


def _gib_a_day(row: DiskWrites, num_bytes: int) -> str:
    return f"{row.a_day(num_bytes) / GIB:,.0f}"


def _written_tokens(trace: Trace) -> tuple[int, int]:
    """At least and at most."""
    least = most = 0
    known: set[int] = set()
    ends: dict[int, int] = {}  # of each session's last prompt and reply
    for request, numbers, session in zip(trace.requests, trace.numbers, sessions(trace), strict=True):
        ids = numbers.tolist()
        num_known = next((at for at, number in enumerate(ids) if number not in known), len(ids))
        known.update(ids)
        shared = min(num_known * BLOCK_TOKENS, request.prompt_tokens)
        last_end = ends.get(session, 0)
        goes_on_at = max(shared, last_end) if last_end <= request.prompt_tokens else shared
        end = request.prompt_tokens + request.num_reply_tokens
        least += end - goes_on_at
        most += end - shared
        ends[session] = end
    return least, most


def _num_evicted(trace: Trace, num_blocks: int) -> int:
    """Distinct blocks that memory lets go at least once."""
    evicted: set[int] = set()
    store = StrataStore(num_blocks, evicted.update)
    for request in trace.requests:
        store.serve(request)
    return len(evicted)
