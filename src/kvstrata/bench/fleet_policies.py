"""Who gets a request in a simulated fleet: what people put before replicas, beside kvstrata's own router."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, get_args

from kvstrata.bench.fleet_run import Ask, Fleet, Policy
from kvstrata.fleet.routing import Asked, Report, Router

RoutingName = Literal["random", "round-robin", "two", "session", "prefix", "pooled"]
ROUTINGS: tuple[RoutingName, ...] = get_args(RoutingName)


class _Deaf:
    """Routes without knowing what replicas hold."""

    hears_reports = False

    def ended(self, replica: int) -> None: ...

    def reported(self, replica: int, keys: frozenset[int]) -> None: ...


class AtRandom(_Deaf):
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, ask: Ask) -> int:
        return self._rng.randrange(len(ask.in_flight))


class InTurn(_Deaf):
    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, ask: Ask) -> int:
        self._num_chosen += 1
        return (self._num_chosen - 1) % len(ask.in_flight)


class OfTwo(_Deaf):
    """The less busy of two that are drawn, as Ray Serve does by default."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, ask: Ask) -> int:
        drawn = [self._rng.randrange(len(ask.in_flight)) for _ in range(2)]
        return min(drawn, key=ask.in_flight.__getitem__)


class BySession(_Deaf):
    """Where the session was before, whatever happens there; a new one goes where the fewest requests are."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._last: dict[int, int] = {}

    def choose(self, ask: Ask) -> int:
        if ask.session not in self._last:
            fewest = min(ask.in_flight)
            idle = [at for at, count in enumerate(ask.in_flight) if count == fewest]
            self._last[ask.session] = self._rng.choice(idle)
        return self._last[ask.session]


class ByPrefix:
    """The router itself. It counts what is in flight on its own, as it must behind an address."""

    hears_reports = True

    def __init__(self, num_replicas: int, capacity: int) -> None:
        self._capacity = capacity
        self._router = Router()
        for replica in range(num_replicas):
            self.reported(replica, frozenset())

    def choose(self, ask: Ask) -> int:
        choice = self._router.choose(Asked(ask.num_tokens, ask.keys, str(ask.session)), ask.now_s)
        assert choice is not None
        return int(choice.replica)

    def ended(self, replica: int) -> None:
        self._router.ended(str(replica))

    def reported(self, replica: int, keys: frozenset[int]) -> None:
        self._router.report(str(replica), Report(keys, self._capacity))


def policy_of(routing: RoutingName, fleet: Fleet, seed: int) -> Policy:
    makes: dict[RoutingName, Callable[[], Policy]] = {
        "random": lambda: AtRandom(seed),
        "round-robin": InTurn,
        "two": lambda: OfTwo(seed),
        "session": lambda: BySession(seed),
        "prefix": lambda: ByPrefix(fleet.num_replicas, fleet.machine.batch),
        "pooled": InTurn,
    }
    return makes[routing]()
