"""A trace through replicas that take time: what each finds in its memory and in a store that all share, what it
computes, how long clients wait. Knows no routing rule: a `Policy` chooses, and hears what replicas report.

Time passes in events, not on a clock: the same trace, fleet and policy give the same figures. A replica computes one
prompt after the other at its prefill rate, and then decodes up to `batch` replies beside each other, each at the same
rate. Memory and the store evict by LRU; a prompt is in memory when it is computed, and in the store when its reply
ends. Nothing of a reply is stored: what it adds is in no trace until the next turn asks for it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from kvstrata.bench.block_lru import BlockLru
from kvstrata.bench.fleet_keys import TraceKeys, TraceSummary
from kvstrata.bench.trace import BLOCK_TOKENS, Trace, sessions


@dataclass(frozen=True)
class Machine:
    """What a replica does in a second, and how many replies at once."""

    prefill_rate: float = 20_000.0  # tokens, of one prompt after the other
    decode_rate: float = 50.0  # tokens, of each reply
    link_bytes_s: float = 1.25e9  # from the store and to it
    batch: int = 64


@dataclass(frozen=True)
class Fleet:
    num_replicas: int
    memory_blocks: int  # that each holds
    block_bytes: float
    remote_blocks: int = 0  # that the shared store holds; 0: there is none
    machine: Machine = field(default_factory=Machine)
    report_s: float = 5.0  # between two reports of a replica; 0: it reports every change at once
    summary_keys: int | None = None  # most keys in a report; None: all


@dataclass(frozen=True)
class Ask:
    """What a router sees of a request."""

    num_tokens: int
    keys: Sequence[tuple[int, int]]  # position and key, from the shortest prefix to the longest
    session: int
    in_flight: Sequence[int]  # requests at each replica
    now_s: float


class Policy(Protocol):
    hears_reports: bool  # where not, it gets no keys either

    def choose(self, ask: Ask) -> int:
        """The number of a replica."""
        ...

    def ended(self, replica: int) -> None:
        """A request there."""
        ...

    def reported(self, replica: int, keys: frozenset[int]) -> None:
        """What it holds, as far as it tells."""
        ...


@dataclass
class Outcome:
    """What came of it. Lists by request are in the trace's order."""

    prompt_tokens: list[int]
    own_tokens: list[int]  # found in the memory of the replica that was chosen
    remote_tokens: list[int]  # loaded from the store
    first_token_s: list[float]  # from the request on
    computed_tokens: list[int]  # by replica
    in_flight_s: list[float]  # by replica, summed over its requests
    read_bytes: float = 0.0  # from the store
    written_bytes: float = 0.0
    reads: Counter[int] = field(default_factory=Counter)  # of each block in the store
    duration_s: float = 0.0


@dataclass
class _Replica:
    memory: BlockLru
    summary: TraceSummary
    waiting: deque[int] = field(default_factory=deque)
    is_prefilling: bool = False
    num_decoding: int = 0
    will_report: bool = False


def simulate(trace: Trace, fleet: Fleet, policy: Policy) -> Outcome:
    return _Run(trace, fleet, policy).run()


