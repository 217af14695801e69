"""Offload: entries written while spans are joined, evicted and stepped down, and entries that the disk refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.layers.kinds import Layout
from kvstrata.prefix_cache.keys import as_ids, chain, root_key
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.prefix_cache.transcode import MAX_SPANS
from kvstrata.prefix_cache.usage import share_of
from kvstrata.spans.plan import Plan, make_plan
from kvstrata.tier.base import Accepted
from kvstrata.tier.block import Block
from kvstrata.tier.daily_budget import SECONDS_OF_A_DAY
from tests.disk.blocks import rows_of
from tests.prefix_cache.disk import begin_load, chat, load, random_tokens, reachable, store_on, write_turns, written
from tests.prefix_cache.kv import HYBRID, LAYOUT, TOKEN_BYTES, Clock, Run, check_lease, settle, store_tokens

LAYOUTS = [pytest.param(LAYOUT, id="full"), pytest.param(HYBRID, id="hybrid")]


def plan(name: str) -> Plan:
    return make_plan(LAYOUT, parse(name), parse(name))


def unsettled_chat(stock: Stock, num_turns: int) -> list[int]:
    """Compute a chat of which the last turn has not been processed in the background."""
    tokens = chat(stock, [], num_turns - 2)
    tokens = [*chat(stock, tokens, 1, seed=1, turn_tokens=20), *random_tokens(20, 2)]
    store_tokens(stock, tokens)
    return tokens


def check_all(stock: Stock, tokens: list[int]) -> None:
    """Check that a load from the disk brings back all tokens unchanged."""
    stock.evictor.clear(tier="hot")
    load(stock, tokens)
    lease = stock.store.lease(tokens, "")
    assert lease.num_tokens == len(tokens)
    check_lease(lease, tokens)
    stock.store.release(lease)


# Joins.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_turns", [MAX_SPANS, MAX_SPANS + 1])
def test_eviction_of_joined_spans_writes_them(layout: Layout, num_turns: int, tmp_path: Path) -> None:
    with store_on(tmp_path, layout) as stock:
        tokens = unsettled_chat(stock, num_turns)
        stock.reclaimer.shrink_to(stock.table.nbytes, 0.0, most_bytes=stock.table.nbytes - 1)
        assert stock.usage.count()["evicted_tokens"] == 20
        assert written(stock) == reachable(stock, tokens) == len(tokens)


@pytest.mark.parametrize("num_turns", [MAX_SPANS, MAX_SPANS + 1, MAX_SPANS + 2])
def test_flush_writes_spans_that_it_joins(num_turns: int, tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        tokens = unsettled_chat(stock, num_turns)
        stock.flush(60)
        assert written(stock) == reachable(stock, tokens) == len(tokens)
        assert all(entry.is_archived for entry in stock.table.entries)


def test_eviction_of_leaf_writes_its_parent_first(tmp_path: Path) -> None:
    """Both spans are still in the KV buffers of their owners."""
    with store_on(tmp_path) as stock:
        tokens = random_tokens(600, 0)
        first = Run(stock, tokens[:300])
        first.compute(300)
        first.seal()
        store_tokens(stock, tokens)
        first.end()
        stock.reclaimer.shrink_to(stock.table.nbytes, 0.0, most_bytes=stock.table.nbytes - 1)
        assert 0 < stock.store.lookup(tokens, "").num_tokens < 600
        assert written(stock) == reachable(stock, tokens) == 600


def test_offloader_entry_grown_since_job_began_is_written_whole(tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        tokens = chat(stock, [], MAX_SPANS)
        stock.offloader.offer_changed()
        stock.background.run_background(0)
        tokens = [*tokens, *random_tokens(20, 99)]
        store_tokens(stock, tokens)
        stock.reclaimer.shrink_to(0)
        assert written(stock) == reachable(stock, tokens) == len(tokens)


def test_chain_writer_spans_joined_meanwhile_are_written_once(tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        tokens = chat(stock, [], MAX_SPANS, turn_tokens=30)
        last = tuple(stock.table.entries)[-1]
        stock.offloader.add_entry(last)
        stock.background.run_background(0)
        longer = [*tokens, *random_tokens(30, 99)]
        store_tokens(stock, longer)
        while not stock.transcoder.jobs.idle:
            stock.background.run_background(0)
        assert len(stock.table.entries) == MAX_SPANS
        settle(stock)
        assert written(stock) == reachable(stock, tokens) == len(tokens)
        check_all(stock, tokens)


# Unreadable blocks.


def test_block_loader_unreadable_block_is_removed_and_rewritten(tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        tokens = random_tokens(300, 0)
        root, ids = root_key(stock.matcher.identity, ""), as_ids(tokens)[:256]
        empty = Block(chain(root, ids), root, root, 0, ids.tobytes(), {}, {"groups": []})
        assert stock.disk.tier.put(empty) == Accepted()
        written(stock)
        loading = begin_load(stock, tokens)
        while not loading.is_done:
            stock.background.run_background(0)
        stock.prefetcher.abandon(loading)
        assert stock.usage.count()["unreadable_blocks"] == 1
        assert reachable(stock, tokens) == 0
        write_turns(stock, tokens, [300])
        assert reachable(stock, tokens) == 300
        check_all(stock, tokens)


# Refused writes.


def repeated_refusals(stock: Stock) -> int:
    """Count the refused writes while nothing changes."""
    before = stock.counters["refused_spills"]
    for _ in range(5):
        stock.reclaimer.shrink_to(stock.table.max_bytes)
        settle(stock)
    return stock.counters["refused_spills"] - before


HOT_BYTES = 1000 * TOKEN_BYTES
REFUSALS: list[dict[str, Any]] = [
    {"daily_write_bytes": 1000},
    {"second_touch": True},
    {"limit_bytes": 200_000},
]


@pytest.mark.parametrize("limits", REFUSALS, ids=lambda limits: next(iter(limits)))
def test_refused_writes_unchanged_entry_is_not_offered_again(limits: dict[str, Any], tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=HOT_BYTES, **limits) as stock:
        write_turns(stock, random_tokens(400, 0), [400])
        write_turns(stock, random_tokens(400, 1), [400])
        stock.reclaimer.shrink_to(HOT_BYTES)
        settle(stock)
        assert stock.counters["refused_spills"] > 0
        assert repeated_refusals(stock) == 0


def test_refused_writes_next_day_renews_write_budget(tmp_path: Path) -> None:
    now = [0.0]
    limits: dict[str, Any] = {"daily_write_bytes": 600 * TOKEN_BYTES, "clock": lambda: now[0]}
    with store_on(tmp_path, hot_bytes=HOT_BYTES, **limits) as stock:
        tokens = [random_tokens(400, seed) for seed in (0, 1)]
        for each in tokens:
            write_turns(stock, each, [400])
        assert sorted(reachable(stock, each) for each in tokens) < [400, 400]
        now[0] += SECONDS_OF_A_DAY
        # A block that is being written may count twice for a moment.
        for _ in range(2):
            stock.reclaimer.shrink_to(HOT_BYTES)
            settle(stock)
            written(stock)
        assert [reachable(stock, each) for each in tokens] == [400, 400]


def test_refused_writes_second_use_offers_entry_again(tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=HOT_BYTES, second_touch=True) as stock:
        tokens = random_tokens(800, 0)
        write_turns(stock, tokens, [800])
        assert written(stock) == 0
        stock.store.release(stock.store.lease(tokens, ""))
        stock.reclaimer.shrink_to(HOT_BYTES)
        settle(stock)
        assert written(stock) == 800


def test_refused_writes_empty_queue_offers_entry_again(tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=2 * HOT_BYTES, queue_bytes=300 * TOKEN_BYTES) as stock:
        tokens = random_tokens(1600, 0)
        store_tokens(stock, tokens)
        for _ in range(100):
            stock.reclaimer.shrink_to(2 * HOT_BYTES)
            settle(stock)
            if written(stock) == 1600:
                break
        assert written(stock) == 1600


# Clearing.


@pytest.mark.parametrize("tier", ["disk", "all"])
def test_clear_during_write_leaves_no_block(tier: Any, tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        tokens = random_tokens(1500, 0)
        store_tokens(stock, tokens)
        while not stock.transcoder.jobs.idle:
            stock.background.run_background(0)
        stock.offloader.offer_changed()
        for _ in range(3):
            stock.background.run_background(0)
        stock.evictor.clear(tier=tier)
        settle(stock)
        assert written(stock) == 0
        assert not any(entry.is_archived for entry in stock.table.entries)


# Archived planes.


def test_archive_replaces_blocks_of_fewer_bits(tmp_path: Path) -> None:
    with store_on(tmp_path, name="planes:4") as stock:
        tokens = random_tokens(600, 0)
        write_turns(stock, tokens, [600])
        stock.evictor.clear(tier="hot")
        stock.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw")), plan("raw"))
        store_tokens(stock, tokens)
        settle(stock)
        stock.requantizer.requantize(PrecisionChange(k=parse("planes:4"), v=parse("planes:4")), plan("planes:4"))
        settle(stock)
        assert written(stock) == 600
        up = stock.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw"), dry_run=True), plan("raw"))
        assert up.bytes_after == 600 * TOKEN_BYTES
        restore_all(stock)
        assert stock.counters["restored_spans"] == 1
        assert stock.table.nbytes == 600 * TOKEN_BYTES
        lease = stock.store.lease(tokens, "")
        check_lease(lease, tokens)
        stock.store.release(lease)


def restore_all(stock: Stock) -> None:
    stock.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw")), plan("raw"))
    while stock.requantizer.is_running:
        if stock.background.has_work:
            stock.background.run_background(0)


def test_restore_of_blocks_with_fewer_bits_changes_nothing(tmp_path: Path) -> None:
    with store_on(tmp_path, name="planes:4") as stock:
        tokens = random_tokens(600, 0)
        write_turns(stock, tokens, [600])
        before = stock.table.nbytes
        up = stock.requantizer.requantize(PrecisionChange(k=parse("raw"), v=parse("raw"), dry_run=True), plan("raw"))
        assert up.bytes_after == up.bytes_before == before
        restore_all(stock)
        assert stock.counters["restored_spans"] == 0
        assert stock.table.nbytes == before


def test_restore_of_span_that_begins_inside_block_is_complete(tmp_path: Path) -> None:
    with store_on(tmp_path, disk_write="after-reply") as stock:
        tokens = chat(stock, chat(stock, [], 1, turn_tokens=100), 1, seed=1, turn_tokens=2000)
        stock.store.release(stock.store.lease(tokens, ""))
        stock.reclaimer.shrink_to(stock.table.nbytes - 10)
        written(stock)
        load(stock, tokens)
        assert [entry.span.position for entry in stock.table.entries] == [0, 100, 1636]
        stock.requantizer.requantize(PrecisionChange(k=parse("planes:4"), v=parse("planes:4")), plan("planes:4"))
        settle(stock)
        assert stock.table.nbytes < 2100 * TOKEN_BYTES / 2
        restore_all(stock)
        # The end of the span that was cut is inside a block.
        assert [dict(share_of(entry).by_precision).keys() for entry in stock.table.entries][2] == {"raw"}
        lease = stock.store.lease(tokens, "")
        check_lease(lease, tokens, at_least=4)
        stock.store.release(lease)


def test_chain_writer_last_use_of_block_is_that_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("tests.prefix_cache.disk.Clock", lambda: clock)
    with store_on(tmp_path, clock=lambda: 1000.0) as stock:
        old, new = random_tokens(100, 1), random_tokens(100, 2)
        store_tokens(stock, old)
        clock.now_s += 50
        store_tokens(stock, new)
        stock.flush(60)
        last_uses = sorted(row.last_use for row in rows_of(stock.disk.tier))
    assert last_uses == pytest.approx([950.0, 1000.0], abs=1.0)


# Transcoding before eviction.


def test_eviction_encodes_leaf_and_leaves_its_parent_raw(tmp_path: Path) -> None:
    with store_on(tmp_path) as stock:
        tokens = random_tokens(512, 0)
        for end in (256, 512):
            store_tokens(stock, tokens[:end])
        settle(stock)
        above, leaf = stock.table.entries
        stock.requantizer.requantize(PrecisionChange(k=parse("planes:8"), v=parse("planes:8")), plan("planes:8"))
        stock.reclaimer.shrink_to(stock.table.nbytes, most_bytes=stock.table.nbytes - 1)
        assert tuple(stock.table.entries) == (above,)
        assert not leaf.nodes
        assert stock.counters["encoded_spans"] == 1
        assert {k.name for layer in above.span.layers for k, _ in above.span.pairs(layer)} == {"raw"}


# Short sequences stay raw until a longer one resumes from them.

SHORT = 100
IN_8_BITS: dict[str, Any] = {"name": "planes:8", "min_quantize_tokens": 256}


def write_unused(stock: Stock) -> None:
    settle(stock)
    stock.offloader.offer_changed()
    settle(stock)
    written(stock)


def precisions_on_disk(stock: Stock) -> set[str]:
    usage = stock.usage.disk_usage()
    assert usage is not None
    return set(usage.by_precision)


def test_chain_writer_raw_blocks_of_grown_sequence_are_replaced(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as stock:
        store_tokens(stock, tokens[:SHORT])
        write_unused(stock)
        assert precisions_on_disk(stock) == {"raw"}
        store_tokens(stock, tokens)
        write_unused(stock)
        assert precisions_on_disk(stock) == {"planes:8"}
        assert written(stock) == reachable(stock, tokens) == len(tokens)
        check_all(stock, tokens)


def test_chain_writer_raw_blocks_are_replaced_after_restart(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as stock:
        store_tokens(stock, tokens[:SHORT])
        write_unused(stock)
    with store_on(tmp_path, **IN_8_BITS) as stock:
        load(stock, tokens)
        assert store_tokens(stock, tokens) == SHORT
        write_unused(stock)
        assert precisions_on_disk(stock) == {"planes:8"}
        assert reachable(stock, tokens) == len(tokens)


def test_chain_writer_raw_blocks_are_replaced_after_last_lease(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as stock:
        store_tokens(stock, tokens[:SHORT])
        reader = stock.store.lease(tokens[:SHORT], "")
        store_tokens(stock, tokens)
        write_unused(stock)
        assert "raw" in precisions_on_disk(stock)
        stock.store.release(reader)
        write_unused(stock)
        assert precisions_on_disk(stock) == {"planes:8"}


def test_eviction_encodes_short_prefix_before_writing_it(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, **IN_8_BITS) as stock:
        store_tokens(stock, tokens[:SHORT])
        settle(stock)
        store_tokens(stock, tokens)  # its background work has not begun
        stock.reclaimer.shrink_to(0, 60.0, most_bytes=0)
        assert written(stock) == len(tokens)
        assert precisions_on_disk(stock) == {"planes:8"}


def test_chain_writer_raw_blocks_written_after_reply_are_replaced(tmp_path: Path) -> None:
    tokens = random_tokens(400, 0)
    with store_on(tmp_path, disk_write="after-reply", **IN_8_BITS) as stock:
        for end in (SHORT, 2 * SHORT, len(tokens)):
            store_tokens(stock, tokens[:end])
            settle(stock)
            assert written(stock) == reachable(stock, tokens) == end
            assert precisions_on_disk(stock) == ({"planes:8"} if end >= 256 else {"raw"})
