"""Disks that fill, fail, turn read-only or vanish: faults are counted and logged once, and the tier recovers."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from kvstrata.tiers.block import Block
from kvstrata.tiers.disk import reader
from kvstrata.tiers.disk.errors import DiskFault
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.folder import file_name
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Accepted, Refusal, Refused
from kvstrata.tiers.read_pool import MissingBlock
from kvstrata.tiers.write_limits import Backoff
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import (
    ROOT,
    block_files,
    delete_catalogue,
    is_same,
    make_block,
    make_chain,
    open_tier,
    put_all,
    read_now,
    real_bytes,
    records_of,
    write_blocks,
)
from tests.tiers.disk.faults import FaultyFiles, fail, fail_once, faulty_catalogues, full_volume

CODES = [
    (errno.ENOSPC, DiskFault.NO_SPACE),
    (errno.EDQUOT, DiskFault.NO_SPACE),
    (errno.EIO, DiskFault.IO_ERROR),
    (errno.EROFS, DiskFault.READ_ONLY),
    (errno.EBUSY, DiskFault.OTHER),
]


def put_after_pause(tier: DiskTier, block: Block) -> None:
    """Put a block as soon as no pause refuses it: pauses of these tests take 50 ms."""
    eventually(lambda: tier.put(block) != Refused(Refusal.PAUSED))
    assert tier.flush(10).is_empty


@pytest.mark.parametrize(("code", "fault"), CODES)
@pytest.mark.parametrize("step", ["create", "write", "sync", "rename", "sync_folder", "free_bytes"])
def test_write_fails_at_any_step_pauses_and_keeps_other_blocks(
    files: FaultyFiles, tmp_path: Path, step: str, code: int, fault: DiskFault, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path / "cache", files=files, first_pause_s=60)
    before, failing, after = make_chain(3)
    tier.put(before)
    assert tier.flush(10).is_empty
    files.before = {step: fail(code)}
    assert tier.put(failing) == Accepted()
    assert tier.flush(10).is_empty
    usage = tier.usage()
    assert set(usage.counters["failed"]) == {fault}  # once, or twice if the flush began meanwhile
    assert usage.counters["written"] == {"base": 1}
    assert usage.paused_because
    assert usage.paused_because == fault
    assert tier.put(after) == Refused(Refusal.PAUSED)
    assert is_same(read_now(tier, before.id, root=ROOT), before)
    files.before = {}
    monkeypatch.setattr(Backoff, "remaining_s", 0.0)  # after the minute
    assert tier.put(after) == Accepted()
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, after.id, root=ROOT), after)
    assert tier.usage().paused_because == ""
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    assert caplog.text.count("cannot be written") == 1
    tier.close()


def test_write_fails_repeatedly_warns_once(tier: DiskTier, files: FaultyFiles, caplog) -> None:
    files.before = {"write": fail(errno.ENOSPC)}
    for block in make_chain(5):
        put_after_pause(tier, block)
    failed = tier.usage().counters["failed"]
    assert set(failed) == {DiskFault.NO_SPACE}
    assert failed[DiskFault.NO_SPACE] >= 5
    assert caplog.text.count("cannot be written (no_space)") == 1


@pytest.mark.parametrize("num_bytes", [1, 100, 4095, 4096, 4200])
def test_write_torn_leaves_no_file(tier: DiskTier, files: FaultyFiles, tmp_path: Path, num_bytes: int) -> None:
    block = make_block()
    files.torn_after_bytes = num_bytes
    tier.put(block)
    assert tier.flush(10).is_empty
    assert set(tier.usage().counters["failed"]) == {DiskFault.NO_SPACE}
    assert not tier.blocks.find(block.key)
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    assert not block_files(tmp_path / "cache")
    files.torn_after_bytes = None
    put_after_pause(tier, block)
    assert is_same(read_now(tier, block.id, root=ROOT), block)


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    class Short(FaultyFiles):
        def write(self, fd: int, piece: memoryview) -> int:
            return super().write(fd, piece[:700])

        def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
            return super().read_into(fd, buffer[:300], offset)

    tier = open_tier(tmp_path / "cache", files=Short())
    block = make_block(num_values=500)
    tier.put(block)
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, block.id, root=ROOT), block)
    tier.close()


def test_read_too_many_unreadable_blocks_avoids_the_newest(
    tier: DiskTier, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "NUM_AVOIDED", 2)
    blocks = make_chain(3)
    put_all(tier, blocks)
    files.before = {"open": fail(errno.EIO)}
    for block in blocks:
        assert isinstance(read_now(tier, block.id, root=ROOT), MissingBlock)
    files.before = {}
    assert is_same(read_now(tier, blocks[0].id, root=ROOT), blocks[0])
    assert all(isinstance(read_now(tier, block.id, root=ROOT), MissingBlock) for block in blocks[1:])


@pytest.mark.parametrize(("code", "fault"), CODES)
@pytest.mark.parametrize("step", ["open", "read_into", "status"])
def test_read_fails_is_a_miss_and_avoids_the_block(
    tier: DiskTier, files: FaultyFiles, step: str, code: int, fault: DiskFault, caplog
) -> None:
    blocks = make_chain(3)
    put_all(tier, blocks)
    files.before = {step: fail(code)}
    for block in blocks[:2]:
        assert read_now(tier, block.id, root=ROOT) == MissingBlock(block.id, fault)
    assert caplog.text.count("cannot be read") == 1
    files.before = {}
    # An unreadable block is avoided for a while; the others are served.
    num_steps = len(files.steps)
    assert read_now(tier, blocks[0].id, root=ROOT) == MissingBlock(blocks[0].id, fault)
    assert len(files.steps) == num_steps
    assert not tier.blocks.find(blocks[0].key)
    assert is_same(read_now(tier, blocks[2].id, root=ROOT), blocks[2])
    assert tier.usage().counters["failed"] == {fault: 2}
    assert tier.usage().counters["quarantined"] == {}


def test_read_unreadable_block_after_a_minute_is_retried(tmp_path: Path, files: FaultyFiles) -> None:
    now = [100.0]
    tier = open_tier(tmp_path / "cache", files=files, clock=lambda: now[0])
    block = make_block()
    tier.put(block)
    assert tier.flush(10).is_empty
    files.before = {"read_into": fail(errno.EIO)}
    assert read_now(tier, block.id, root=ROOT) == MissingBlock(block.id, DiskFault.IO_ERROR)
    files.before = {}
    now[0] += 61
    assert tier.blocks.find(block.key)
    assert is_same(read_now(tier, block.id, root=ROOT), block)
    tier.close()


def test_folder_that_vanishes_is_created_again_after_the_pause(tier: DiskTier, tmp_path: Path, caplog) -> None:
    blocks = make_chain(4)
    for block in blocks[:2]:
        tier.put(block)
    assert tier.flush(10).is_empty
    shutil.rmtree(tmp_path / "cache")
    assert isinstance(read_now(tier, blocks[0].id, root=ROOT), MissingBlock)
    assert tier.put(blocks[2]) == Accepted()
    assert tier.flush(10).is_empty
    assert tier.usage().counters["failed"] == {DiskFault.VANISHED: 1}
    assert "cannot be written (vanished)" in caplog.text
    put_after_pause(tier, blocks[3])
    assert is_same(read_now(tier, blocks[3].id, root=ROOT), blocks[3])
    assert not tier.blocks.find(blocks[1].key)
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")


@pytest.mark.parametrize("name", ["tmp", "blocks", "quarantine"])
def test_subfolder_that_vanishes_is_created_again_at_once(tier: DiskTier, tmp_path: Path, name: str) -> None:
    blocks = make_chain(3)
    for block in blocks[:2]:
        tier.put(block)
    assert tier.flush(10).is_empty
    shutil.rmtree(tmp_path / "cache" / name)
    tier.put(blocks[2])
    assert tier.flush(10).is_empty
    usage = tier.usage()
    assert usage.counters["failed"] == {}
    assert usage.num_blocks == (1 if name == "blocks" else 3)
    assert tier.write_state().num_faults == (1 if name == "blocks" else 0)  # the others must be looked up again
    assert is_same(read_now(tier, blocks[2].id, root=ROOT), blocks[2])
    assert usage.disk_bytes == real_bytes(tmp_path / "cache")


def test_write_without_the_parent_folder_fails_and_creates_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "volume" / "cache")
    assert tier.flush(10).is_empty  # until then the tier's thread may recreate folders during their deletion
    shutil.rmtree(tmp_path / "volume")
    for block in make_chain(4):
        put_after_pause(tier, block)
    failed = tier.usage().counters["failed"]
    assert set(failed) == {DiskFault.VANISHED}
    assert failed[DiskFault.VANISHED] >= 4  # and one more for each pause that ended before the next block came
    assert tier.blocks.lengths(ROOT) == ()
    assert not (tmp_path / "volume").exists()
    tier.close()


def test_delete_fails_files_stay_counted_and_are_retried_after_a_clear(tmp_path: Path, files: FaultyFiles) -> None:
    tier = open_tier(tmp_path / "cache", 2 << 20, files=files)
    for seed in range(14):
        tier.put(make_block(seed, num_values=12_000))
    assert tier.flush(10).is_empty
    before = tier.usage()
    files.before = {"unlink": fail(errno.EIO)}
    for seed in range(12, 16):
        put_after_pause(tier, make_block(seed, num_values=12_000))
    after = tier.usage()
    assert after.counters["failed"][DiskFault.IO_ERROR] >= 1
    assert after.num_blocks >= before.num_blocks
    assert real_bytes(tmp_path / "cache") <= 2 << 20
    assert tier.clear().num_blocks == after.num_blocks
    assert tier.flush(10).is_empty
    cleared = tier.usage()
    assert cleared.num_blocks == 0
    assert cleared.leaving_bytes == after.block_bytes
    assert cleared.disk_bytes == real_bytes(tmp_path / "cache")
    tier.close()
    # The blocks do not come back, and their files are deleted as soon as possible.
    tier = open_tier(tmp_path / "cache", 2 << 20, files=files)
    assert tier.flush(10).is_empty
    assert tier.usage().num_blocks == 0
    assert tier.usage().leaving_bytes == after.block_bytes
    files.before = {}
    assert tier.clear().num_blocks == 0
    assert tier.flush(10).is_empty
    assert not block_files(tmp_path / "cache")
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    tier.close()


class Stuck(Filesystem):
    """A filesystem on which some files cannot be deleted or moved."""

    names_stuck: frozenset[str] = frozenset()

    def rename(self, source: Path, target: Path) -> None:
        if source.name in self.names_stuck:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        if path.name in self.names_stuck:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        super().unlink(path)


def test_evict_skips_files_that_cannot_be_deleted(tmp_path: Path, caplog) -> None:
    """The files stay counted at every moment."""
    directory, limit_bytes, files = tmp_path / "cache", 2 << 20, Stuck()
    now = [1000.0]
    tier = open_tier(directory, limit_bytes, files=files, clock=lambda: now[0])
    stuck = [make_block(seed, num_values=12_000) for seed in (1, 3)]
    files.names_stuck = frozenset(file_name(block.id) for block in stuck)
    for seed in range(40):
        now[0] += 1
        assert tier.put(make_block(seed, num_values=12_000)) == Accepted()
        assert tier.flush(10).is_empty
        assert tier.usage().disk_bytes == real_bytes(directory) <= limit_bytes
    usage = tier.usage()
    assert usage.counters["written"] == {"base": 40}
    assert usage.block_bytes == sum(row.disk_bytes for row in records_of(tier))
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in stuck)
    assert usage.counters["failed"][DiskFault.READ_ONLY] >= 2
    assert caplog.text.count("cannot be deleted") == 2
    tier.close()


@pytest.mark.parametrize("is_outdated", [False, True])
def test_rebuild_with_an_undeletable_damaged_file_finds_all_others(tmp_path: Path, is_outdated: bool, caplog) -> None:
    directory, blocks, files = tmp_path / "cache", make_chain(4), Stuck()
    write_blocks(directory, blocks)
    delete_catalogue(directory)
    damaged = next(directory.rglob(file_name(blocks[3].id)))
    damaged.write_bytes(damaged.read_bytes().replace(b"block.1", b"block.0") if is_outdated else bytes(9000))
    files.names_stuck = frozenset([damaged.name])
    tier = open_tier(directory, files=files, first_pause_s=60)
    assert tier.flush(10).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True] * 3 + [False]
    assert tier.usage().counters["failed"] == {DiskFault.READ_ONLY: 1}
    assert caplog.text.count("cannot be deleted") == 1
    assert "Removed" not in caplog.text
    assert tier.usage().disk_bytes == real_bytes(directory)
    assert tier.put(make_block(9)) == Accepted()  # no pause
    assert tier.flush(10).is_empty
    assert tier.usage().disk_bytes == real_bytes(directory)
    tier.close()


@pytest.mark.parametrize("error", [full_volume(), sqlite3.DatabaseError("database disk image is malformed")])
def test_catalogue_save_failing_does_not_stop_writes_and_evictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: sqlite3.Error, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    faults = faulty_catalogues(monkeypatch)
    tier = open_tier(directory, 2 << 20, first_pause_s=60)
    put_all(tier, [make_block(seed, num_values=12_000) for seed in range(5)])
    faults.error = error
    put_all(tier, [make_block(seed, num_values=12_000) for seed in range(5, 10)])
    put_all(tier, [make_block(100, num_values=80_000)])  # evicts
    usage = tier.usage()
    assert set(usage.counters["failed"]) == {DiskFault.CATALOGUE}
    assert usage.counters["written"] == {"base": 11}
    num_files = len(block_files(directory))
    assert usage.counters["evicted"] == {"limit": 11 - num_files}
    assert usage.num_blocks == len(records_of(tier)) == num_files < 10
    assert usage.disk_bytes == real_bytes(directory)
    assert caplog.text.count("catalogue cannot be used") == isinstance(error, sqlite3.OperationalError)
    tier.close()
    faults.error = None
    tier = open_tier(directory, 2 << 20)
    assert tier.flush(10).is_empty
    assert tier.usage().num_blocks == num_files
    tier.close()


def test_catalogue_working_again_saves_a_start_from_reading_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged catalogue is replaced by a new one with all records, and changes of a full volume are saved later."""
    directory, blocks = tmp_path / "cache", make_chain(6)
    faults = faulty_catalogues(monkeypatch)
    tier = open_tier(directory)
    put_all(tier, blocks[:2])
    tier.touch([blocks[1].id])
    for error, block in ((full_volume(), blocks[2]), (sqlite3.DatabaseError("malformed"), blocks[3])):
        faults.error = error
        put_all(tier, [block])
    assert all(tier.blocks.find(block.key) for block in blocks[:4])
    faults.error = None
    put_all(tier, blocks[4:])
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks)
    tier.close()
    files = FaultyFiles()
    tier = open_tier(directory, files=files)
    assert tier.flush(10).is_empty
    assert [(record.id, record.uses) for record in records_of(tier)] == [
        (block.id, 2 if index == 1 else 1) for index, block in enumerate(blocks)
    ]
    assert "open" not in files.steps
    assert tier.usage().disk_bytes == real_bytes(directory)
    tier.close()


