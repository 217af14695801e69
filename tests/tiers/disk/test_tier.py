"""Put, find and read blocks: in the queue, on the disk, after a restart."""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.errors import CacheDirectoryBusy, ConfigError
from kvstrata.tiers.block import ITEM_BYTES, Block, BlockId
from kvstrata.tiers.block_file import Damage
from kvstrata.tiers.disk.errors import DropReason
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Accepted, Refusal, Refused
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock, MissReason
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import (
    OTHER_ROOT,
    ROOT,
    block_files,
    is_same,
    make_block,
    make_chain,
    open_tier,
    put_all,
    random_tensor,
    read_now,
    real_bytes,
    write_blocks,
)
from tests.tiers.disk.faults import FaultyFiles, wait_for


def test_read_written_blocks_returns_them_from_the_disk(tier: DiskTier) -> None:
    blocks = make_chain(5)
    put_all(tier, blocks)
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks)
    assert tier.usage().counters["read"] == {"disk": 5}
    assert tier.usage().num_blocks == 5
    assert tier.usage().num_tokens == 20


def test_read_every_dtype_after_restart_returns_the_same_bytes(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    plain = make_block()
    tensors = {dtype: random_tensor(generator, dtype, (2, 3, 7)) for dtype in ITEM_BYTES}
    block = Block(plain.key, ROOT, ROOT, 0, plain.token_ids, tensors, {"kinds": ["full", "window", "recurrent"]})
    write_blocks(tmp_path / "cache", [block])
    tier = open_tier(tmp_path / "cache")
    assert is_same(read_now(tier, block.id, root=ROOT), block)
    tier.close()


def match(tier: DiskTier, token_ids: np.ndarray, chain) -> int:
    """Return the length of the longest match, as the prefix cache finds it: the tier returns no token ids."""
    key, position = ROOT, 0
    while True:
        for length in tier.blocks.lengths(key):
            piece = token_ids[position : position + length]
            if len(piece) == length and tier.blocks.find(chain(key, piece)):
                key, position = chain(key, piece), position + length
                break
        else:
            return position


def test_lengths_and_find_match_a_prompt_up_to_the_changed_token(tmp_path: Path) -> None:
    from kvstrata.prefix_cache.keys import chain

    tier = open_tier(tmp_path / "cache")
    blocks = make_chain(6)
    longer = make_block(99, parent=blocks[2].key, start=12, num_tokens=7)
    put_all(tier, [*blocks, longer])
    assert tier.blocks.lengths(blocks[2].key) == (7, 4)
    assert tier.blocks.lengths(blocks[5].key) == ()
    ids = np.concatenate([np.frombuffer(block.token_ids, "<i4") for block in blocks])
    assert match(tier, ids, chain) == 24
    ids[13] += 1
    assert match(tier, ids, chain) == 12
    tier.close()
    tier = open_tier(tmp_path / "cache")
    assert match(tier, ids, chain) == 12
    tier.close()


def test_remove_checkpoint_part_keeps_the_base(tier: DiskTier) -> None:
    base = make_block()
    mark = Block(base.key, ROOT, ROOT, 0, base.token_ids, {"k.low": base.tensors["k.high"]}, {}, part="mark")
    put_all(tier, [base, mark])
    assert tier.blocks.find(base.key)
    assert tier.blocks.find(base.key, "mark")
    assert is_same(read_now(tier, mark.id, root=ROOT), mark)
    assert tier.usage().num_blocks == 1
    assert tier.usage().num_tokens == base.num_tokens
    assert tier.remove([mark.id]).disk_bytes > 0
    assert not tier.blocks.find(base.key, "mark")
    assert is_same(read_now(tier, base.id, root=ROOT), base)
    assert tier.blocks.lengths(ROOT) == (base.num_tokens,)


class HeldTier:
    """A tier whose disk hangs in `sync` until `go_on` is set."""

    def __init__(self, directory: Path, **settings) -> None:
        self.go_on = threading.Event()
        self.is_writing = threading.Event()
        self.files = FaultyFiles(before={"sync": self._wait})
        self.tier = open_tier(directory, files=self.files, **settings)

    def _wait(self) -> None:
        self.is_writing.set()
        wait_for(self.go_on)()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldTier]:
    held = HeldTier(tmp_path / "cache", queue_bytes=4000)
    yield held
    held.go_on.set()
    held.tier.close()


