"""Clears: blocks are hidden at once, the tier's thread deletes their files, and no caller waits for the disk."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.tiers.disk.errors import DiskFault, DropReason
from kvstrata.tiers.disk.space import NUM_DELETED_AT_ONCE
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.interface import Accepted
from kvstrata.tiers.read_pool import MissingBlock, MissReason
from tests.support.eventually import eventually
from tests.tiers.disk.blocks import (
    OTHER_ROOT,
    ROOT,
    block_files,
    delete_catalogue,
    is_same,
    make_block,
    make_chain,
    open_tier,
    path_of,
    put_all,
    read_now,
    real_bytes,
    records_of,
    write_blocks,
)
from tests.tiers.disk.faults import FaultyFiles, fail, flip, kill, wait_for
from tests.tiers.timing import in_time


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    go_on = threading.Event()
    yield go_on
    go_on.set()


def hang(files: FaultyFiles, step: str, go_on: threading.Event) -> threading.Event:
    """Let a thread of the tier wait at its next operation of this name. The returned event is set when it does."""
    has_come = threading.Event()

    def act() -> None:
        has_come.set()
        wait_for(go_on)()

    files.before = {step: act}
    return has_come


@pytest.mark.parametrize("step", ["sync", "rename", "sync_folder", "free_bytes", "create", "status"])
def test_engine_calls_never_wait_for_a_hanging_write(
    tier: DiskTier, files: FaultyFiles, go_on: threading.Event, step: str
) -> None:
    there, theirs, coming = make_chain(3), make_block(7, parent=OTHER_ROOT, root=OTHER_ROOT), make_block(9)
    put_all(tier, [*there, theirs])
    has_come = hang(files, step, go_on)
    tier.put(coming)
    assert has_come.wait(20)

    def ask() -> bool:
        assert all(tier.blocks.find(block.key) for block in (*there, theirs, coming))
        assert tier.blocks.lengths(there[0].key) == (4,)
        assert tier.blocks.contents(there[0].id) == {}
        assert tier.usage().num_blocks == len(records_of(tier)) == 4
        assert tier.quarantined_keys == frozenset()
        tier.touch([there[0].id])
        assert tier.put(make_block(10)) == Accepted()
        assert tier.remove([there[2].id]).num_blocks == 1
        assert not tier.blocks.find(there[2].key)
        assert tier.clear(ROOT).num_blocks == 2
        return any(tier.blocks.find(block.key) for block in (*there, coming)) or bool(tier.blocks.lengths(ROOT))

    assert in_time(ask) is False
    assert tier.blocks.find(theirs.key)
    go_on.set()
    assert tier.flush(20).is_empty
    assert [row.id for row in records_of(tier)] == [theirs.id]


def test_engine_calls_never_wait_for_a_hanging_quarantine(tmp_path: Path, go_on: threading.Event) -> None:
    files = FaultyFiles()
    tier = open_tier(tmp_path / "cache", 4 << 20, files=files)  # 2 % of it: two of these
    blocks = make_chain(4, num_values=3000)
    put_all(tier, blocks)
    for block in blocks:
        flip(path_of(tmp_path / "cache", block), 4096)
    for block in blocks[:2]:
        assert isinstance(read_now(tier, block.id, root=ROOT), MissingBlock)
    has_come = hang(files, "unlink", go_on)
    reading = tier.read([blocks[2].id], lambda _: None, root=ROOT)
    assert has_come.wait(20)
    assert len(in_time(lambda: tier.quarantined_keys)) == 3
    assert in_time(tier.usage).num_blocks == 1
    assert not tier.blocks.find(blocks[2].key)
    go_on.set()
    assert reading.wait(20)
    assert len(tier.quarantined_keys) == 2
    tier.close()


def test_clear_hides_blocks_before_a_file_is_deleted(
    tier: DiskTier, files: FaultyFiles, tmp_path: Path, go_on: threading.Event
) -> None:
    blocks = make_chain(5)
    put_all(tier, blocks)
    before = tier.usage()
    has_come = hang(files, "unlink", go_on)
    removed = in_time(tier.clear)
    assert (removed.num_blocks, removed.num_tokens, removed.disk_bytes) == (5, 20, before.block_bytes)
    assert has_come.wait(20)
    usage = in_time(tier.usage)
    assert (usage.num_blocks, usage.num_tokens, usage.block_bytes) == (0, 0, 0)
    assert usage.leaving_bytes == before.block_bytes
    assert not any(tier.blocks.find(block.key) for block in blocks)
    assert all(path_of(tmp_path / "cache", block).exists() for block in blocks)
    # Cleared blocks whose files still exist are not read either.
    assert in_time(lambda: read_now(tier, blocks[0].id, root=ROOT)) == MissingBlock(blocks[0].id, MissReason.ABSENT)
    assert in_time(tier.clear).num_blocks == 0
    go_on.set()
    assert tier.flush(20).is_empty
    assert not block_files(tmp_path / "cache")
    assert tier.usage().counters["evicted"] == {"cleared": 5}
    assert tier.usage().leaving_bytes == 0
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")


def test_put_during_a_clear_keeps_the_block(
    tier: DiskTier, files: FaultyFiles, tmp_path: Path, go_on: threading.Event
) -> None:
    blocks = make_chain(6)
    put_all(tier, blocks)
    has_come = hang(files, "unlink", go_on)
    tier.clear()
    assert has_come.wait(20)
    assert [tier.put(block) for block in blocks[:3]] == [Accepted()] * 3
    assert all(tier.blocks.find(block.key) for block in blocks[:3])
    files.before = {}
    go_on.set()
    assert tier.flush(20).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True] * 3 + [False] * 3
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks[:3])
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    tier.close()
    tier = open_tier(tmp_path / "cache")
    assert tier.flush(20).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True] * 3 + [False] * 3
    tier.close()


def test_clear_without_a_writable_marker_deletes_the_files(
    tier: DiskTier, files: FaultyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full volume may need the bytes of these files to write anything."""
    put_all(tier, make_chain(4))
    files.before = {"create": fail(errno.ENOSPC)}
    tier.clear()
    assert tier.flush(20).is_empty
    assert not block_files(tmp_path / "cache")
    assert set(tier.usage().counters["failed"]) == {DiskFault.NO_SPACE}
    assert caplog.text.count("may come back") == 1
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    files.before = {}
    tier.end_pause()
    put_all(tier, [make_block(9)])


