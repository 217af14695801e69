"""Memory that a request has freed: kept for the next one for a while, then given back."""

from __future__ import annotations

import time

import pytest

from kvstrata.engine import thread
from kvstrata.engine.engine import Engine
from tests.engine.test_engine import Reply, request, running
from tests.tiny import tiny_loaded


def answered(engine: Engine, id_: str) -> None:
    reply = Reply()
    engine.submit(request(id_), reply.sink)
    reply.wait()


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When memory was given back."""
    times: list[float] = []
    monkeypatch.setattr(thread, "trim_heap", lambda: times.append(time.monotonic()))
    return times


def wait_until_cleared(cleared: list[float]) -> None:
    until_s = time.monotonic() + 30
    while not cleared and time.monotonic() < until_s:
        time.sleep(0.01)
    assert cleared


def test_memory_is_given_back_once_and_not_between_two_turns(
    monkeypatch: pytest.MonkeyPatch, cleared: list[float]
) -> None:
    monkeypatch.setattr(thread, "KEEPS_FREED_S", 1.0)
    with running(tiny_loaded("llama")) as engine:
        answered(engine, "a")
        answered(engine, "b")
        ended_s = time.monotonic()
        assert not cleared
        wait_until_cleared(cleared)
        assert cleared[0] - ended_s > 0.5
        time.sleep(0.3)
        assert len(cleared) == 1
        engine.ask(lambda loop: loop.stock.clearing.clear()).result()
        del cleared[:]
        wait_until_cleared(cleared)
        answered(engine, "c")
        del cleared[:]
        wait_until_cleared(cleared)


def test_a_page_that_asks_every_moment_does_not_keep_it(monkeypatch: pytest.MonkeyPatch, cleared: list[float]) -> None:
    monkeypatch.setattr(thread, "KEEPS_FREED_S", 0.5)
    with running(tiny_loaded("llama")) as engine:
        answered(engine, "a")
        until_s = time.monotonic() + 30
        while not cleared and time.monotonic() < until_s:
            engine.ask(lambda loop: loop.idle).result()
            time.sleep(0.05)
        assert cleared