def test_read_queued_blocks_returns_them_before_they_are_written(held: HeldTier) -> None:
    blocks = make_chain(3)
    for block in blocks:
        assert held.tier.put(block) == Accepted()
    assert all(held.tier.blocks.find(block.key) for block in blocks)
    assert held.tier.blocks.lengths(blocks[0].key) == (4,)
    assert all(is_same(read_now(held.tier, block.id, root=ROOT), block) for block in blocks)
    assert read_now(held.tier, blocks[0].id, root=OTHER_ROOT) == MissingBlock(blocks[0].id, Damage.ROOT)
    results: list[LoadedBlock | MissingBlock] = []
    assert held.tier.read([block.id for block in blocks], results.append, root=ROOT).wait(5)
    assert [result.id for result in results] == [block.id for block in blocks]
    assert held.tier.usage().counters["read"] == {"queue": 6}
    assert held.tier.usage().queue_bytes == sum(block.nbytes for block in blocks)
    assert held.tier.usage().counters["written"] == {}
    held.go_on.set()
    assert held.tier.flush(10).is_empty
    assert held.tier.usage().counters["written"] == {"base": 3}
    assert held.tier.usage().queue_bytes == 0
    assert is_same(read_now(held.tier, blocks[2].id, root=ROOT), blocks[2])


def test_put_full_queue_refuses_without_waiting(held: HeldTier) -> None:
    blocks = make_chain(40)
    started = time.monotonic()
    answers = [held.tier.put(block) for block in blocks]
    assert time.monotonic() - started < 2
    num_taken = answers.count(Accepted())
    assert num_taken == 4000 // blocks[0].nbytes
    assert answers[num_taken:] == [Refused(Refusal.QUEUE_FULL)] * (40 - num_taken)
    assert held.tier.usage().counters["refused"] == {"queue_full": 40 - num_taken}
    assert held.tier.usage().queue_bytes <= 4000
    assert not held.tier.blocks.find(blocks[-1].key)
    huge = make_block(5, num_values=4000)
    assert held.tier.put(huge) == Refused(Refusal.QUEUE_FULL)


def test_flush_timeout_reports_what_is_left(held: HeldTier) -> None:
    blocks = make_chain(3)
    for block in blocks:
        held.tier.put(block)
    left = held.tier.flush(0.05)
    assert (left.is_empty, left.num_left, left.bytes_left) == (False, 3, sum(block.nbytes for block in blocks))


def test_close_drops_and_counts_queued_blocks(tmp_path: Path) -> None:
    held = HeldTier(tmp_path / "cache")
    blocks = make_chain(4)
    for block in blocks:
        held.tier.put(block)
    assert held.is_writing.wait(10)
    threading.Timer(0.1, held.go_on.set).start()
    held.tier.close()
    assert held.tier.usage().counters["dropped"] == {DropReason.CLOSED: 3}
    assert held.tier.put(make_block(9)) == Refused(Refusal.CLOSED)
    results: list[LoadedBlock | MissingBlock] = []
    assert held.tier.read([blocks[0].id], results.append, root=ROOT).wait(5)
    assert results == [MissingBlock(blocks[0].id, MissReason.CLOSED)]
    tier = open_tier(tmp_path / "cache")
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True, False, False, False]
    tier.close()


def test_put_present_block_is_refused_unless_it_replaces(tier: DiskTier) -> None:
    block = make_block()
    put_all(tier, [block])
    assert tier.put(block) == Refused(Refusal.PRESENT)
    other = Block(block.key, ROOT, ROOT, 0, block.token_ids, {"v": block.tensors["v"]}, {"codec": "planes:2"})
    assert tier.put(other, replace=True) == Accepted()
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, block.id, root=ROOT), other)
    assert tier.usage().num_blocks == 1


