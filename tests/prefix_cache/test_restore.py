"""Restorer: dropped planes are read back from the disk, within the bounds of reads and of memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvstrata.codecs.registry import parse
from kvstrata.kv.precision_plan import PrecisionPlan, make_plan
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import NO_MEMORY, PrecisionChange
from kvstrata.tiers.disk.filesystem import Filesystem
from tests.prefix_cache.disk import random_tokens, store_on, write_turns, written
from tests.prefix_cache.kv import LAYOUT, TOKEN_BYTES, check_lease, settle


def plan(name: str) -> PrecisionPlan:
    return make_plan(LAYOUT, parse(name), parse(name))


RAW, LOW = PrecisionChange(k=parse("raw"), v=parse("raw")), PrecisionChange(k=parse("planes:4"), v=parse("planes:4"))
TIMEOUT_S = 60.0


class CountingFiles(Filesystem):
    """Files that record at each read how many bytes have been read and not used."""

    def __init__(self) -> None:
        self.unused_bytes: list[int] = []
        self.prefix_cache: PrefixCache | None = None

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self.prefix_cache is not None:
            client = self.prefix_cache.disk
            self.unused_bytes.append(client.tier.usage().unused_bytes + client.loader.unused_bytes)
        return super().read_into(fd, buffer, offset)


def step_down(cache: PrefixCache, *prompts: list[int]) -> None:
    """Write prompts to the disk raw, then let them step down in memory."""
    for tokens in prompts:
        write_turns(cache, tokens, [len(tokens)])
    cache.requantizer.requantize(LOW, plan("planes:4"))
    settle(cache)
    written(cache)


def restore_all(cache: PrefixCache) -> int:
    """Restore all entries, and return the most bytes that the cache had meanwhile."""
    cache.requantizer.requantize(RAW, plan("raw"))
    until_s, max_bytes = time.monotonic() + TIMEOUT_S, 0
    while cache.requantizer.is_running:
        assert time.monotonic() < until_s
        if cache.has_work:
            cache.run_background(0)
            max_bytes = max(max_bytes, cache.table.nbytes)
    return max_bytes


def test_restore_reads_ahead_within_bound(tmp_path: Path) -> None:
    tokens = random_tokens(4000, 0)
    bound_bytes = 2 * 512 * TOKEN_BYTES  # two blocks as bytes, two as arrays
    files = CountingFiles()
    disk: dict[str, Any] = {"files": files, "read_ahead_bytes": bound_bytes // 2}
    with store_on(tmp_path, **disk) as cache:
        step_down(cache, tokens)
        files.prefix_cache = cache
        restore_all(cache)
        settle(cache)
        assert 0 < max(files.unused_bytes) <= bound_bytes
        assert cache.counters["restored_spans"] == 1
        assert cache.table.nbytes == len(tokens) * TOKEN_BYTES
        # Each layer has one segment, as before.
        (entry,) = cache.table.entries
        assert {len(entry.span.sealed(layer)) for layer in entry.span.layers} == {1}
        lease = cache.lease(tokens, "")
        check_lease(lease, tokens)
        cache.release(lease)


def test_restore_without_free_memory_skips_entries_and_evicts_none(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        prompts = [random_tokens(1000, seed) for seed in range(3)]
        step_down(cache, *prompts)
        cached_bytes = cache.table.nbytes
        cache.reclaimer.limit_bytes = cached_bytes + 1100 * TOKEN_BYTES
        preview = cache.requantizer.requantize(
            PrecisionChange(k=parse("raw"), v=parse("raw"), dry_run=True), plan("raw")
        )
        assert [left.spans for left in preview.left_alone if left.reason == NO_MEMORY] == [2]
        assert restore_all(cache) <= cache.reclaimer.limit_bytes
        settle(cache)
        assert cache.counters["restored_spans"] == 1
        assert cache.table.nbytes == preview.bytes_after
        assert [cache.lookup(tokens, "").num_tokens for tokens in prompts] == [1000] * 3
        # The entry that was used last is restored first.
        lease = cache.lease(prompts[-1], "")
        check_lease(lease, prompts[-1])
        cache.release(lease)


def test_restore_ends_when_memory_runs_out(tmp_path: Path) -> None:
    """Memory was free when the restore began."""
    tokens = random_tokens(4000, 0)
    with store_on(tmp_path, read_ahead_bytes=512 * TOKEN_BYTES) as cache:
        step_down(cache, tokens)
        cache.requantizer.requantize(RAW, plan("raw"))
        cache.reclaimer.limit_bytes = cache.table.nbytes + 1000 * TOKEN_BYTES
        limit_bytes = cache.reclaimer.limit_bytes
        until_s = time.monotonic() + TIMEOUT_S
        while cache.requantizer.is_running:
            assert time.monotonic() < until_s
            if cache.has_work:
                cache.run_background(0)
            assert cache.table.nbytes <= limit_bytes
        settle(cache)
        assert cache.counters["restores_without_room"] == 1
        # Some blocks fitted in memory.
        assert set(cache.usage.usage().by_precision) == {"raw", "planes:4"}
        lease = cache.lease(tokens, "")
        check_lease(lease, tokens, at_least=4)
        cache.release(lease)


def test_restore_ends_when_precision_changes_again(tmp_path: Path) -> None:
    tokens = random_tokens(4000, 0)
    with store_on(tmp_path, read_ahead_bytes=512 * TOKEN_BYTES) as cache:
        step_down(cache, tokens)
        cache.requantizer.requantize(RAW, plan("raw"))
        cache.requantizer.requantize(LOW, plan("planes:4"))
        settle(cache)
        assert not cache.requantizer.is_running
        assert set(cache.usage.usage().by_precision) == {"planes:4"}


def test_restore_ends_when_blocks_have_left_the_disk(tmp_path: Path) -> None:
    tokens = random_tokens(1000, 0)
    with store_on(tmp_path) as cache:
        step_down(cache, tokens)
        cache.disk.tier.clear()
        restore_all(cache)
        assert cache.counters["restored_spans"] == 0
        assert set(cache.usage.usage().by_precision) == {"planes:4"}


def test_restore_of_changed_entry_replaces_only_its_own_tokens(tmp_path: Path) -> None:
    """While blocks are read, the entry's end is evicted, and the end of another conversation is joined to it."""
    shared = random_tokens(512, 0)
    first, second = [*shared, *random_tokens(512, 1)], [*shared, *random_tokens(512, 2)]
    with store_on(tmp_path, read_ahead_bytes=256 * TOKEN_BYTES) as cache:
        step_down(cache, first, second)
        cache.release(cache.lease(first, ""))  # used last, so restored first
        cache.requantizer.requantize(RAW, plan("raw"))
        until_s = time.monotonic() + TIMEOUT_S
        while not cache.disk.loader.has_arrived:
            assert time.monotonic() < until_s
            cache.run_background(0)
        cache.evictor.evict_leaf(cache.lookup(first, "").path[-1], 512)
        cache.table.join_spans(cache.lookup(second, "").path[-1], 1)
        assert len(cache.lookup(second, "").entries) == 1
        while cache.requantizer.is_running:
            assert time.monotonic() < until_s
            if cache.has_work:
                cache.run_background(0)
        lease = cache.lease(second, "")
        assert lease.num_tokens == len(second)
        check_lease(lease, second, at_least=4)
        cache.release(lease)
