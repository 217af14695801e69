"""Listeners hear what a store tells, in its order, on another thread; those that are too slow are told so."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstrata.events import feed
from kvstrata.events.feed import ListenerThread
from kvstrata.prefix_cache.keys import TokenIds
from tests.prefix_cache.kv import Told, new_cache, settle, store_tokens

ROOT = bytes(32)


class Slow(Told):
    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        self.may_go_on.wait(10)
        super().stored(root_key, ids, start)


class Broken(Told):
    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        raise RuntimeError(f"this listener is broken: {len(ids) - start} tokens of {root_key!r}")


def ids_of(num_tokens: int) -> TokenIds:
    return np.arange(num_tokens, dtype=np.int32)


def test_a_listener_hears_what_is_stored_and_what_goes() -> None:
    told = Told()
    hears = ListenerThread([Broken(), told])
    cache = new_cache(watcher=hears)
    store_tokens(cache, range(64))
    store_tokens(cache, [*range(32), *range(100, 132)])
    settle(cache)
    cache.evictor.clear(None, "hot", owner=None)
    store_tokens(cache, range(200, 264))
    hears.close()
    told.check(cache)
    assert len(told.prefixes) == 64


def test_tokens_are_told_in_whole_runs_of_sixteen() -> None:
    told = Told()
    hears = ListenerThread([told])
    for num_tokens in range(1, 40):
        hears.stored(ROOT, ids_of(num_tokens), num_tokens - 1)
    hears.close()
    assert {len(ids) // 4 for _, ids in told.prefixes} == {16, 32}


def test_one_that_falls_behind_is_told_that_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WAITING_BYTES", 4096)
    slow = Slow()
    hears = ListenerThread([slow])
    for _ in range(100):
        hears.stored(ROOT, ids_of(64), 0)
    slow.may_go_on.set()
    while hears._waiting_bytes:
        pass
    assert not slow.prefixes
    hears.stored(ROOT, ids_of(16), 0)
    hears.close()
    assert len(slow.prefixes) == 16