def test_read_delivers_results_in_order_one_at_a_time(tier: DiskTier) -> None:
    blocks = make_chain(30, num_values=2000)
    put_all(tier, blocks)
    tier.remove([blocks[7].id])
    results: list[LoadedBlock | MissingBlock] = []
    inside = threading.Semaphore(1)

    def deliver(result: LoadedBlock | MissingBlock) -> None:
        assert inside.acquire(blocking=False)
        results.append(result)
        inside.release()

    ticket = tier.read([block.id for block in blocks], deliver, root=ROOT)
    assert ticket.wait(20)
    assert [result.id for result in results] == [block.id for block in blocks]
    assert results[7] == MissingBlock(blocks[7].id, MissReason.ABSENT)
    assert all(is_same(result, block) for result, block in zip(results, blocks, strict=True) if block is not blocks[7])
    assert tier.usage().num_pending_reads == 0


def test_read_cancelled_delivers_nothing(tmp_path: Path) -> None:
    go_on = threading.Event()
    files = FaultyFiles()
    tier = open_tier(tmp_path / "cache", files=files)
    blocks = make_chain(10)
    put_all(tier, blocks)
    files.before = {"read_into": wait_for(go_on)}
    results: list[LoadedBlock | MissingBlock] = []
    ticket = tier.read([block.id for block in blocks], results.append, root=ROOT)
    ticket.cancel()
    go_on.set()
    assert ticket.wait(5)
    after: list[LoadedBlock | MissingBlock] = []
    assert tier.read([blocks[0].id], after.append, root=ROOT).wait(5)
    assert results == []
    assert is_same(after[0], blocks[0])
    assert tier.usage().counters["read"]["disk"] <= 3
    tier.close()


