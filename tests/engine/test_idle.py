"""Memory that a request has freed: kept for the next request for a while, then returned to the system."""

from __future__ import annotations

import time

import pytest

from kvstrata.engine import thread
from kvstrata.engine.background import BackgroundPacer
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.request import Event, Finished
from kvstrata.metrics import Metrics
from tests.engine.test_engine import Reply, request, running
from tests.support.eventually import eventually
from tests.support.models import tiny_loaded


def answered(engine: Engine, id_: str) -> float:
    """Time at which the engine thread sent the end of the reply. The client's thread may receive it much later."""
    ends_s: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, Finished):
            ends_s.append(time.monotonic())

    reply = Reply(note)
    engine.submit(request(id_), reply.sink)
    reply.wait()
    return ends_s[0]


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times at which memory was returned to the system."""
    times: list[float] = []
    monkeypatch.setattr(thread, "trim_heap", lambda: times.append(time.monotonic()))
    return times


def wait_until_cleared(cleared: list[float], after_s: float = 0.0) -> None:
    eventually(lambda: any(time_s > after_s for time_s in cleared), 30)


def test_idle_engine_frees_memory_once_and_not_between_two_turns(
    monkeypatch: pytest.MonkeyPatch, cleared: list[float]
) -> None:
    monkeypatch.setattr(thread, "KEEPS_FREED_S", 1.0)
    with running(tiny_loaded("llama")) as engine:
        ends_s = [answered(engine, id_) for id_ in "ab"]
        wait_until_cleared(cleared, ends_s[-1])
        time.sleep(0.3)
        # On a slow machine it may rightly happen between the two turns as well.
        assert sum(time_s > ends_s[-1] for time_s in cleared) == 1
        assert all(not 0 <= time_s - end_s < 1.0 for time_s in cleared for end_s in ends_s)
        asked_s = time.monotonic()
        engine.ask(lambda core: core.prefix_cache.evictor.clear()).result()
        wait_until_cleared(cleared, asked_s)
        wait_until_cleared(cleared, answered(engine, "c"))


def test_memory_of_expired_entries_is_freed_while_idle(monkeypatch: pytest.MonkeyPatch, cleared: list[float]) -> None:
    monkeypatch.setattr(thread, "KEEPS_FREED_S", 0.1)
    expired: list[float] = []
    expire = BackgroundPacer.expire

    def noted(pacer: BackgroundPacer) -> None:
        expire(pacer)
        expired.append(time.monotonic())

    monkeypatch.setattr(BackgroundPacer, "expire", noted)
    engine = Engine(tiny_loaded("llama"), EngineLimits(), Metrics(), KvConfig(ttl_s=2.0))
    engine.start()
    try:
        wait_until_cleared(cleared, answered(engine, "a"))
        eventually(lambda: expired, 30)
        wait_until_cleared(cleared, expired[0])
    finally:
        engine.stop()


def test_frequent_state_queries_do_not_delay_freeing(monkeypatch: pytest.MonkeyPatch, cleared: list[float]) -> None:
    monkeypatch.setattr(thread, "KEEPS_FREED_S", 0.5)
    with running(tiny_loaded("llama")) as engine:
        answered(engine, "a")
        until_s = time.monotonic() + 30
        while not cleared and time.monotonic() < until_s:
            engine.ask(lambda core: core.executor.is_idle).result()
            time.sleep(0.05)
        assert cleared
