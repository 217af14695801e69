"""Offload: entries written while spans are joined, evicted and stepped down, and entries that the disk refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.kv.layout import Layout
from kvstrata.kv.precision_plan import PrecisionPlan, make_plan
from kvstrata.prefix_cache.keys import as_ids, chain, root_key
from kvstrata.prefix_cache.prefix_cache import PrefixCache
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.prefix_cache.transcode import MAX_SPANS
from kvstrata.prefix_cache.usage import share_of
from kvstrata.tiers.block import Block
from kvstrata.tiers.interface import Accepted
from kvstrata.tiers.write_limits import SECONDS_OF_A_DAY
from tests.prefix_cache.disk import begin_load, chat, load, random_tokens, reachable, store_on, write_turns, written
from tests.prefix_cache.kv import HYBRID, LAYOUT, TOKEN_BYTES, Clock, Run, check_lease, settle, store_tokens
from tests.tiers.disk.blocks import records_of

LAYOUTS = [pytest.param(LAYOUT, id="full"), pytest.param(HYBRID, id="hybrid")]


def plan(name: str) -> PrecisionPlan:
    return make_plan(LAYOUT, parse(name), parse(name))


def unsettled_chat(cache: PrefixCache, num_turns: int) -> list[int]:
    """Compute a chat of which the last turn has not been processed in the background."""
    tokens = chat(cache, [], num_turns - 2)
    tokens = [*chat(cache, tokens, 1, seed=1, turn_tokens=20), *random_tokens(20, 2)]
    store_tokens(cache, tokens)
    return tokens


def check_all(cache: PrefixCache, tokens: list[int]) -> None:
    """Check that a load from the disk brings back all tokens unchanged."""
    cache.evictor.clear(tier="hot")
    load(cache, tokens)
    lease = cache.lease(tokens, "")
    assert lease.num_tokens == len(tokens)
    check_lease(lease, tokens)
    cache.release(lease)


# Joins.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_turns", [MAX_SPANS, MAX_SPANS + 1])
def test_eviction_of_joined_spans_writes_them(layout: Layout, num_turns: int, tmp_path: Path) -> None:
    with store_on(tmp_path, layout) as cache:
        tokens = unsettled_chat(cache, num_turns)
        cache.reclaimer.shrink_to(cache.table.nbytes, 0.0, hard_limit_bytes=cache.table.nbytes - 1)
        assert cache.usage.counters()["evicted_tokens"] == 20
        assert written(cache) == reachable(cache, tokens) == len(tokens)


@pytest.mark.parametrize("num_turns", [MAX_SPANS, MAX_SPANS + 1, MAX_SPANS + 2])
def test_flush_writes_spans_that_it_joins(num_turns: int, tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        tokens = unsettled_chat(cache, num_turns)
        cache.flush(60)
        assert written(cache) == reachable(cache, tokens) == len(tokens)
        assert all(entry.is_archived for entry in cache.table.entries)


def test_eviction_of_leaf_writes_its_parent_first(tmp_path: Path) -> None:
    """Both spans are still in the KV buffers of their owners."""
    with store_on(tmp_path) as cache:
        tokens = random_tokens(600, 0)
        first = Run(cache, tokens[:300])
        first.compute(300)
        first.seal()
        store_tokens(cache, tokens)
        first.end()
        cache.reclaimer.shrink_to(cache.table.nbytes, 0.0, hard_limit_bytes=cache.table.nbytes - 1)
        assert 0 < cache.lookup(tokens, "").num_tokens < 600
        assert written(cache) == reachable(cache, tokens) == 600


def test_offloader_entry_grown_since_job_began_is_written_whole(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        tokens = chat(cache, [], MAX_SPANS)
        cache.offloader.offer_changed()
        cache.run_background(0)
        tokens = [*tokens, *random_tokens(20, 99)]
        store_tokens(cache, tokens)
        cache.reclaimer.shrink_to(0)
        assert written(cache) == reachable(cache, tokens) == len(tokens)


def test_chain_writer_spans_joined_meanwhile_are_written_once(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        tokens = chat(cache, [], MAX_SPANS, turn_tokens=30)
        last = tuple(cache.table.entries)[-1]
        cache.offloader.add_entry(last)
        cache.run_background(0)
        longer = [*tokens, *random_tokens(30, 99)]
        store_tokens(cache, longer)
        while not cache.transcoder.jobs.is_idle:
            cache.run_background(0)
        assert len(cache.table.entries) == MAX_SPANS
        settle(cache)
        assert written(cache) == reachable(cache, tokens) == len(tokens)
        check_all(cache, tokens)


# Unreadable blocks.


def test_block_loader_unreadable_block_is_removed_and_rewritten(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        tokens = random_tokens(300, 0)
        root, ids = root_key(cache.matcher.identity, ""), as_ids(tokens)[:256]
        empty = Block(chain(root, ids), root, root, 0, ids.tobytes(), {}, {"groups": []})
        assert cache.disk.tier.put(empty) == Accepted()
        written(cache)
        loading = begin_load(cache, tokens)
        while not loading.is_done:
            cache.run_background(0)
        cache.prefetcher.end_load(loading)
        assert cache.usage.counters()["unreadable_blocks"] == 1
        assert reachable(cache, tokens) == 0
        write_turns(cache, tokens, [300])
        assert reachable(cache, tokens) == 300
        check_all(cache, tokens)


# Refused writes.


def repeated_refusals(cache: PrefixCache) -> int:
    """Count the refused writes while nothing changes."""
    before = cache.counters["refused_spills"]
    for _ in range(5):
        cache.reclaimer.shrink_to(cache.table.max_bytes)
        settle(cache)
    return cache.counters["refused_spills"] - before


HOT_BYTES = 1000 * TOKEN_BYTES
REFUSALS: list[dict[str, Any]] = [
    {"daily_write_bytes": 1000},
    {"limit_bytes": 200_000},
]


@pytest.mark.parametrize("limits", REFUSALS, ids=lambda limits: next(iter(limits)))
def test_refused_writes_unchanged_entry_is_not_offered_again(limits: dict[str, Any], tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=HOT_BYTES, **limits) as cache:
        write_turns(cache, random_tokens(400, 0), [400])
        write_turns(cache, random_tokens(400, 1), [400])
        cache.reclaimer.shrink_to(HOT_BYTES)
        settle(cache)
        assert cache.counters["refused_spills"] > 0
        assert repeated_refusals(cache) == 0


def test_refused_writes_next_day_renews_write_budget(tmp_path: Path) -> None:
    now = [0.0]
    limits: dict[str, Any] = {"daily_write_bytes": 600 * TOKEN_BYTES, "clock": lambda: now[0]}
    with store_on(tmp_path, hot_bytes=HOT_BYTES, **limits) as cache:
        tokens = [random_tokens(400, seed) for seed in (0, 1)]
        for each in tokens:
            write_turns(cache, each, [400])
        assert sorted(reachable(cache, each) for each in tokens) < [400, 400]
        now[0] += SECONDS_OF_A_DAY
        # A block that is being written may count twice for a moment.
        for _ in range(2):
            cache.reclaimer.shrink_to(HOT_BYTES)
            settle(cache)
            written(cache)
        assert [reachable(cache, each) for each in tokens] == [400, 400]


def test_refused_writes_empty_queue_offers_entry_again(tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=2 * HOT_BYTES, queue_bytes=300 * TOKEN_BYTES) as cache:
        tokens = random_tokens(1600, 0)
        store_tokens(cache, tokens)
        for _ in range(100):
            cache.reclaimer.shrink_to(2 * HOT_BYTES)
            settle(cache)
            if written(cache) == 1600:
                break
        assert written(cache) == 1600


# Clearing.


@pytest.mark.parametrize("tier", ["disk", "all"])
def test_clear_during_write_leaves_no_block(tier: Any, tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        tokens = random_tokens(1500, 0)
        store_tokens(cache, tokens)
        while not cache.transcoder.jobs.is_idle:
            cache.run_background(0)
        cache.offloader.offer_changed()
        for _ in range(3):
            cache.run_background(0)
        cache.evictor.clear(tier=tier)
        settle(cache)
        assert written(cache) == 0
        assert not any(entry.is_archived for entry in cache.table.entries)


# Archived planes.


def test_archive_replaces_blocks_of_fewer_bits(tmp_path: Path) -> None:
    with store_on(tmp_path, name="planes:4") as cache:
        tokens = random_tokens(600, 0)
        write_turns(cache, tokens, [600])
        cache.evictor.clear(tier="hot")
        cache.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw")), plan("raw"))
        store_tokens(cache, tokens)
        settle(cache)
        cache.requantizer.requantize(PrecisionChange(k=parse("planes:4"), v=parse("planes:4")), plan("planes:4"))
        settle(cache)
        assert written(cache) == 600
        up = cache.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw"), dry_run=True), plan("raw"))
        assert up.bytes_after == 600 * TOKEN_BYTES
        restore_all(cache)
        assert cache.counters["restored_spans"] == 1
        assert cache.table.nbytes == 600 * TOKEN_BYTES
        lease = cache.lease(tokens, "")
        check_lease(lease, tokens)
        cache.release(lease)


def restore_all(cache: PrefixCache) -> None:
    cache.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw")), plan("raw"))
    while cache.requantizer.is_running:
        if cache.has_work:
            cache.run_background(0)


def test_restore_of_blocks_with_fewer_bits_changes_nothing(tmp_path: Path) -> None:
    with store_on(tmp_path, name="planes:4") as cache:
        tokens = random_tokens(600, 0)
        write_turns(cache, tokens, [600])
        before = cache.table.nbytes
        up = cache.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw"), dry_run=True), plan("raw"))
        assert up.bytes_after == up.bytes_before == before
        restore_all(cache)
        assert cache.counters["restored_spans"] == 0
        assert cache.table.nbytes == before


def test_restore_of_span_that_begins_inside_block_is_complete(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after_reply") as cache:
        tokens = chat(cache, chat(cache, [], 1, turn_tokens=100), 1, seed=1, turn_tokens=2000)
        cache.release(cache.lease(tokens, ""))
        cache.reclaimer.shrink_to(cache.table.nbytes - 10)
        written(cache)
        load(cache, tokens)
        assert [entry.span.position for entry in cache.table.entries] == [0, 100, 1636]
        cache.requantizer.requantize(PrecisionChange(k=parse("planes:4"), v=parse("planes:4")), plan("planes:4"))
        settle(cache)
        assert cache.table.nbytes < 2100 * TOKEN_BYTES / 2
        restore_all(cache)
        # The end of the span that was cut is inside a block.
        assert [dict(share_of(entry).by_precision).keys() for entry in cache.table.entries][2] == {"raw"}
        lease = cache.lease(tokens, "")
        check_lease(lease, tokens, at_least=4)
        cache.release(lease)


def test_chain_writer_last_use_of_block_is_that_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("tests.prefix_cache.disk.Clock", lambda: clock)
    with store_on(tmp_path, clock=lambda: 1000.0) as cache:
        old, new = random_tokens(100, 1), random_tokens(100, 2)
        store_tokens(cache, old)
        clock.now_s += 50
        store_tokens(cache, new)
        cache.flush(60)
        last_uses = sorted(row.last_use for row in records_of(cache.disk.tier))
    assert last_uses == pytest.approx([950.0, 1000.0], abs=1.0)


# Transcoding before eviction.


def test_eviction_encodes_leaf_and_leaves_its_parent_raw(tmp_path: Path) -> None:
    with store_on(tmp_path) as cache:
        tokens = random_tokens(512, 0)
        for end in (256, 512):
            store_tokens(cache, tokens[:end])
        settle(cache)
        above, leaf = cache.table.entries
        cache.requantizer.requantize(PrecisionChange(k=parse("planes:8"), v=parse("planes:8")), plan("planes:8"))
        cache.reclaimer.shrink_to(cache.table.nbytes, hard_limit_bytes=cache.table.nbytes - 1)
        assert tuple(cache.table.entries) == (above,)
        assert not leaf.nodes
        assert cache.counters["encoded_spans"] == 1
        assert {k.name for layer in above.span.layers for k, _ in above.span.codec_pairs(layer)} == {"raw"}


# Short sequences stay raw until a longer one resumes from them.

SHORT = 100
IN_8_BITS: dict[str, Any] = {"name": "planes:8", "min_quantize_tokens": 256}


def write_unused(cache: PrefixCache) -> None:
    settle(cache)
    cache.offloader.offer_changed()
    settle(cache)
    written(cache)


def precisions_on_disk(cache: PrefixCache) -> set[str]:
    usage = cache.usage.disk_usage()
    assert usage is not None
    return set(usage.by_precision)


def test_chain_writer_raw_blocks_of_grown_sequence_are_replaced(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as cache:
        store_tokens(cache, tokens[:SHORT])
        write_unused(cache)
        assert precisions_on_disk(cache) == {"raw"}
        store_tokens(cache, tokens)
        write_unused(cache)
        assert precisions_on_disk(cache) == {"planes:8"}
        assert written(cache) == reachable(cache, tokens) == len(tokens)
        check_all(cache, tokens)


def test_chain_writer_raw_blocks_are_replaced_after_restart(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as cache:
        store_tokens(cache, tokens[:SHORT])
        write_unused(cache)
    with store_on(tmp_path, **IN_8_BITS) as cache:
        load(cache, tokens)
        assert store_tokens(cache, tokens) == SHORT
        write_unused(cache)
        assert precisions_on_disk(cache) == {"planes:8"}
        assert reachable(cache, tokens) == len(tokens)


def test_chain_writer_raw_blocks_are_replaced_after_last_lease(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as cache:
        store_tokens(cache, tokens[:SHORT])
        reader = cache.lease(tokens[:SHORT], "")
        store_tokens(cache, tokens)
        write_unused(cache)
        assert "raw" in precisions_on_disk(cache)
        cache.release(reader)
        write_unused(cache)
        assert precisions_on_disk(cache) == {"planes:8"}


def test_eviction_encodes_short_prefix_before_writing_it(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as cache:
        store_tokens(cache, tokens[:SHORT])
        settle(cache)
        store_tokens(cache, tokens)  # its background work has not begun
        cache.reclaimer.shrink_to(0, 60.0, hard_limit_bytes=0)
        assert written(cache) == len(tokens)
        assert precisions_on_disk(cache) == {"planes:8"}


def test_chain_writer_raw_blocks_written_after_reply_are_replaced(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, disk_write="after_reply", **IN_8_BITS) as cache:
        for end in (SHORT, 2 * SHORT, len(tokens)):
            store_tokens(cache, tokens[:end])
            settle(cache)
            assert written(cache) == reachable(cache, tokens) == end
            assert precisions_on_disk(cache) == ({"planes:8"} if end >= 256 else {"raw"})