def test_read_ahead_is_bounded_by_unreleased_bytes(tmp_path: Path) -> None:
    blocks = make_chain(12, num_values=20_000)
    file_bytes = 4096 * -(-blocks[0].nbytes // 4096) + 4096
    tier = open_tier(tmp_path / "cache", read_ahead_bytes=3 * file_bytes)
    put_all(tier, blocks)
    came: queue.Queue[LoadedBlock | MissingBlock] = queue.Queue()
    ticket = tier.read([block.id for block in blocks], came.put, root=ROOT)
    held = [came.get(timeout=10) for _ in range(3)]
    for block in blocks[3:]:
        with pytest.raises(queue.Empty):
            came.get(timeout=0.02)
        assert tier.usage().unused_bytes <= 3 * file_bytes
        first = held.pop(0)
        first.release()
        first.release()  # has no effect
        held.append(came.get(timeout=10))
        assert is_same(held[-1], block)
    assert ticket.wait(5)
    # A block above the bound is read alone; a cancelled read releases its bytes.
    alone = open_tier(tmp_path / "other", read_ahead_bytes=1)
    put_all(alone, blocks)
    given_up = alone.read([block.id for block in blocks], came.put, root=ROOT)
    came.get(timeout=10).release()
    given_up.cancel()
    results: list[LoadedBlock | MissingBlock] = []
    again = alone.read([blocks[0].id], results.append, root=ROOT)
    while not came.empty():
        came.get().release()
    assert again.wait(10)
    assert is_same(results[0], blocks[0])
    alone.close()
    tier.close()


def test_read_whose_delivery_raises_is_logged_and_later_reads_succeed(
    tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = make_chain(4)
    put_all(tier, blocks)

    def deliver(_result: LoadedBlock | MissingBlock) -> None:
        raise RuntimeError("a caller's mistake")

    for _ in range(3):
        assert tier.read([block.id for block in blocks], deliver, root=ROOT).wait(5)
    assert "Delivering a block" in caplog.text
    assert is_same(read_now(tier, blocks[0].id, root=ROOT), blocks[0])


def test_read_unknown_block_is_absent_and_leaves_no_record(tier: DiskTier) -> None:
    unknown = BlockId(bytes(32))
    assert read_now(tier, unknown, root=ROOT) == MissingBlock(unknown, MissReason.ABSENT)
    assert not tier.blocks.find(unknown.key)
    assert tier.blocks.lengths(unknown.key) == ()
    assert tier.usage().counters["missed"] == {"absent": 1}


def test_read_deleted_file_is_absent_and_forgets_the_record(tier: DiskTier, tmp_path: Path) -> None:
    blocks = make_chain(2)
    put_all(tier, blocks)
    next((tmp_path / "cache").rglob(f"{blocks[1].key.hex()}*")).unlink()
    assert tier.blocks.find(blocks[1].key)
    assert read_now(tier, blocks[1].id, root=ROOT) == MissingBlock(blocks[1].id, MissReason.ABSENT)
    assert not tier.blocks.find(blocks[1].key)
    assert tier.usage().num_blocks == 1


def test_open_folder_in_use_is_refused_with_its_process_id(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(CacheDirectoryBusy, match=rf"process {os.getpid()}\).*--disk-cache-dir"):
        open_tier(tmp_path / "cache")
    tier.close()
    open_tier(tmp_path / "cache").close()


def test_open_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot hold the disk cache"):
        open_tier(tmp_path / "file")


def test_files_and_folders_are_private_to_the_owner(tier: DiskTier, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        put_all(tier, make_chain(3))
    finally:
        os.umask(before)
    directory = tmp_path / "cache"
    found = [directory, *directory.rglob("*")]
    assert len(found) > 8
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_clear_one_root_keeps_the_other(tier: DiskTier, tmp_path: Path) -> None:
    ours, theirs = make_chain(4), make_chain(3, seed=1, root=OTHER_ROOT)
    put_all(tier, [*ours, *theirs])
    removed = tier.clear(ROOT)
    assert (removed.num_blocks, removed.num_tokens) == (4, 16)
    assert not any(tier.blocks.find(block.key) for block in ours)
    assert all(is_same(read_now(tier, block.id, root=OTHER_ROOT), block) for block in theirs)
    assert tier.clear().num_blocks == 3
    assert tier.flush(10).is_empty
    assert not block_files(tmp_path / "cache")
    assert tier.usage().counters["evicted"] == {"cleared": 7}
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")


def test_clear_drops_queued_blocks_and_the_one_being_written(held: HeldTier, tmp_path: Path) -> None:
    blocks = make_chain(4)
    for block in blocks:
        held.tier.put(block)
    held.tier.clear()
    assert not any(held.tier.blocks.find(block.key) for block in blocks)
    held.go_on.set()
    held.tier.close()
    assert not block_files(tmp_path / "cache")
    assert held.tier.usage().num_blocks == 0


def test_usage_equals_allocated_bytes_of_the_folder(tier: DiskTier, tmp_path: Path) -> None:
    put_all(tier, make_chain(50, num_values=700))
    usage = tier.usage()
    assert usage.disk_bytes == real_bytes(tmp_path / "cache")
    assert usage.block_bytes == sum(p.stat().st_blocks * 512 for p in block_files(tmp_path / "cache"))


def test_rates_after_reads_are_measured(tier: DiskTier) -> None:
    assert tier.rates.num_blocks == 0
    assert tier.rates.seconds_for(10**9, 100) == 0
    blocks = make_chain(6, num_values=50_000)
    put_all(tier, blocks)
    assert tier.read([block.id for block in blocks], lambda _: None, root=ROOT).wait(10)
    rates = tier.rates
    assert rates.num_blocks == 6
    assert 1e6 < rates.read_bytes_per_s < 1e11
    # Expected times fade with every second, and the call takes a moment.
    assert rates.seconds_for(10**9, 100) == pytest.approx(10**9 / rates.read_bytes_per_s, rel=0.1)


def test_rates_slow_disk_includes_its_latency(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path / "cache", files=files, num_readers=1)
    blocks = make_chain(4)
    put_all(tier, blocks)
    files.before = {"open": lambda: time.sleep(0.05)}
    assert tier.read([block.id for block in blocks], lambda _: None, root=ROOT).wait(10)
    assert tier.rates.read_bytes_per_s < blocks[0].nbytes / 0.05
    assert tier.rates.seconds_for(4 * blocks[0].nbytes, 4) > 4 * 0.05 * 0.9
    tier.close()


def test_close_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in range(3):
        tier = open_tier(tmp_path / "cache")
        tier.put(make_block())
        tier.close()
    assert threading.active_count() == before


def test_close_hanging_disk_returns_after_the_timeout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = HeldTier(tmp_path / "cache")
    held.tier.put(make_block())
    eventually(lambda: "sync" in held.files.steps)
    assert held.tier.usage().num_queued == 1
    started = time.monotonic()
    held.tier.close(timeout_s=0.1)
    assert time.monotonic() - started < 5
    assert "does not answer" in caplog.text
    held.go_on.set()
    held.tier._writer._thread.join(10)
    held.tier._store.close()
    held.tier._folder.release()
