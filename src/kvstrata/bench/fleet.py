"""`kvstrata bench fleet`: traces through 1 to many replicas. Hit rate, bytes moved and balance, by routing, size of the
memory of each replica, size of a store that all share, and precision.

Knows what is varied and what is shown; time and stores are `fleet_run.py`, routing is `fleet_policies.py`. `pooled` is
no routing: one machine with the memory, the rates and the batch of all replicas together, for comparison.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from kvstrata.bench.driver import Figure, Progress, lay_out, silent
from kvstrata.bench.fleet_policies import ROUTINGS, RoutingName, policy_of
from kvstrata.bench.fleet_run import Fleet, Machine, Outcome, simulate
from kvstrata.bench.trace import BLOCK_TOKENS, Trace, sessions
from kvstrata.codecs.registry import parse_for
from kvstrata.errors import ConfigError
from kvstrata.fleet.summary import MAX_KEYS
from kvstrata.sizes import format_bytes

HEAD_DIM = 128  # of the model that bytes are counted for
TOKEN_BYTES = 147_456  # of one token at 16 bits: Qwen3-8B, 36 layers of 8 key heads
GB = 1e9


@dataclass(frozen=True)
class Case:
    """One fleet of the grid."""

    num_replicas: int
    routing: RoutingName
    precision: str
    memory_bytes: int  # of each replica, for KV
    remote_bytes: int  # of the shared store; 0: none
    summary_keys: int | None  # most keys that a replica reports; None: all
    report_s: float


@dataclass(frozen=True)
class Grid:
    """What is varied. Every combination is run; routings that hear no reports are run once for all kinds of them."""

    replicas: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    routings: Sequence[RoutingName] = ROUTINGS
    precisions: Sequence[str] = ("planes:8",)
    memory_bytes: Sequence[int] = (64_000_000_000,)
    remote_bytes: Sequence[int] = (0,)
    summary_keys: Sequence[int | None] = (MAX_KEYS,)
    report_s: Sequence[float] = (5.0,)

    def cases(self) -> Iterator[Case]:
        several = (self.replicas, self.precisions, self.memory_bytes, self.remote_bytes, self.summary_keys)
        for count, precision, memory, remote, keys in product(*several):
            for report_s, routing in product(self.report_s, self.routings):
                is_first = (keys, report_s) == (self.summary_keys[0], self.report_s[0])
                if is_first or routing == "prefix":
                    yield Case(count, routing, precision, memory, remote, keys, report_s)


@dataclass(frozen=True)
class TraceFacts(Figure):
    """What bounds the figures of a trace, and how its blocks are asked for."""

    trace: str
    num_requests: int
    num_sessions: int  # as `sessions` tells them
    prompt_tokens: int
    num_distinct: int  # blocks
    findable: float  # of all prompt tokens: the hit rate of one cache without bounds
    hottest_share: float  # of all blocks asked for: the one asked for most
    hot_percent_share: float  # likewise: the hundredth of the distinct blocks that is asked for most


@dataclass(frozen=True)
class Row(Figure):
    trace: str
    replicas: int
    routing: RoutingName
    precision: str
    memory_bytes: int
    remote_bytes: int
    summary_keys: int | None
    report_s: float
    hit_rate: float  # prompt tokens found anywhere / asked for
    own_rate: float  # in the memory of the replica that got the request
    remote_rate: float  # loaded from the store
    read_bytes: float  # from the store
    written_bytes: float
    computed_balance: float  # tokens computed, the busiest replica / the mean of all
    in_flight_balance: float  # requests there at once in the mean over time, likewise
    first_token_median_s: float
    first_token_p95_s: float
    hottest_read_share: float  # of the blocks read from the store: the one that was read most
    duration_s: float  # from the first request to the end of the last reply


@dataclass(frozen=True)
class FleetFigures(Figure):
    traces: list[TraceFacts] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def measure(
    traces: Sequence[Trace],
    grid: Grid,
    machine: Machine | None = None,
    *,
    token_bytes: int = TOKEN_BYTES,
    seed: int = 0,
    progress: Progress = silent,
) -> FleetFigures:
    figures = FleetFigures()
    for trace in traces:
        figures.traces.append(facts(trace))
        for case in grid.cases():
            progress(f"{trace.name}: {case.num_replicas} replicas, {case.routing}, {case.precision}")
            fleet = fleet_of(case, machine or Machine(), token_bytes)
            outcome = simulate(trace, fleet, policy_of(case.routing, fleet, seed))
            figures.rows.append(row_of(trace.name, case, outcome))
    return figures


def fleet_of(case: Case, machine: Machine, token_bytes: int = TOKEN_BYTES) -> Fleet:
    block_bytes = BLOCK_TOKENS * token_bytes * parse_for(case.precision, HEAD_DIM).bits_per_value(HEAD_DIM) / 16
    memory_blocks, remote_blocks = int(case.memory_bytes / block_bytes), int(case.remote_bytes / block_bytes)
    if memory_blocks < 1 or (case.remote_bytes and not remote_blocks):
        smallest = min(case.memory_bytes, case.remote_bytes or case.memory_bytes)
        raise ConfigError(f"{format_bytes(smallest)} hold not one block of {format_bytes(int(block_bytes))}. Give more")
    count = case.num_replicas
    fleet = Fleet(count, memory_blocks, block_bytes, remote_blocks, machine, case.report_s, case.summary_keys)
    return _pooled(fleet) if case.routing == "pooled" else fleet


def _pooled(fleet: Fleet) -> Fleet:
    count, each = fleet.num_replicas, fleet.machine
    machine = Machine(each.prefill_rate * count, each.decode_rate, each.link_bytes_s * count, each.batch * count)
    return replace(fleet, num_replicas=1, memory_blocks=fleet.memory_blocks * count, machine=machine)


def facts(trace: Trace) -> TraceFacts:
    asked = Counter(block for numbers in trace.numbers for block in numbers.tolist())
    most = [count for _, count in asked.most_common(max(1, len(asked) // 100))]
    prompt_tokens = sum(request.prompt_tokens for request in trace.requests)
    return TraceFacts(
        trace=trace.name,
        num_requests=len(trace.requests),
        num_sessions=len(set(sessions(trace))),
        prompt_tokens=prompt_tokens,
        num_distinct=trace.num_distinct,
        findable=_findable_tokens(trace) / max(1, prompt_tokens),
        hottest_share=most[0] / asked.total(),
        hot_percent_share=sum(most) / asked.total(),
    )


def _findable_tokens(trace: Trace) -> int:
    """New blocks have numbers above all known ones, so the rest of a prompt was asked for before."""
    found = num_known = 0
    for request, numbers in zip(trace.requests, trace.numbers, strict=True):
        found += min(int((numbers <= num_known).sum()) * BLOCK_TOKENS, request.prompt_tokens)
        num_known = max(num_known, int(numbers.max(initial=0)))
    return found


def row_of(trace: str, case: Case, outcome: Outcome) -> Row:
    asked = max(1, sum(outcome.prompt_tokens))
    own, remote = sum(outcome.own_tokens) / asked, sum(outcome.remote_tokens) / asked
    waits = sorted(outcome.first_token_s)
    return Row(
        trace=trace,
        replicas=case.num_replicas,
        routing=case.routing,
        precision=case.precision,
        memory_bytes=case.memory_bytes,
        remote_bytes=case.remote_bytes,
        summary_keys=case.summary_keys,
        report_s=case.report_s,
        hit_rate=own + remote,
        own_rate=own,
        remote_rate=remote,
        read_bytes=outcome.read_bytes,
        written_bytes=outcome.written_bytes,
        computed_balance=_balance(outcome.computed_tokens),
        in_flight_balance=_balance(outcome.in_flight_s),
        first_token_median_s=statistics.median(waits),
        first_token_p95_s=waits[int(0.95 * (len(waits) - 1))],
        hottest_read_share=max(outcome.reads.values(), default=0) / max(1, outcome.reads.total()),
        duration_s=outcome.duration_s,
    )


def _balance(by_replica: Sequence[float]) -> float:
    mean = sum(by_replica) / len(by_replica)
    return max(by_replica) / mean if mean else 1.0


def table(figures: FleetFigures) -> str:
    return f"{_facts_table(figures.traces)}\n\n{_rows_table(figures.rows)}"


def _facts_table(traces: Sequence[TraceFacts]) -> str:
    return lay_out(
        traces,
        [
            ("trace", "<22", lambda each: each.trace),
            ("requests", ">9", lambda each: each.num_requests),
            ("sessions", ">9", lambda each: each.num_sessions),
            ("M tokens", ">10.1f", lambda each: each.prompt_tokens / 1e6),
            ("blocks", ">9", lambda each: each.num_distinct),
            ("findable", ">10.4f", lambda each: each.findable),
            ("hottest", ">10.4f", lambda each: each.hottest_share),
            ("hot 1%", ">10.4f", lambda each: each.hot_percent_share),
        ],
    )


def _rows_table(rows: Sequence[Row]) -> str:
    return lay_out(
        rows,
        [
            ("trace", "<22", lambda row: row.trace),
            ("replicas", ">8", lambda row: row.replicas),
            ("routing", ">13", lambda row: row.routing),
            ("precision", ">10", lambda row: row.precision),
            ("memory GB", ">10g", lambda row: row.memory_bytes / GB),
            ("store GB", ">9g", lambda row: row.remote_bytes / GB),
            ("keys", ">7", lambda row: "all" if row.summary_keys is None else str(row.summary_keys)),
            ("every s", ">8g", lambda row: row.report_s),
            ("hits", ">8.4f", lambda row: row.hit_rate),
            ("own", ">8.4f", lambda row: row.own_rate),
            ("from store", ">11.4f", lambda row: row.remote_rate),
            ("read GB", ">10.1f", lambda row: row.read_bytes / GB),
            ("written GB", ">11.1f", lambda row: row.written_bytes / GB),
            ("work", ">6.2f", lambda row: row.computed_balance),
            ("in flight", ">10.2f", lambda row: row.in_flight_balance),
            ("first s", ">9.2f", lambda row: row.first_token_median_s),
            ("p95 s", ">9.2f", lambda row: row.first_token_p95_s),
        ],
        "hits: of all prompt tokens. work, in flight: the busiest replica / the mean. first: token, median and p95.",
    )
