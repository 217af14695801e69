"""Evictions in bursts: a working disk gets the leaves first, and lost tokens are counted by their reason."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.tiers.interface import CALM_SHARE
from tests.prefix_cache.disk import MIB, load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, Clock, settle, store_tokens
from tests.support.eventually import eventually
from tests.tiers.disk.faults import FaultyFiles, fail, wait_for

CHATS = [random_tokens(1024, seed) for seed in range(10)]  # 1 MiB each, in 4 blocks
BLOCK_BYTES = 256 * TOKEN_BYTES


def fill(cache: PrefixCache) -> None:
    for chat in CHATS:
        store_tokens(cache, chat)
    while not cache.transcoder.jobs.is_idle:
        cache.run_background(0)


def shrink_with_disk(cache: PrefixCache, limit_bytes: int) -> int:
    """Reclaim memory as the engine does. Return how often it waited for the disk."""
    num_waits = 0
    while cache.reclaimer.shrink_to(limit_bytes) == "awaits_disk":
        num_waits += 1
        assert cache.disk.tier.flush(60).is_empty
    return num_waits


def num_kept(cache: PrefixCache, chat: list[int]) -> int:
    """Return how many tokens of a chat memory or the disk has."""
    return max(cache.lookup(chat, "").num_tokens, reachable(cache, chat))


def dropped(cache: PrefixCache) -> dict[str, int]:
    names = [name for name in cache.usage.counters() if name.startswith("dropped_tokens_")]
    return {name.removeprefix("dropped_tokens_"): cache.usage.counters()[name] for name in names}


@pytest.mark.parametrize("queue_bytes", [9 * MIB // 16, BLOCK_BYTES, 1000])
def test_burst_reaches_disk_through_small_queue(queue_bytes: int, tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=16 * MIB, queue_bytes=queue_bytes) as cache:
        fill(cache)
        assert shrink_with_disk(cache, MIB) > 3
        assert cache.table.nbytes <= MIB
        assert [num_kept(cache, chat) for chat in CHATS] == [1024] * 10
        assert dropped(cache) == {}


def test_ladder_and_disk_together_lose_no_tokens(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    with store_on(tmp_path, hot_bytes=16 * MIB, queue_bytes=9 * MIB // 16, dynamic=True, files=files) as cache:
        fill(cache)
        # While the disk takes nothing, spans step down to the floors; then reclaiming waits for the disk.
        assert cache.reclaimer.shrink_to(MIB // 2, 0.0) == "steps_down"
        while not cache.transcoder.jobs.is_idle:
            cache.transcoder.jobs.run(1.0)
        assert cache.reclaimer.shrink_to(MIB // 2, 0.0) == "awaits_disk"
        assert set(cache.usage.usage().by_precision) == {"planes:4"}
        assert [cache.lookup(chat, "").num_tokens for chat in CHATS] == [1024] * 10
        resumes.set()
        shrink_with_disk(cache, MIB // 2)
        assert cache.table.nbytes <= MIB // 2
        assert [num_kept(cache, chat) for chat in CHATS] == [1024] * 10
        assert dropped(cache) == {}


def test_hard_limit_evicts_without_disk_and_counts_lost_tokens(tmp_path: Path) -> None:
    resumes = threading.Event()
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=FaultyFiles(before={"sync": wait_for(resumes)})) as cache:
        fill(cache)
        assert cache.reclaimer.shrink_to(MIB) == "awaits_disk"
        assert cache.table.nbytes == 10 * MIB
        cache.reclaimer.shrink_to(5 * MIB, hard_limit_bytes=5 * MIB)
        assert cache.table.nbytes <= 5 * MIB
        # The queue has the first block of one evicted chat.
        assert dropped(cache) == {"disk_slow": 5 * 1024 - 256}
        assert cache.usage.counters()["refused_disk_slow"] == 5
        resumes.set()


def test_load_drops_no_leaf_that_disk_is_about_to_take(tmp_path: Path) -> None:
    resumes, files = threading.Event(), FaultyFiles()
    with store_on(tmp_path, hot_bytes=9 * MIB, queue_bytes=BLOCK_BYTES, files=files) as cache:
        store_tokens(cache, CHATS[0])
        shrink_with_disk(cache, 0)
        assert written(cache) == 1024
        files.before = {"sync": wait_for(resumes)}
        for chat in CHATS[1:]:
            store_tokens(cache, chat)
        cache.reclaimer.step_down_early(cache.table.nbytes, 16 * MIB)  # memory that the engine has for it
        load(cache, CHATS[0])
        assert [cache.lookup(chat, "").num_tokens for chat in CHATS] == [1024] * 10
        assert dropped(cache) == {}
        resumes.set()
        shrink_with_disk(cache, 9 * MIB)
        assert [num_kept(cache, chat) for chat in CHATS] == [1024] * 10


def test_leaf_on_disk_is_evicted_before_leaf_that_would_be_lost(tmp_path: Path) -> None:
    resumes, files, clock = threading.Event(), FaultyFiles(), Clock()
    with store_on(tmp_path, queue_bytes=4 * BLOCK_BYTES, files=files, cache_clock=clock) as cache:
        fill(cache)
        newest = tuple(cache.table.entries)[-1]
        cache.offloader.add_entry(newest)
        settle(cache)
        assert written(cache) == 1024
        # The newest leaf is worth more than the others, which are much older.
        clock.now_s += 1e6
        cache.release(cache.lease(CHATS[-1], ""))
        files.before = {"sync": wait_for(resumes)}
        cache.reclaimer.shrink_to(cache.table.nbytes - 2 * MIB, hard_limit_bytes=cache.table.nbytes - 2 * MIB)
        assert cache.lookup(CHATS[-1], "").num_tokens == 0
        assert dropped(cache) == {}
        resumes.set()


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EIO, "disk_failed"), (errno.EROFS, "disk_failed"), (errno.ENOSPC, "disk_full")]
)
def test_failing_disk_does_not_hold_up_reclaim(code: int, reason: str, tmp_path: Path) -> None:
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=FaultyFiles(before={"sync": fail(code)})) as cache:
        fill(cache)
        cache.reclaimer.shrink_to(9 * MIB)
        eventually(lambda: cache.disk.tier.usage().paused_because)
        assert cache.reclaimer.shrink_to(MIB) == "done"
        assert cache.table.nbytes <= MIB
        assert set(dropped(cache)) == {reason}
        assert dropped(cache)[reason] >= 8 * 1024


def test_reclaim_waits_for_hanging_disk_only_once(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=files, patience_s=0.2) as cache:
        fill(cache)
        assert cache.reclaimer.shrink_to(9 * MIB) == "awaits_disk"
        while cache.reclaimer.shrink_to(9 * MIB) == "awaits_disk":
            pass
        # After its patience has run out, no reclaim waits.
        assert cache.reclaimer.shrink_to(MIB) == "done"
        assert dropped(cache)["disk_slow"] >= 8 * 1024
        resumes.set()


def test_tokens_left_unwritten_by_policy_are_counted_by_reason(tmp_path: Path) -> None:
    with store_on(tmp_path, daily_write_bytes=1000) as cache:
        fill(cache)
        assert cache.reclaimer.shrink_to(9 * MIB) == "done"
        assert set(dropped(cache)) == {"write_budget"}


def test_entry_that_met_full_queue_is_written_later(tmp_path: Path) -> None:
    """The retry needs no further request."""
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES) as cache:
        fill(cache)
        cache.offloader.offer_changed()
        for _ in range(1000):
            settle(cache)
            assert cache.disk.tier.flush(60).is_empty
            if not cache.has_work:
                break
        assert [reachable(cache, chat) for chat in CHATS] == [1024] * 10


def test_leaf_on_disk_is_evicted_before_others_step_down(tmp_path: Path) -> None:
    with store_on(tmp_path, dynamic=True) as cache:
        fill(cache)
        cache.offloader.add_entry(tuple(cache.table.entries)[5])
        settle(cache)
        assert cache.reclaimer.shrink_to(9 * MIB, 0.0) == "done"
        assert cache.lookup(CHATS[5], "").num_tokens < 1024
        assert cache.usage.counters()["stepped_down_spans"] == 0
        # None of the others is on the disk, and memory is still short.
        cache.reclaimer.shrink_to(8 * MIB, 0.0)
        assert cache.usage.counters()["stepped_down_spans"] > 0


def test_recently_used_leaf_on_disk_stays_in_memory(tmp_path: Path) -> None:
    clock = Clock()
    with store_on(tmp_path, cache_clock=clock) as cache:
        fill(cache)
        clock.now_s += 1e6
        cache.release(cache.lease(CHATS[0], ""))
        cache.offloader.add_entry(cache.lookup(CHATS[0], "").entries[0])
        settle(cache)
        assert written(cache) == 1024
        assert cache.reclaimer.shrink_to(5 * MIB) == "done"
        assert cache.lookup(CHATS[0], "").num_tokens == 1024


def test_writes_ahead_of_need_wait_for_calm_disk_beside_streams(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    queue_bytes = 16 * BLOCK_BYTES
    with store_on(tmp_path, queue_bytes=queue_bytes, files=files, disk_write="after_reply") as cache:
        fill(cache)
        while cache.has_work_beside_streams:
            cache.run_background(0)
        queued_bytes = cache.disk.tier.write_state().queue_bytes
        assert CALM_SHARE * queue_bytes < queued_bytes <= CALM_SHARE * queue_bytes + BLOCK_BYTES
        assert cache.has_work
        resumes.set()
        while cache.has_work:
            settle(cache)
            assert cache.disk.tier.flush(60).is_empty
        assert [reachable(cache, chat) for chat in CHATS] == [1024] * 10


def test_writes_under_pressure_do_not_wait_for_calm_disk(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    with store_on(tmp_path, queue_bytes=16 * BLOCK_BYTES, files=files, disk_write="after_reply") as cache:
        fill(cache)
        while cache.has_work_beside_streams:
            cache.run_background(0)
        cache.reclaimer.shrink_to(cache.table.nbytes, 0.0)
        assert cache.has_work_beside_streams
        resumes.set()
