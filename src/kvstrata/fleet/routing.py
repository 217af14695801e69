"""Choice of the replica for a request. Pure: works on keys, sessions and counts, without network or clock.

The router takes the replica with the lowest cost: the tokens that it would have to compute, plus `LOAD_TOKENS` for each
request in flight. A cached prefix that is short beside the prompt does not count; otherwise a common system prompt
would draw every new conversation to the few replicas that have it. A replica at capacity is chosen only if all are. Two
facts are known before a replica reports them: the prompts it was just sent (`_Expected`), and the last replica of each
session (`_Sessions`).

Both memories are bounded. The state of a replica is dropped with the replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

# Cost of a request in flight, in prompt tokens. Larger values balance load better and give fewer hits.
LOAD_TOKENS = 64
# Smallest share of a prompt that a cached prefix must have to influence routing. Measured in docs/scale.md.
LEAST_SHARE = 0.25
# Time for which a prompt sent to a replica counts as cached there; the next report comes earlier.
EXPECTED_S = 60.0
MAX_EXPECTED = 1 << 14
# A session's replica may have cached more than it reports: on its disk, or sampled replies.
SESSION_SHARE = 0.5
SESSION_S = 3600.0
MAX_SESSIONS = 1 << 16


@dataclass(frozen=True)
class RoutedRequest:
    """The properties of a request that decide its route."""

    num_tokens: int
    keys: Sequence[tuple[int, int]] = ()  # position and key, from the shortest prefix to the longest
    session: str = ""  # empty: no session


@dataclass(frozen=True)
class ReplicaReport:
    """A replica's report of its cached prefixes and capacity."""

    keys: frozenset[int] = frozenset()
    capacity: int = 1  # concurrent requests


@dataclass(frozen=True)
class Choice:
    replica: str
    num_cached: int  # tokens that the replica is believed to have cached
    why: str  # prefix, session, load


class RoutingPolicy:
    def __init__(self, load_tokens: float = LOAD_TOKENS) -> None:
        self._load_tokens = load_tokens
        self._replicas: dict[str, _Replica] = {}
        self._sessions = _Sessions()
        self._num_chosen = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def in_flight(self, replica: str) -> int:
        return self._replicas[replica].in_flight if replica in self._replicas else 0

    def report(self, replica: str, report: ReplicaReport) -> None:
        """Store the report of a replica, adding the replica if it is new."""
        self._replicas.setdefault(replica, _Replica()).report = report

    def keep(self, replicas: Sequence[str]) -> None:
        """Set the replicas that exist now; the state of all others is dropped."""
        for replica in replicas:
            self._replicas.setdefault(replica, _Replica())
        for gone in self._replicas.keys() - set(replicas):
            del self._replicas[gone]

    def choose(self, asked: RoutedRequest, now_s: float, among: Sequence[str] | None = None) -> Choice | None:
        """Choose a replica and count the request as in flight; the caller must call `ended` later.

        `among` limits the choice; None means all known replicas. Returns None if there is no replica.
        """
        able = {
            name: self._replicas[name]
            for name in (self._replicas if among is None else among)
            if name in self._replicas
        }
        if not able:
            return None
        free = {name: replica for name, replica in able.items() if replica.in_flight < replica.report.capacity}
        choice = self._best(asked, free or able, now_s)
        chosen = able[choice.replica]
        self._num_chosen += 1
        chosen.in_flight += 1
        chosen.last_chosen = self._num_chosen
        chosen.expected.add((key for _, key in asked.keys), now_s)
        self._sessions.note(asked.session, choice.replica, asked.num_tokens, now_s)
        return choice

    def ended(self, replica: str) -> None:
        """Count a request as no longer in flight, whether it was served or failed."""
        if replica in self._replicas:
            self._replicas[replica].in_flight = max(0, self._replicas[replica].in_flight - 1)

    def _best(self, asked: RoutedRequest, able: Mapping[str, _Replica], now_s: float) -> Choice:
        last = self._sessions.find(asked.session, now_s)
        choices = [self._choice(asked, name, replica, last, now_s) for name, replica in able.items()]

        def cost(choice: Choice) -> tuple[float, bool, int, int]:
            replica = able[choice.replica]
            num_saved = 0 if choice.why == "load" else choice.num_cached
            tokens = asked.num_tokens - num_saved + self._load_tokens * replica.in_flight
            is_elsewhere = last is not None and last.replica != choice.replica
            # Least recently chosen first, so that new conversations are spread over the replicas.
            return tokens, is_elsewhere, replica.in_flight, replica.last_chosen

        return min(choices, key=cost)

    def _choice(self, asked: RoutedRequest, name: str, replica: _Replica, last: _Visit | None, now_s: float) -> Choice:
        held = replica.held_tokens(asked.keys, now_s)
        if last is not None and last.replica == name:
            likely = int(SESSION_SHARE * min(asked.num_tokens, last.num_tokens))
            if likely > held:
                return Choice(name, likely, "session")
        return Choice(name, held, "prefix" if held and held >= LEAST_SHARE * asked.num_tokens else "load")


@dataclass
class _Replica:
    report: ReplicaReport = field(default_factory=ReplicaReport)
    in_flight: int = 0
    last_chosen: int = 0
    expected: _Expected = field(default_factory=lambda: _Expected())

    def held_tokens(self, keys: Sequence[tuple[int, int]], now_s: float) -> int:
        """Return the length of the longest prefix that the replica is believed to have cached.

        Keys are chained, so the longest known key implies the shorter ones, which a bounded report may have left out.
        """
        for position, key in reversed(keys):
            if key in self.report.keys or self.expected.has(key, now_s):
                return position
        return 0


class _Expected:
    """Keys of prompts that a replica was sent recently and will soon have cached."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[int, float] = OrderedDict()

    def add(self, keys: Iterable[int], now_s: float) -> None:
        for key in keys:
            self._until_s[key] = now_s + EXPECTED_S
            self._until_s.move_to_end(key)
        while len(self._until_s) > MAX_EXPECTED:
            self._until_s.popitem(last=False)

    def has(self, key: int, now_s: float) -> bool:
        return self._until_s.get(key, 0.0) > now_s


@dataclass(frozen=True)
class _Visit:
    replica: str
    num_tokens: int
    until_s: float


class _Sessions:
    """The last replica of each session."""

    def __init__(self) -> None:
        self._visits: OrderedDict[str, _Visit] = OrderedDict()

    def find(self, session: str, now_s: float) -> _Visit | None:
        visit = self._visits.get(session)
        return visit if visit is not None and visit.until_s > now_s else None

    def note(self, session: str, replica: str, num_tokens: int, now_s: float) -> None:
        if not session:
            return
        self._visits[session] = _Visit(replica, num_tokens, now_s + SESSION_S)
        self._visits.move_to_end(session)
        if len(self._visits) > MAX_SESSIONS:
            self._visits.popitem(last=False)
