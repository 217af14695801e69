"""The limit in allocated bytes, eviction, TTL, refusals, the write budget, and the reserve of the volume."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from kvstrata.tiers.block import BASE, Block
from kvstrata.tiers.disk.errors import DropReason
from kvstrata.tiers.disk.index import BlockRecord
from kvstrata.tiers.interface import Accepted, Refusal, Refused, WriteState
from kvstrata.tiers.write_limits import DailyWriteBudget
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import (
    ROOT,
    block_files,
    is_same,
    make_block,
    make_chain,
    open_tier,
    put_all,
    read_now,
    real_bytes,
    records_of,
)
from tests.tiers.disk.faults import FaultyFiles

MIB = 1 << 20


def test_limit_holds_at_every_moment_under_ten_times_its_size(tmp_path: Path) -> None:
    """Another thread measures the folder all the time."""
    directory = tmp_path / "cache"
    limit_bytes = 2 * MIB
    tier = open_tier(directory, limit_bytes, queue_bytes=64 * MIB)
    largest = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not stop.is_set():
            largest = max(largest, real_bytes(directory))

    watcher = threading.Thread(target=watch)
    watcher.start()
    offered_bytes = 0
    for seed in range(45):
        for block in make_chain(4, seed=seed, num_values=12_000):
            assert tier.put(block) == Accepted()
            offered_bytes += block.nbytes
    assert tier.flush(60).is_empty
    stop.set()
    watcher.join()
    assert offered_bytes > 10 * limit_bytes
    assert 0.7 * limit_bytes < largest <= limit_bytes
    usage = tier.usage()
    assert usage.disk_bytes == real_bytes(directory) <= limit_bytes
    assert usage.counters["written"] == {BASE: 180}
    assert usage.counters["evicted"]["limit"] == 180 - usage.num_blocks
    assert_chains_are_whole(records_of(tier))
    tier.close()


def assert_chains_are_whole(rows: list[BlockRecord]) -> None:
    keys = {row.id.key for row in rows}
    assert all(row.parent == row.root or row.parent in keys for row in rows)


def test_limit_evicts_least_recently_used_chains_first(tmp_path: Path) -> None:
    now = [1000.0]
    tier = open_tier(tmp_path / "cache", 2_400_000, clock=lambda: now[0])
    chains = [make_chain(3, seed=seed, num_values=12_000) for seed in range(4)]
    for chain in chains:
        put_all(tier, chain)
        now[0] += 10
    for block in chains[0]:
        assert is_same(read_now(tier, block.id, root=ROOT), block)
    now[0] += 10
    for chain in [make_chain(3, seed=seed, num_values=12_000) for seed in (10, 11)]:
        for block in chain:
            tier.put(block)
    assert tier.flush(10).is_empty
    left = [sum(tier.blocks.find(block.key) > 0 for block in chain) for chain in chains]
    assert left[0] == 3
    assert left[1] <= left[2] <= left[3]
    assert left[1] < 3
    assert_chains_are_whole(records_of(tier))
    tier.close()


def test_limit_keeps_pinned_blocks_and_their_ancestors(tmp_path: Path) -> None:
    pinned = make_chain(3, num_values=12_000)
    tier = open_tier(tmp_path / "cache", 2 * MIB, is_pinned=lambda key: key == pinned[2].key)
    for seed in range(1, 20):
        for block in pinned if seed == 1 else make_chain(2, seed=seed, num_values=12_000):
            tier.put(block)
    assert tier.flush(20).is_empty
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in pinned)
    assert tier.usage().counters["evicted"]["limit"] > 10
    tier.close()


def test_limit_chain_longer_than_the_disk_keeps_its_prefix(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache", 2 * MIB)
    blocks = make_chain(40, num_values=12_000)
    put_all(tier, blocks)
    found = [bool(tier.blocks.find(block.key)) for block in blocks]
    num_found = sum(found)
    assert found == [True] * num_found + [False] * (40 - num_found)
    assert num_found > 8
    assert tier.usage().counters["dropped"] == {DropReason.NO_ROOM: 40 - num_found}
    tier.close()


def test_limit_descendants_of_a_dropped_block_evict_none_of_their_chain(tmp_path: Path) -> None:
    """A flush after each block lets descendants arrive long after the drop."""
    tier = open_tier(tmp_path / "cache", 2 * MIB)
    blocks = make_chain(24, num_values=12_000)
    for block in blocks:
        tier.put(block)
        assert tier.flush(20).is_empty
    usage = tier.usage()
    assert usage.counters["evicted"] == {}
    assert usage.counters["dropped"] == {DropReason.NO_ROOM: 24 - usage.num_blocks}
    found = [bool(tier.blocks.find(block.key)) for block in blocks]
    assert found == [True] * usage.num_blocks + [False] * (24 - usage.num_blocks)
    assert 8 < usage.num_blocks < 22
    tier.close()


def test_ttl_evicts_unused_entries_at_the_next_start(tmp_path: Path) -> None:
    now = [1000.0]
    pinned = make_chain(2, seed=3)
    settings: dict[str, Any] = {"clock": lambda: now[0], "ttl_s": 60.0}
    tier = open_tier(tmp_path / "cache", **settings)
    old, used, new = make_chain(3, seed=1), make_chain(3, seed=2), make_chain(2, seed=4)
    for block in (*old, *used, *pinned):
        tier.put(block)
    assert tier.flush(10).is_empty
    now[0] += 40
    tier.touch(block.id for block in used[:2])
    put_all(tier, new)
    assert tier.usage().num_blocks == 10
    tier.close()
    now[0] += 30
    tier = open_tier(tmp_path / "cache", is_pinned=pinned[-1].key.__eq__, **settings)
    assert tier.flush(10).is_empty
    assert {row.id for row in records_of(tier)} == {block.id for block in (*used[:2], *new, *pinned)}
    assert tier.usage().counters["evicted"] == {"expired": 4}
    assert_chains_are_whole(records_of(tier))
    tier.close()


def test_ttl_counts_from_the_last_use(tmp_path: Path) -> None:
    now = [1000.0]
    tier = open_tier(tmp_path / "cache", ttl_s=60.0, clock=lambda: now[0])
    old, new = make_block(1), make_block(2)
    tier.put(old, unused_s=50.0)
    tier.put(new)
    assert tier.flush(10).is_empty
    assert {row.id: (row.last_use, row.created) for row in records_of(tier)} == {
        old.id: (950.0, 1000.0),
        new.id: (1000.0, 1000.0),
    }
    tier.close()
    now[0] += 10
    tier = open_tier(tmp_path / "cache", ttl_s=60.0, clock=lambda: now[0])
    assert tier.flush(10).is_empty
    assert [row.id for row in records_of(tier)] == [new.id]
    tier.close()


def test_ttl_ending_before_the_planned_wait_evicts_in_time(tmp_path: Path) -> None:
    """The writer planned a longer wait before the block came."""
    tier = open_tier(tmp_path / "cache", ttl_s=3600.0)
    assert tier.flush(10).is_empty
    tier.put(make_block(1), unused_s=3599.9)
    tier.put(make_block(2))
    eventually(lambda: [row.id for row in records_of(tier)] == [make_block(2).id])
    assert tier.usage().counters["evicted"] == {"expired": 1}
    tier.close()


def test_ttl_evicts_unused_entries_of_an_idle_tier(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache", ttl_s=0.01)
    for block in make_chain(3):
        tier.put(block)
    tier.flush(10)
    eventually(lambda: not tier.usage().num_blocks)
    assert not block_files(tmp_path / "cache")
    tier.close()


def test_limit_evicts_checkpoint_parts_before_their_base(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache", 2 * MIB)
    bases = make_chain(4, num_values=6_000)
    parts = [
        Block(base.key, base.parent, ROOT, base.start, base.token_ids, base.tensors, {}, part="mark") for base in bases
    ]
    for block in [*bases, *parts]:
        tier.put(block)
    assert tier.flush(10).is_empty
    for seed in range(1, 40):
        tier.put(make_block(seed, num_values=6_000))
        tier.flush(10)
        for base in bases:
            assert tier.blocks.find(base.key) or not tier.blocks.find(base.key, "mark")
    assert not tier.blocks.find(bases[0].key)
    tier.close()


def test_put_block_above_the_limit_is_refused_or_dropped(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "cache", 200_000)
    assert tier.put(make_block(num_values=100_000)) == Refused(Refusal.TOO_LARGE)
    tier.put(make_block(num_values=100))
    assert tier.flush(5).is_empty
    assert tier.usage().counters["dropped"] == {DropReason.NO_ROOM: 1}
    assert tier.usage().disk_bytes <= 200_000
    tier.close()


def test_limit_lowered_holds_from_the_start(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    tier = open_tier(directory, 64 * MIB)
    for seed in range(20):
        for block in make_chain(4, seed=seed, num_values=12_000):
            tier.put(block)
    assert tier.flush(20).is_empty
    assert tier.usage().disk_bytes > 8 * MIB
    tier.close()
    tier = open_tier(directory, 4 * MIB, files=FaultyFiles(free=MIB), reserve_bytes=64 * MIB)
    assert tier.flush(20).is_empty
    assert 3 * MIB < tier.usage().disk_bytes == real_bytes(directory) <= 4 * MIB
    assert_chains_are_whole(records_of(tier))
    assert set(tier.usage().counters["evicted"]) == {"limit"}
    tier.put(make_block(1000))
    assert tier.flush(10).is_empty
    assert tier.usage().counters["dropped"] == {DropReason.RESERVE: 1}
    tier.close()


def test_limit_is_enforced_before_the_reserve_is_checked(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    tier = open_tier(directory, 3 * MIB, files=FaultyFiles(free=MIB), reserve_bytes=64 * MIB)
    assert tier.flush(10).is_empty
    tier.close()
    other = open_tier(tmp_path / "other")
    for seed in range(40):
        other.put(make_block(seed, num_values=12_000))
    assert other.flush(20).is_empty
    other.close()
    # Placed there while the tier ran, and found by the scan after a folder vanished.
    tier = open_tier(directory, 3 * MIB, files=FaultyFiles(free=MIB), reserve_bytes=64 * MIB)
    assert tier.flush(10).is_empty
    shutil.rmtree(directory / "blocks")
    shutil.copytree(tmp_path / "other" / "blocks", directory / "blocks")
    shutil.rmtree(directory / "tmp")
    tier.put(make_block(1000))
    assert tier.flush(10).is_empty
    assert tier.usage().counters["dropped"] == {DropReason.RESERVE: 1}
    assert 2 * MIB < tier.usage().disk_bytes == real_bytes(directory) <= 3 * MIB
    tier.close()


def test_reserve_replaces_blocks_near_it_and_drops_them_below_it(tmp_path: Path) -> None:
    files = FaultyFiles(free=100 * MIB)
    tier = open_tier(tmp_path / "cache", 50 * MIB, files=files, reserve_bytes=90 * MIB)
    blocks = make_chain(4, num_values=12_000)
    for block in blocks[:3]:
        tier.put(block)
    assert tier.flush(10).is_empty
    assert tier.usage().num_blocks == 3
    # Slightly above the reserve: new blocks replace old ones.
    files.free = 90 * MIB + 300_000
    tier.put(make_block(50, num_values=12_000))
    assert tier.flush(10).is_empty
    assert tier.usage().counters["evicted"]["reserve"] >= 1
    # Below the reserve: nothing is written, and nothing is evicted in vain.
    files.free = 80 * MIB
    num_blocks = tier.usage().num_blocks
    tier.put(make_block(51, num_values=12_000))
    assert tier.flush(10).is_empty
    assert tier.usage().counters["dropped"] == {DropReason.RESERVE: 1}
    assert tier.usage().num_blocks == num_blocks
    tier.close()


def test_daily_budget_survives_a_restart_and_ends_at_midnight(tmp_path: Path) -> None:
    now = [86_400.0 * 5 + 100]
    settings = {"daily_write_bytes": 60_000, "clock": lambda: now[0]}
    tier = open_tier(tmp_path / "cache", **settings)
    blocks = make_chain(40)
    answers = [tier.put(block) for block in blocks]
    assert Refused(Refusal.WRITE_BUDGET) not in answers[:10]
    assert tier.flush(10).is_empty
    while tier.put(blocks[-1]) == Accepted():
        blocks.append(make_block(1000 + len(blocks)))
        assert tier.flush(10).is_empty
    assert tier.usage().written_today_bytes > 40_000
    written = tier.usage().written_today_bytes
    tier.close()
    tier = open_tier(tmp_path / "cache", **settings)
    assert tier.usage().written_today_bytes == written
    fresh = make_block(5000, num_values=3000)
    assert tier.put(fresh) == Refused(Refusal.WRITE_BUDGET)
    now[0] += 86_400
    assert tier.put(fresh) == Accepted()
    assert tier.usage().counters["refused"] == {"write_budget": 1}
    tier.close()


def test_daily_budget_bounds_written_bytes_of_files(tmp_path: Path) -> None:
    """Files are larger than the tensors by which `put` accepts blocks."""
    now = [86_400.0 * 5]
    tier = open_tier(tmp_path / "cache", daily_write_bytes=60_000, clock=lambda: now[0])
    blocks = make_chain(40)
    assert all(tier.put(block) == Accepted() for block in blocks)
    assert tier.flush(10).is_empty
    usage = tier.usage()
    assert 50_000 < usage.written_bytes == usage.written_today_bytes <= 60_000
    num_written = usage.counters["written"][BASE]
    assert usage.counters["dropped"] == {DropReason.WRITE_BUDGET: 40 - num_written}
    found = [bool(tier.blocks.find(block.key)) for block in blocks]
    assert found == [True] * num_written + [False] * (40 - num_written)
    assert tier.put(make_block(1000, num_tokens=1, num_values=1)) == Refused(Refusal.WRITE_BUDGET)
    now[0] += 86_400
    assert tier.put(blocks[num_written]) == Accepted()
    assert tier.flush(10).is_empty
    assert tier.blocks.find(blocks[num_written].key)
    tier.close()


def test_daily_budget_returned_bytes_do_not_count() -> None:
    budget = DailyWriteBudget(100)
    for _ in range(10):
        assert budget.take(60, now=0)
        budget.give_back(60, now=0)
    assert budget.take(60, now=0)
    budget.give_back(60, now=86_401)  # of the previous day
    assert budget.written_bytes(now=86_401) == 0


def test_daily_budget_counts_queued_bytes() -> None:
    budget = DailyWriteBudget(100)

    def allows(nbytes: int, queued_bytes: int, now: float) -> bool:
        writing = WriteState(queue_bytes=queued_bytes, budget_bytes=budget.left_bytes(now))
        return writing.would_take(Refused(Refusal.WRITE_BUDGET, nbytes))

    assert allows(50, 50, now=0)
    assert not allows(50, 51, now=0)
    assert budget.take(30, now=10)
    assert not allows(50, 50, now=20)
    assert allows(50, 50, now=86_401)
    budget = DailyWriteBudget(0)
    assert allows(10**12, 0, now=0)
