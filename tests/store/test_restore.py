"""Precision that comes back from the disk, within the bounds of reading and of memory."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from kvstrata.disk.files import Files
from kvstrata.spans.plan import make_plan
from kvstrata.store.precision.requantize import NO_ROOM, Change
from kvstrata.store.store import Store
from tests.store.disk import random_tokens, store_on, write_turns, written
from tests.store.kv import LAYOUT, TOKEN_BYTES, check_lease, settle

plan = partial(make_plan, LAYOUT)
RAW, LOW = Change(k="raw", v="raw"), Change(k="planes:4", v="planes:4")
TIMEOUT_S = 60.0


class Watched(Files):
    """Looks at each read how much was read that is of no use yet."""

    def __init__(self) -> None:
        self.unused_bytes: list[int] = []
        self.store: Store | None = None

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self.store is not None:
            cold = self.store.cold
            self.unused_bytes.append(cold.tier.usage().unused_bytes + cold.loads.unused_bytes)
        return super().read_into(fd, buffer, offset)


def step_down(store: Store, *prompts: list[int]) -> None:
    """They are on the disk as they were, and in memory in fewer bits."""
    for tokens in prompts:
        write_turns(store, tokens, [len(tokens)])
    store.requantize(LOW, plan("planes:4", "planes:4"))
    settle(store)
    written(store)


def go_up(store: Store) -> int:
    """Tells how much was held at most."""
    store.requantize(RAW, plan("raw", "raw"))
    until_s, most = time.monotonic() + TIMEOUT_S, 0
    while store.is_requantizing:
        assert time.monotonic() < until_s
        if store.has_work:
            store.work(0)
            most = max(most, store.held_bytes)
    return most


def test_what_comes_back_keeps_to_the_bound_of_reading(tmp_path: Path) -> None:
    tokens = random_tokens(4000, 0)
    bound_bytes = 2 * 512 * TOKEN_BYTES  # two blocks as bytes, two as arrays
    files = Watched()
    disk: dict[str, Any] = {"files": files, "read_ahead_bytes": bound_bytes // 2}
    with store_on(tmp_path, **disk) as store:
        step_down(store, tokens)
        files.store = store
        go_up(store)
        settle(store)
        assert 0 < max(files.unused_bytes) <= bound_bytes
        assert store.counters["restored_spans"] == 1
        assert store.held_bytes == len(tokens) * TOKEN_BYTES
        # One part in each layer, as before.
        assert [entry.span.num_parts() for entry in store.entries] == [1]
        lease = store.match(tokens, "")
        check_lease(lease, tokens)
        store.release(lease)


def test_what_finds_no_room_stays_lower_and_nothing_goes_for_it(tmp_path: Path) -> None:
    with store_on(tmp_path) as store:
        prompts = [random_tokens(1000, seed) for seed in range(3)]
        step_down(store, *prompts)
        held = store.held_bytes
        store.room.limit_bytes = held + 1100 * TOKEN_BYTES
        told = store.requantize(Change(k="raw", v="raw", dry_run=True), plan("raw", "raw"))
        assert [left.spans for left in told.left_alone if left.reason == NO_ROOM] == [2]
        assert go_up(store) <= store.room.limit_bytes
        settle(store)
        assert store.counters["restored_spans"] == 1
        assert store.held_bytes == told.bytes_after
        assert [store.find(tokens, "").num_tokens for tokens in prompts] == [1000] * 3
        # What was used last.
        lease = store.match(prompts[-1], "")
        check_lease(lease, prompts[-1])
        store.release(lease)


def test_memory_that_is_gone_when_it_comes_ends_it(tmp_path: Path) -> None:
    """It was there when it was asked for."""
    tokens = random_tokens(4000, 0)
    with store_on(tmp_path, read_ahead_bytes=512 * TOKEN_BYTES) as store:
        step_down(store, tokens)
        store.requantize(RAW, plan("raw", "raw"))
        store.room.limit_bytes = store.held_bytes + 1000 * TOKEN_BYTES
        limit_bytes = store.room.limit_bytes
        until_s = time.monotonic() + TIMEOUT_S
        while store.is_requantizing:
            assert time.monotonic() < until_s
            if store.has_work:
                store.work(0)
            assert store.held_bytes <= limit_bytes
        settle(store)
        assert store.counters["restores_without_room"] == 1
        # As far as there was room.
        assert set(store.usage().by_precision) == {"raw", "planes:4"}
        lease = store.match(tokens, "")
        check_lease(lease, tokens, at_least=4)
        store.release(lease)


def test_a_later_change_ends_a_restore_where_it_is(tmp_path: Path) -> None:
    tokens = random_tokens(4000, 0)
    with store_on(tmp_path, read_ahead_bytes=512 * TOKEN_BYTES) as store:
        step_down(store, tokens)
        store.requantize(RAW, plan("raw", "raw"))
        store.requantize(LOW, plan("planes:4", "planes:4"))
        settle(store)
        assert not store.is_requantizing
        assert set(store.usage().by_precision) == {"planes:4"}


def test_blocks_that_left_the_disk_end_a_restore(tmp_path: Path) -> None:
    tokens = random_tokens(1000, 0)
    with store_on(tmp_path) as store:
        step_down(store, tokens)
        store.cold.tier.clear()
        go_up(store)
        assert store.counters["restored_spans"] == 0
        assert set(store.usage().by_precision) == {"planes:4"}
