"""Entries that the disk holds no longer: more KV in memory than on the disk, conversations longer than the disk, and
blocks that are evicted, lost or given up. Nothing is lost without being counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.disk.folder import file_name
from kvstrata.prefix_cache.entries import Entry
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.tier import removals
from tests.disk.blocks import rows_of
from tests.prefix_cache.disk import load, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, settle, store_tokens

NUM_TOKENS = 256
NUM_CHATS = 12
DISK_BYTES = 6 * NUM_TOKENS * TOKEN_BYTES  # some of the conversations, beside what publishing may take


def fill(stock: PrefixCache, num_chats: int = NUM_CHATS, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Conversations that share nothing, each on the disk before the next comes."""
    chats = [random_tokens(num_tokens, 100 + seed) for seed in range(num_chats)]
    for tokens in chats:
        store_tokens(stock, tokens)
        settle(stock)
        written(stock)
    settle(stock)
    return chats


def entry_of(stock: PrefixCache, tokens: list[int]) -> Entry:
    return stock.lookup(tokens, "").entries[-1]


def in_memory(stock: PrefixCache, tokens: list[int]) -> int:
    return stock.lookup(tokens, "").num_tokens


def dropped(stock: PrefixCache) -> int:
    return sum(count for name, count in stock.counters.items() if name.startswith("dropped_tokens_"))


def test_entries_are_clean_while_the_disk_has_them(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply", limit_bytes=DISK_BYTES) as stock:
        chats = fill(stock)
        on_disk = [reachable(stock, tokens) == NUM_TOKENS for tokens in chats]
        assert 0 < sum(on_disk) < NUM_CHATS
        assert [entry_of(stock, tokens).is_archived for tokens in chats] == on_disk


def test_memory_lets_go_of_what_is_on_the_disk_first(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply", limit_bytes=DISK_BYTES) as stock:
        chats = fill(stock)
        on_disk = [tokens for tokens in chats if reachable(stock, tokens) == NUM_TOKENS]
        others = [tokens for tokens in chats if tokens not in on_disk]
        stock.reclaimer.shrink_to(len(others) * NUM_TOKENS * TOKEN_BYTES)
        assert [in_memory(stock, tokens) for tokens in others] == [NUM_TOKENS] * len(others)
        assert [in_memory(stock, tokens) for tokens in on_disk] == [0] * len(on_disk)
        assert all(reachable(stock, tokens) == NUM_TOKENS for tokens in on_disk)
        assert dropped(stock) == 0


def test_what_the_disk_evicted_is_written_when_memory_evicts_it_and_not_before(tmp_path: Path) -> None:
    hot_bytes = NUM_CHATS * NUM_TOKENS * TOKEN_BYTES
    with store_on(tmp_path, disk_write="after-reply", limit_bytes=DISK_BYTES, hot_bytes=hot_bytes) as stock:
        chats = fill(stock)
        before = stock.disk.tier.usage().written_bytes
        for _ in range(5):
            stock.reclaimer.shrink_to(hot_bytes)  # memory is full: what is not on the disk is written ahead of need
            settle(stock)
            written(stock)
        assert stock.disk.tier.usage().written_bytes == before
        stock.reclaimer.shrink_to(0)
        settle(stock)
        assert sum(in_memory(stock, tokens) for tokens in chats) == 0
        written(stock)
        settle(stock)
        evicted = stock.disk.tier.usage().counters["evicted"]
        lost = NUM_CHATS * NUM_TOKENS - sum(reachable(stock, tokens) for tokens in chats)
        assert stock.disk.tier.usage().written_bytes > before
        assert lost - dropped(stock) <= evicted["limit"] * NUM_TOKENS


@pytest.mark.parametrize("leaves_at_once", [False, True])
def test_end_of_a_conversation_longer_than_the_disk_is_counted(leaves_at_once: bool, tmp_path: Path) -> None:
    """All of it is accepted into the queue; for its end the disk has no room."""
    with store_on(
        tmp_path, disk_write="at-eviction" if leaves_at_once else "after-reply", limit_bytes=DISK_BYTES
    ) as stock:
        tokens = random_tokens(3000, 1)
        store_tokens(stock, tokens)
        if leaves_at_once:
            stock.reclaimer.shrink_to(0)
            assert in_memory(stock, tokens) == 0
        else:
            settle(stock)
        on_disk = written(stock)
        settle(stock)
        assert 0 < on_disk < 3000
        if not leaves_at_once:
            assert not entry_of(stock, tokens).is_archived
            stock.reclaimer.shrink_to(0)
            settle(stock)
        assert reachable(stock, tokens) == written(stock) == on_disk
        assert dropped(stock) == stock.counters["dropped_tokens_disk_full"] == 3000 - on_disk


def test_what_came_from_the_disk_and_left_it_meanwhile_is_not_clean(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply", limit_bytes=DISK_BYTES) as stock:
        (tokens,) = fill(stock, 1)
        stock.clearing.clear(tier="hot")
        lookup = stock.prefetcher.ask(tokens, "")
        assert lookup is not None
        assert lookup.wait(60)
        loading = stock.prefetcher.begin_load(lookup.offers[0], tokens, "")
        assert loading is not None
        assert loading.reading is not None
        assert loading.reading.wait(60)
        fill(stock, NUM_CHATS)
        assert reachable(stock, tokens) == 0
        while not loading.is_done:
            stock.run_background(0)
        stock.prefetcher.promote(loading)
        assert in_memory(stock, tokens) == NUM_TOKENS
        assert not entry_of(stock, tokens).is_archived


def test_what_came_from_the_disk_and_leaves_it_later_is_not_clean(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply", limit_bytes=DISK_BYTES) as stock:
        (tokens,) = fill(stock, 1)
        stock.clearing.clear(tier="hot")
        load(stock, tokens)
        assert entry_of(stock, tokens).is_archived
        fill(stock, NUM_CHATS)
        assert reachable(stock, tokens) == 0
        assert not entry_of(stock, tokens).is_archived


def test_damaged_block_in_the_middle_is_written_again(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply") as stock:
        tokens = random_tokens(1000, 1)
        store_tokens(stock, tokens)
        settle(stock)
        written(stock)
        middle = rows_of(stock.disk.tier)[1]
        (damaged,) = tmp_path.rglob(file_name(middle.id))
        damaged.write_bytes(damaged.read_bytes()[:-100])
        stock.clearing.clear(tier="hot")
        load(stock, tokens)  # up to the damaged block
        store_tokens(stock, tokens)
        settle(stock)
        written(stock)
        assert reachable(stock, tokens) == 1000
        assert all(entry.is_archived for entry in stock.table.entries)


def test_more_removals_than_the_log_holds_make_every_entry_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "MAX_REMOVALS", 1)
    with store_on(tmp_path, disk_write="after-reply", limit_bytes=DISK_BYTES) as stock:
        chats = [random_tokens(NUM_TOKENS, 100 + seed) for seed in range(NUM_CHATS)]
        for tokens in chats:
            store_tokens(stock, tokens)
        settle(stock)
        written(stock)
        settle(stock)
        for tokens in chats:
            is_there = reachable(stock, tokens) == NUM_TOKENS
            assert is_there or not entry_of(stock, tokens).is_archived
