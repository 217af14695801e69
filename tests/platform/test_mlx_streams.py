"""MlxStreams that go from thread to thread, with real work on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import mlx.core as mx
import pytest

from kvstrata.platform.mlx_streams import MlxStreams


def on_a_thread(work: Callable[[], str]) -> str:
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except ValueError as error:
            done.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return done.result(0)


def compute() -> str:
    x = mx.random.normal((64, 64))
    y = x @ x
    mx.async_eval(y)
    assert mx.isfinite(y).all().item()
    return str(mx.default_stream(mx.cpu))


def test_the_next_thread_computes_on_the_stream_of_the_one_before() -> None:
    streams = MlxStreams()

    def work() -> str:
        with streams.borrowed():
            return compute()

    assert len({on_a_thread(work) for _ in range(5)}) == 1


def test_threads_that_compute_at_the_same_time_have_each_their_own() -> None:
    streams = MlxStreams()

    def work() -> str:
        with streams.borrowed():
            inner.append(on_a_thread(borrow))
            return compute()

    def borrow() -> str:
        with streams.borrowed():
            return compute()

    inner: list[str] = []
    outer = on_a_thread(work)
    assert inner[0] != outer
    assert {on_a_thread(borrow) for _ in range(3)} <= {outer, inner[0]}


def test_a_stream_comes_back_from_a_thread_that_fails() -> None:
    streams = MlxStreams()
    used: list[str] = []

    def fail() -> str:
        with streams.borrowed():
            used.append(compute())
            raise ValueError("no such kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such kernel"):
            on_a_thread(fail)
    assert used[0] == used[1]
