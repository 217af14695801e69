"""Entries that leave the disk: more KV in memory than on the disk, conversations longer than the disk, and blocks that
are evicted, lost or given up. Every dropped token is counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.tiers import interface
from kvstrata.tiers.disk.folder import file_name
from tests.prefix_cache.disk import load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, settle, store_tokens
from tests.tiers.disk.blocks import records_of

NUM_TOKENS = 256
NUM_CHATS = 12
DISK_BYTES = 6 * NUM_TOKENS * TOKEN_BYTES  # some of the conversations, and what publishing may take


def fill(cache: PrefixCache, num_chats: int = NUM_CHATS, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Insert conversations without a common prefix. Each is on the disk before the next begins."""
    chats = [random_tokens(num_tokens, 100 + seed) for seed in range(num_chats)]
    for tokens in chats:
        store_tokens(cache, tokens)
        settle(cache)
        written(cache)
    settle(cache)
    return chats


def entry_of(cache: PrefixCache, tokens: list[int]) -> Entry:
    return cache.lookup(tokens, "").entries[-1]


def in_memory(cache: PrefixCache, tokens: list[int]) -> int:
    return cache.lookup(tokens, "").num_tokens


def dropped(cache: PrefixCache) -> int:
    return sum(count for name, count in cache.counters.items() if name.startswith("dropped_tokens_"))


def test_entries_are_archived_while_the_disk_has_them(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply", limit_bytes=DISK_BYTES) as cache:
        chats = fill(cache)
        on_disk = [reachable(cache, tokens) == NUM_TOKENS for tokens in chats]
        assert 0 < sum(on_disk) < NUM_CHATS
        assert [entry_of(cache, tokens).is_archived for tokens in chats] == on_disk


def test_eviction_takes_archived_entries_first(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply", limit_bytes=DISK_BYTES) as cache:
        chats = fill(cache)
        on_disk = [tokens for tokens in chats if reachable(cache, tokens) == NUM_TOKENS]
        others = [tokens for tokens in chats if tokens not in on_disk]
        cache.reclaimer.shrink_to(len(others) * NUM_TOKENS * TOKEN_BYTES)
        assert [in_memory(cache, tokens) for tokens in others] == [NUM_TOKENS] * len(others)
        assert [in_memory(cache, tokens) for tokens in on_disk] == [0] * len(on_disk)
        assert all(reachable(cache, tokens) == NUM_TOKENS for tokens in on_disk)
        assert dropped(cache) == 0


def test_entry_evicted_from_disk_is_written_again_when_memory_evicts_it(tmp_path: Path) -> None:
    hot_bytes = NUM_CHATS * NUM_TOKENS * TOKEN_BYTES
    with store_on(tmp_path, disk_write="after_reply", limit_bytes=DISK_BYTES, hot_bytes=hot_bytes) as cache:
        chats = fill(cache)
        before = cache.disk.tier.usage().written_bytes
        for _ in range(5):
            cache.reclaimer.shrink_to(
                hot_bytes
            )  # memory is full: entries that the disk lacks are offered ahead of need
            settle(cache)
            written(cache)
        assert cache.disk.tier.usage().written_bytes == before
        cache.reclaimer.shrink_to(0)
        settle(cache)
        assert sum(in_memory(cache, tokens) for tokens in chats) == 0
        written(cache)
        settle(cache)
        evicted = cache.disk.tier.usage().counters["evicted"]
        lost = NUM_CHATS * NUM_TOKENS - sum(reachable(cache, tokens) for tokens in chats)
        assert cache.disk.tier.usage().written_bytes > before
        assert lost - dropped(cache) <= evicted["limit"] * NUM_TOKENS


@pytest.mark.parametrize("leaves_at_once", [False, True])
def test_end_of_a_conversation_longer_than_the_disk_counts_as_dropped(leaves_at_once: bool, tmp_path: Path) -> None:
    """The queue accepts all tokens, and the disk has no space for the last ones."""
    with store_on(
        tmp_path, disk_write="on_evict" if leaves_at_once else "after_reply", limit_bytes=DISK_BYTES
    ) as cache:
        tokens = random_tokens(3000, 1)
        store_tokens(cache, tokens)
        if leaves_at_once:
            cache.reclaimer.shrink_to(0)
            assert in_memory(cache, tokens) == 0
        else:
            settle(cache)
        on_disk = written(cache)
        settle(cache)
        assert 0 < on_disk < 3000
        if not leaves_at_once:
            assert not entry_of(cache, tokens).is_archived
            cache.reclaimer.shrink_to(0)
            settle(cache)
        assert reachable(cache, tokens) == written(cache) == on_disk
        assert dropped(cache) == cache.counters["dropped_tokens_disk_full"] == 3000 - on_disk


def test_entry_that_leaves_the_disk_during_its_load_is_not_archived(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply", limit_bytes=DISK_BYTES) as cache:
        (tokens,) = fill(cache, 1)
        cache.evictor.clear(tier="hot")
        lookup = cache.prefetcher.ask(tokens, "")
        assert lookup is not None
        assert lookup.wait(60)
        loading = cache.prefetcher.begin_load(lookup.offers[0], tokens, "")
        assert loading is not None
        assert loading.reading is not None
        assert loading.reading.wait(60)
        fill(cache, NUM_CHATS)
        assert reachable(cache, tokens) == 0
        while not loading.is_done:
            cache.run_background(0)
        cache.prefetcher.promote(loading)
        assert in_memory(cache, tokens) == NUM_TOKENS
        assert not entry_of(cache, tokens).is_archived


def test_entry_that_leaves_the_disk_after_its_load_is_not_archived(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply", limit_bytes=DISK_BYTES) as cache:
        (tokens,) = fill(cache, 1)
        cache.evictor.clear(tier="hot")
        load(cache, tokens)
        assert entry_of(cache, tokens).is_archived
        fill(cache, NUM_CHATS)
        assert reachable(cache, tokens) == 0
        assert not entry_of(cache, tokens).is_archived


def test_damaged_block_in_the_middle_is_written_again(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply") as cache:
        tokens = random_tokens(1000, 1)
        store_tokens(cache, tokens)
        settle(cache)
        written(cache)
        middle = records_of(cache.disk.tier)[1]
        (damaged,) = tmp_path.rglob(file_name(middle.id))
        damaged.write_bytes(damaged.read_bytes()[:-100])
        cache.evictor.clear(tier="hot")
        load(cache, tokens)  # up to the damaged block
        store_tokens(cache, tokens)
        settle(cache)
        written(cache)
        assert reachable(cache, tokens) == 1000
        assert all(entry.is_archived for entry in cache.table.entries)


def test_overflow_of_the_removal_log_withdraws_every_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "MAX_REMOVALS", 1)
    with store_on(tmp_path, disk_write="after_reply", limit_bytes=DISK_BYTES) as cache:
        chats = [random_tokens(NUM_TOKENS, 100 + seed) for seed in range(NUM_CHATS)]
        for tokens in chats:
            store_tokens(cache, tokens)
        settle(cache)
        written(cache)
        settle(cache)
        for tokens in chats:
            is_there = reachable(cache, tokens) == NUM_TOKENS
            assert is_there or not entry_of(cache, tokens).is_archived