def test_clear_deletes_its_marker_after_the_files(tier: DiskTier, files: FaultyFiles, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    put_all(tier, make_chain(3))
    seen: list[tuple[int, int]] = []  # markers and blocks at each unlink

    def look() -> None:
        seen.append((len(list((directory / "cleared").iterdir())), len(block_files(directory))))

    files.before = {"unlink": look}
    tier.clear()
    assert tier.flush(20).is_empty
    assert seen == [(1, 3), (1, 2), (1, 1), (1, 0)]
    assert not list((directory / "cleared").iterdir())
    last_unlink = len(files.steps) - files.steps[::-1].index("unlink") - 1
    assert "sync_folder" in files.steps[last_unlink - 6 : last_unlink]  # the deletes are on the disk before that


def test_clear_during_publish_drops_the_block(
    tier: DiskTier, files: FaultyFiles, tmp_path: Path, go_on: threading.Event
) -> None:
    """The clear comes after the writer asked whether the block is wanted, and before its file has a name."""
    block = make_block()
    has_come = hang(files, "rename", go_on)
    tier.put(block)
    assert has_come.wait(20)
    in_time(tier.clear)
    assert not tier.blocks.find(block.key)
    go_on.set()
    assert tier.flush(20).is_empty
    assert not tier.blocks.find(block.key)
    assert not block_files(tmp_path / "cache")
    assert tier.usage().counters["dropped"] == {DropReason.CLEARED: 1}
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")


def test_clear_of_many_files_writes_queued_blocks_between_deletes(
    tier: DiskTier, files: FaultyFiles, go_on: threading.Event
) -> None:
    """A clear of many files does not hold up the queue."""
    put_all(tier, make_chain(3 * NUM_DELETED_AT_ONCE, num_tokens=1, num_values=1))
    has_come = hang(files, "unlink", go_on)
    tier.clear()
    assert has_come.wait(20)
    tier.put(make_block(10**6))
    files.before = {}
    go_on.set()
    assert tier.flush(20).is_empty
    published = len(files.steps) - files.steps[::-1].index("rename")
    assert files.steps[published:].count("unlink") == 2 * NUM_DELETED_AT_ONCE + 1  # and one of the marker


def remove_and_die(directory: Path, num_deleted: int, *, is_clear: bool) -> None:
    """Remove a chain, and kill this process after `num_deleted` of its files are deleted."""
    files = FaultyFiles()
    tier = open_tier(directory, files=files)
    blocks = make_chain(6)
    put_all(tier, blocks)
    has_come, go_on = threading.Event(), threading.Event()
    num_unlinked = 0

    def act() -> None:
        nonlocal num_unlinked
        has_come.set()
        wait_for(go_on)()
        num_unlinked += 1
        if num_unlinked > num_deleted:
            kill()

    files.before = {"unlink": act}
    if is_clear:
        tier.clear()
    else:
        tier.remove([block.id for block in blocks], durable=True)
    assert has_come.wait(20)
    go_on.set()
    tier.flush(20)


@pytest.mark.parametrize("is_catalogue_lost", [False, True])
@pytest.mark.parametrize("is_clear", [True, False])
@pytest.mark.parametrize("num_deleted", [0, 3])
def test_remove_before_a_kill_stays_removed_after_restart(
    tmp_path: Path, num_deleted: int, is_clear: bool, is_catalogue_lost: bool
) -> None:
    import multiprocessing

    directory = tmp_path / "cache"
    process = multiprocessing.get_context("spawn").Process(
        target=remove_and_die, args=(directory, num_deleted), kwargs={"is_clear": is_clear}
    )
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert len(block_files(directory)) == 6 - num_deleted
    if is_catalogue_lost:
        delete_catalogue(directory)
    tier = open_tier(directory)
    assert tier.usage().num_blocks == 0
    assert tier.flush(20).is_empty
    assert tier.usage().num_blocks == 0
    assert not block_files(directory)
    assert not list((directory / "cleared").iterdir())
    assert tier.usage().disk_bytes == real_bytes(directory)
    tier.close()


def wait_for_removals_and_die(directory: Path, *, is_clear: bool) -> None:
    """Remove a chain while files cannot be deleted, and kill this process as soon as the removal is confirmed."""
    tier = open_tier(directory, files=Undeletable())
    blocks = make_chain(4)
    put_all(tier, blocks)
    if is_clear:
        tier.clear()
    else:
        tier.remove([block.id for block in blocks], durable=True)
    assert tier.wait_for_removals(20)
    kill()


@pytest.mark.parametrize("is_clear", [True, False])
def test_confirmed_removal_survives_a_kill(tmp_path: Path, is_clear: bool) -> None:
    import multiprocessing

    directory = tmp_path / "cache"
    process = multiprocessing.get_context("spawn").Process(
        target=wait_for_removals_and_die, args=(directory,), kwargs={"is_clear": is_clear}
    )
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert len(block_files(directory)) == 4
    tier = open_tier(directory)
    assert tier.usage().num_blocks == 0
    tier.close()


def test_wait_for_removals_ends_a_pause_and_reports_a_disk_that_hangs(
    tier: DiskTier, files: FaultyFiles, go_on: threading.Event
) -> None:
    assert tier.wait_for_removals(0)
    put_all(tier, make_chain(2))
    files.before = {"create": fail(errno.EIO)}
    tier.put(make_block(9))
    eventually(lambda: tier.write_state().paused_because)
    files.before = {}
    tier.clear()
    assert tier.wait_for_removals(20)
    put_all(tier, make_chain(2))
    hang(files, "create", go_on)
    tier.clear()
    assert not tier.wait_for_removals(0.1)
    go_on.set()
    assert tier.wait_for_removals(20)


def put_again_and_die(directory: Path) -> None:
    """Clear, put two of four blocks again, and kill this process while the files of the other two exist."""
    files = Undeletable()
    tier = open_tier(directory, files=files)
    blocks = make_chain(4)
    put_all(tier, blocks)
    tier.clear()
    put_all(tier, blocks[:2])
    kill()


class Undeletable(FaultyFiles):
    def unlink(self, path: Path) -> None:
        if path.suffix == ".safetensors":
            raise OSError(errno.EACCES, "Permission denied")
        super().unlink(path)


@pytest.mark.parametrize("is_catalogue_lost", [False, True])
def test_block_put_again_after_a_clear_survives_a_kill(tmp_path: Path, is_catalogue_lost: bool) -> None:
    import multiprocessing

    directory, blocks = tmp_path / "cache", make_chain(4)
    process = multiprocessing.get_context("spawn").Process(target=put_again_and_die, args=(directory,))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert len(block_files(directory)) == 4
    assert list((directory / "cleared").iterdir())
    if is_catalogue_lost:
        delete_catalogue(directory)
    tier = open_tier(directory)
    assert tier.flush(20).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True, True, False, False]
    assert all(is_same(read_now(tier, block.id, root=ROOT), block) for block in blocks[:2])
    assert len(block_files(directory)) == 2
    assert tier.usage().disk_bytes == real_bytes(directory)
    tier.close()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format":"kvstrata.cleared.2","removals":[]}', bytes(range(256))])
