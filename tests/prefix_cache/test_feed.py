"""Event feed: listeners get cache events in order, on another thread; a slow listener is cleared."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstrata.events import feed
from kvstrata.events.feed import ListenerThread
from kvstrata.prefix_cache.keys import TokenIds
from tests.prefix_cache.kv import Told, new_cache, settle, store_tokens

ROOT = bytes(32)


class SlowListener(Told):
    """Listener that blocks until `may_continue` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_continue = threading.Event()
        self.was_cleared = threading.Event()

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        self.may_continue.wait(10)
        super().stored(root_key, ids, start)

    def cleared(self) -> None:
        super().cleared()
        self.was_cleared.set()


class BrokenListener(Told):
    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        raise RuntimeError(f"this listener is broken: {len(ids) - start} tokens of {root_key!r}")


def ids_of(num_tokens: int) -> TokenIds:
    return np.arange(num_tokens, dtype=np.int32)


def test_listener_hears_of_insertion_and_removal_beside_a_broken_one() -> None:
    listener = Told()
    feed_thread = ListenerThread([BrokenListener(), listener])
    cache = new_cache(watcher=feed_thread)
    store_tokens(cache, range(64))
    store_tokens(cache, [*range(32), *range(100, 132)])
    settle(cache)
    cache.evictor.clear(None, "hot", owner=None)
    store_tokens(cache, range(200, 264))
    feed_thread.close()
    listener.check(cache)
    assert len(listener.prefixes) == 64


def test_feed_announces_tokens_in_runs_of_sixteen() -> None:
    listener = Told()
    feed_thread = ListenerThread([listener])
    for num_tokens in range(1, 40):
        feed_thread.stored(ROOT, ids_of(num_tokens), num_tokens - 1)
    feed_thread.close()
    assert {len(ids) // 4 for _, ids in listener.prefixes} == {16, 32}


def test_feed_clears_slow_listener_and_resumes_with_new_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WAITING_BYTES", 4096)
    slow = SlowListener()
    num_dropped = 0

    def count_dropped() -> None:
        nonlocal num_dropped
        num_dropped += 1

    feed_thread = ListenerThread([slow], on_dropped=count_dropped)
    for _ in range(100):
        feed_thread.stored(ROOT, ids_of(64), 0)
    assert num_dropped > 50
    slow.may_continue.set()
    assert slow.was_cleared.wait(10)  # the last queued event
    assert not slow.prefixes
    feed_thread.stored(ROOT, ids_of(16), 0)
    feed_thread.close()
    assert len(slow.prefixes) == 16