class _Run:
    def __init__(self, trace: Trace, fleet: Fleet, policy: Policy) -> None:
        self._requests = trace.requests
        self._prompts = [numbers.tolist() for numbers in trace.numbers]
        self._sessions = sessions(trace)
        self._fleet, self._machine, self._policy = fleet, fleet.machine, policy
        self._replicas = [
            _Replica(BlockLru(fleet.memory_blocks), TraceSummary(fleet.summary_keys)) for _ in range(fleet.num_replicas)
        ]
        self._keys = TraceKeys(trace) if policy.hears_reports else None
        self._keys_of: dict[int, list[tuple[int, int]]] = {}  # of requests that are not computed yet
        self._in_flight = [0] * fleet.num_replicas
        self._remote = BlockLru(fleet.remote_blocks)
        self._events: list[tuple[float, int, Callable[[int, int], None], int, int]] = []
        self._num_events = 0
        self._now_s = 0.0
        count = len(self._requests)
        tokens = [request.prompt_tokens for request in self._requests]
        by_replica = fleet.num_replicas
        self._out = Outcome(tokens, [0] * count, [0] * count, [0.0] * count, [0] * by_replica, [0.0] * by_replica)

    def run(self) -> Outcome:
        for request, asked in enumerate(self._requests):
            self._at(asked.time_s, self._arrive, request, 0)
        while self._events:
            self._now_s, _, happen, request, replica = heappop(self._events)
            happen(request, replica)
        return self._out

    def _at(self, time_s: float, happen: Callable[[int, int], None], request: int, replica: int) -> None:
        heappush(self._events, (time_s, self._num_events, happen, request, replica))
        self._num_events += 1

    def _arrive(self, request: int, _: int) -> None:
        num_tokens = self._out.prompt_tokens[request]
        keys = []
        if self._keys is not None:
            keys = self._keys_of[request] = self._keys.of_prompt(self._prompts[request], num_tokens)
        chosen = self._policy.choose(Ask(num_tokens, keys, self._sessions[request], self._in_flight, self._now_s))
        self._in_flight[chosen] += 1
        self._replicas[chosen].waiting.append(request)
        self._begin(chosen)

    def _begin(self, at: int) -> None:
        replica = self._replicas[at]
        if replica.is_prefilling or not replica.waiting or replica.num_decoding >= self._machine.batch:
            return
        replica.is_prefilling = True
        request = replica.waiting.popleft()
        self._at(self._now_s + self._prefill_s(request, at), self._prefilled, request, at)

    def _prefill_s(self, request: int, at: int) -> float:
        """Look what is there, load what is loaded sooner than computed, compute the rest."""
        prompt, out = self._prompts[request], self._out
        num_own = self._replicas[at].memory.leading(prompt)
        num_there, load_s = self._loaded(request, num_own)
        out.own_tokens[request] = self._tokens(request, num_own)
        out.remote_tokens[request] = self._tokens(request, num_there) - out.own_tokens[request]
        computed = out.prompt_tokens[request] - self._tokens(request, num_there)
        out.computed_tokens[at] += computed
        return load_s + computed / self._machine.prefill_rate

    def _loaded(self, request: int, num_own: int) -> tuple[int, float]:
        """How many blocks are there once the store gave what is worth loading, and how long that takes."""
        prompt = self._prompts[request]
        num_remote = self._remote.leading(prompt)
        if num_remote <= num_own:
            return num_own, 0.0
        nbytes = (num_remote - num_own) * self._fleet.block_bytes
        load_s = nbytes / self._machine.link_bytes_s
        saved = self._tokens(request, num_remote) - self._tokens(request, num_own)
        if load_s >= saved / self._machine.prefill_rate:
            return num_own, 0.0
        self._out.read_bytes += nbytes
        self._out.reads.update(prompt[num_own:num_remote])
        self._remote.use(prompt[:num_remote])
        return num_remote, load_s

    def _tokens(self, request: int, num_blocks: int) -> int:
        return min(num_blocks * BLOCK_TOKENS, self._out.prompt_tokens[request])

    def _prefilled(self, request: int, at: int) -> None:
        replica, asked = self._replicas[at], self._requests[request]
        evicted = replica.memory.use(self._prompts[request]).evicted
        replica.is_prefilling = False
        replica.num_decoding += 1
        self._out.first_token_s[request] = self._now_s - asked.time_s
        self._at(self._now_s + asked.num_reply_tokens / self._machine.decode_rate, self._ended, request, at)
        if self._keys is not None:
            replica.summary.stored(self._keys_of.pop(request))
            replica.summary.removed(self._keys.of_blocks(evicted))
            self._will_report(request, at)
        self._begin(at)

    def _will_report(self, request: int, at: int) -> None:
        if not self._replicas[at].will_report:
            self._replicas[at].will_report = True
            self._at(self._next_report_s(at), self._report, request, at)

    def _ended(self, request: int, at: int) -> None:
        self._replicas[at].num_decoding -= 1
        self._in_flight[at] -= 1
        self._policy.ended(at)
        self._out.in_flight_s[at] += self._now_s - self._requests[request].time_s
        self._out.duration_s = self._now_s - self._requests[0].time_s
        if self._fleet.remote_blocks:
            self._out.written_bytes += self._remote.use(self._prompts[request]).num_filed * self._fleet.block_bytes
        self._begin(at)

    def _next_report_s(self, at: int) -> float:
        """Each replica has its own beat, as servers that were not started in one moment."""
        every_s = self._fleet.report_s
        if not every_s:
            return self._now_s
        phase_s = every_s * at / self._fleet.num_replicas
        return phase_s + every_s * (math.floor((self._now_s - phase_s) / every_s) + 1)

    def _report(self, _: int, at: int) -> None:
        replica = self._replicas[at]
        replica.will_report = False
        self._policy.reported(at, replica.summary.reported())