def test_start_unreadable_marker_is_reported_and_deleted(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory, blocks = tmp_path / "cache", make_chain(2)
    write_blocks(directory, blocks)
    (directory / "cleared" / "3").write_bytes(content)
    (directory / "cleared" / "notes.txt").write_text("not ours")
    tier = open_tier(directory)
    assert tier.flush(20).is_empty
    assert all(tier.blocks.find(block.key) for block in blocks)
    assert caplog.text.count("cannot be read; blocks may come back") == 1
    assert [path.name for path in (directory / "cleared").iterdir()] == ["notes.txt"]
    tier.close()


def test_put_after_a_clear_with_the_clock_set_back_keeps_the_block(tmp_path: Path) -> None:
    now, directory, blocks = [1000.0], tmp_path / "cache", make_chain(2)
    tier = open_tier(directory, files=Undeletable(), clock=lambda: now[0])
    put_all(tier, blocks)
    tier.clear()
    now[0] = 400.0
    put_all(tier, blocks[:1])
    tier.clear(OTHER_ROOT)
    assert tier.flush(20).is_empty
    tier.close()
    delete_catalogue(directory)
    tier = open_tier(directory, clock=lambda: now[0])
    assert tier.flush(20).is_empty
    assert [bool(tier.blocks.find(block.key)) for block in blocks] == [True, False]
    tier.close()


def test_start_without_a_catalogue_returns_at_once_and_finds_blocks_as_scanned(
    tmp_path: Path, go_on: threading.Event
) -> None:
    blocks = [make_block(seed, num_tokens=1, num_values=1) for seed in range(200)]
    write_blocks(tmp_path / "cache", blocks)
    delete_catalogue(tmp_path / "cache")
    num_opened, has_come = 0, threading.Event()

    def act() -> None:
        nonlocal num_opened
        num_opened += 1
        if num_opened > 150:
            has_come.set()
            wait_for(go_on)()

    tier = in_time(lambda: open_tier(tmp_path / "cache", files=FaultyFiles(before={"open": act})))
    assert has_come.wait(20)
    found = in_time(lambda: [block for block in blocks if tier.blocks.find(block.key)])
    assert 0 < len(found) <= 150
    assert tier.usage().num_blocks == len(found)
    # Blocks that were cleared before the scan found them stay cleared.
    in_time(tier.clear)
    go_on.set()
    assert tier.flush(20).is_empty
    assert tier.usage().num_blocks == 0
    assert not block_files(tmp_path / "cache")
    assert tier.usage().disk_bytes == real_bytes(tmp_path / "cache")
    tier.put(blocks[0])
    assert tier.flush(20).is_empty
    assert tier.blocks.find(blocks[0].key)
    tier.close()


def test_start_with_many_records_loads_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    blocks = make_chain(30, num_tokens=1, num_values=1)
    tier = open_tier(tmp_path / "cache", clock=lambda: now[0])
    put_all(tier, blocks)
    now[0] += 10
    tier.touch(block.id for block in blocks[:5])
    tier.close()
    monkeypatch.setattr("kvstrata.tiers.disk.block_store.NUM_RECORDS_AT_START", 5)
    tier = open_tier(tmp_path / "cache", files=FaultyFiles(before={"names": lambda: time.sleep(0.05)}))
    assert all(tier.blocks.find(block.key) for block in blocks[:5])  # used last
    assert tier.flush(20).is_empty
    assert all(tier.blocks.find(block.key) for block in blocks)
    assert tier.usage().num_blocks == 30
    assert tier.usage().counters["quarantined"] == {}
    tier.close()