def test_write_fails_once_chain_is_written_in_order_after_the_pause(tier: DiskTier, files: FaultyFiles) -> None:
    blocks = make_chain(3)
    fail_once(files, "sync", errno.ENOSPC)
    for block in blocks:
        eventually(lambda block=block: tier.put(block) != Refused(Refusal.PAUSED))
    # No caller flushes, so the writer retries by itself.
    eventually(lambda: not tier.usage().num_queued)
    assert tier.usage().counters["failed"] == {DiskFault.NO_SPACE: 1}
    assert [row.id for row in records_of(tier)] == [block.id for block in blocks]
    assert tier.write_state().num_faults == 1


def test_end_pause_accepts_blocks_until_the_next_fault(tmp_path: Path, files: FaultyFiles) -> None:
    tier = open_tier(tmp_path / "cache", files=files, first_pause_s=60)
    failing, after = make_block(1), make_block(2)
    files.before = {"sync": fail(errno.ENOSPC)}
    tier.put(failing)
    assert tier.flush(10).is_empty
    assert tier.put(after) == Refused(Refusal.PAUSED)
    tier.end_pause()
    assert tier.put(after) == Accepted()
    assert tier.flush(10).is_empty
    # Another fault: blocks are refused again.
    assert tier.put(failing) == Refused(Refusal.PAUSED)
    files.before = {}
    tier.end_pause()
    assert tier.put(failing) == Accepted()
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, failing.id, root=ROOT), failing)
    tier.close()


def test_put_description_that_is_no_json_drops_the_block(tier: DiskTier) -> None:
    block = make_block()
    odd = type(block)(block.key, ROOT, ROOT, 0, block.token_ids, block.tensors, {"codec": object()})
    tier.put(odd)
    assert tier.flush(10).is_empty
    assert tier.usage().counters["dropped"] == {"unwritable": 1}
    tier.put(block)
    assert tier.flush(10).is_empty
    assert is_same(read_now(tier, block.id, root=ROOT), block)
