"""Much has to go at once: what a working disk has room for gets there, and what is lost is counted by its reason."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from kvstrata.prefix_cache.config import LadderConfig
from kvstrata.prefix_cache.prefix_cache import Stock
from kvstrata.tier.base import CALM_SHARE
from tests.disk.faults import FaultyFiles, fail, wait_for
from tests.prefix_cache.disk import MIB, random_tokens, reachable, store_on, written
from tests.prefix_cache.kv import TOKEN_BYTES, settle, store_tokens

CHATS = [random_tokens(1024, seed) for seed in range(10)]  # 1 MiB each, in 4 blocks
BLOCK_BYTES = 256 * TOKEN_BYTES


def fill(stock: Stock) -> None:
    for chat in CHATS:
        store_tokens(stock, chat)
    while not stock.transcoder.jobs.idle:
        stock.background.run_background(0)


def shrink_with_the_disk(stock: Stock, limit_bytes: int) -> int:
    """As the engine does it. Tells how often it had to wait for the disk."""
    num_waits = 0
    while stock.reclaimer.shrink_to(limit_bytes) == "awaits_disk":
        num_waits += 1
        assert stock.disk.tier.flush(60).is_empty
    return num_waits


def num_found(stock: Stock, chat: list[int]) -> int:
    return max(stock.store.lookup(chat, "").num_tokens, reachable(stock, chat))


def dropped(stock: Stock) -> dict[str, int]:
    names = [name for name in stock.usage.count() if name.startswith("dropped_tokens_")]
    return {name.removeprefix("dropped_tokens_"): stock.usage.count()[name] for name in names}


@pytest.mark.parametrize("queue_bytes", [9 * MIB // 16, BLOCK_BYTES, 1000])
def test_a_burst_gets_to_the_disk_through_a_small_queue(queue_bytes: int, tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=16 * MIB, queue_bytes=queue_bytes) as stock:
        fill(stock)
        assert shrink_with_the_disk(stock, MIB) > 3
        assert stock.table.nbytes <= MIB
        assert [num_found(stock, chat) for chat in CHATS] == [1024] * 10
        assert dropped(stock) == {}


def test_the_ladder_and_the_disk_together_lose_nothing(tmp_path: Path) -> None:
    ladder, goes_on = LadderConfig(by_pressure=True), threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with store_on(tmp_path, hot_bytes=16 * MIB, queue_bytes=9 * MIB // 16, ladder=ladder, files=files) as stock:
        fill(stock)
        # As long as the disk takes nothing, spans step down as far as they may; then the store waits for it.
        assert stock.reclaimer.shrink_to(MIB // 2, 0.0) == "steps_down"
        while not stock.transcoder.jobs.idle:
            stock.transcoder.jobs.run(1.0)
        assert stock.reclaimer.shrink_to(MIB // 2, 0.0) == "awaits_disk"
        assert set(stock.usage.usage().by_precision) == {"planes:4"}
        assert [stock.store.lookup(chat, "").num_tokens for chat in CHATS] == [1024] * 10
        goes_on.set()
        shrink_with_the_disk(stock, MIB // 2)
        assert stock.table.nbytes <= MIB // 2
        assert [num_found(stock, chat) for chat in CHATS] == [1024] * 10
        assert dropped(stock) == {}


def test_memory_that_is_needed_now_is_not_waited_for_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    goes_on = threading.Event()
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=FaultyFiles(before={"sync": wait_for(goes_on)})) as stock:
        fill(stock)
        assert stock.reclaimer.shrink_to(MIB) == "awaits_disk"
        assert stock.table.nbytes == 10 * MIB
        stock.reclaimer.shrink_to(5 * MIB, most_bytes=5 * MIB)
        assert stock.table.nbytes <= 5 * MIB
        # Of one of them the first block is in the queue.
        assert dropped(stock) == {"disk_slow": 5 * 1024 - 256}
        assert stock.usage.count()["refused_disk_slow"] == 5
        goes_on.set()


def test_what_the_disk_has_goes_rather_than_what_would_be_lost(tmp_path: Path) -> None:
    goes_on, files = threading.Event(), FaultyFiles()
    with store_on(tmp_path, queue_bytes=4 * BLOCK_BYTES, files=files) as stock:
        fill(stock)
        newest = tuple(stock.table.entries)[-1]
        stock.offloader.add_entry(newest)
        settle(stock)
        assert written(stock) == 1024
        # Whatever it is worth: the others are much older.
        stock.candidates._clock.now_s += 1e6  # pyright: ignore[reportFunctionMemberAccess]
        stock.store.release(stock.store.lease(CHATS[-1], ""))
        files.before = {"sync": wait_for(goes_on)}
        stock.reclaimer.shrink_to(stock.table.nbytes - 2 * MIB, most_bytes=stock.table.nbytes - 2 * MIB)
        assert stock.store.lookup(CHATS[-1], "").num_tokens == 0
        assert dropped(stock) == {}
        goes_on.set()


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EIO, "disk_failed"), (errno.EROFS, "disk_failed"), (errno.ENOSPC, "disk_full")]
)
def test_a_disk_that_fails_holds_up_nobody(code: int, reason: str, tmp_path: Path) -> None:
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=FaultyFiles(before={"sync": fail(code)})) as stock:
        fill(stock)
        stock.reclaimer.shrink_to(9 * MIB)
        while not stock.disk.tier.usage().paused_because:
            pass
        assert stock.reclaimer.shrink_to(MIB) == "done"
        assert stock.table.nbytes <= MIB
        assert set(dropped(stock)) == {reason}
        assert dropped(stock)[reason] >= 8 * 1024


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=files, patience_s=0.2) as stock:
        fill(stock)
        assert stock.reclaimer.shrink_to(9 * MIB) == "awaits_disk"
        while stock.reclaimer.shrink_to(9 * MIB) == "awaits_disk":
            pass
        # From now on no request waits.
        assert stock.reclaimer.shrink_to(MIB) == "done"
        assert dropped(stock)["disk_slow"] >= 8 * 1024
        goes_on.set()


def test_what_is_not_written_by_choice_is_counted_so(tmp_path: Path) -> None:
    with store_on(tmp_path, second_touch=True) as stock:
        fill(stock)
        assert stock.reclaimer.shrink_to(9 * MIB) == "done"
        assert set(dropped(stock)) == {"first_touch"}
    with store_on(tmp_path / "budget", daily_write_bytes=1000) as stock:
        fill(stock)
        assert stock.reclaimer.shrink_to(9 * MIB) == "done"
        assert set(dropped(stock)) == {"write_budget"}


def test_what_found_the_queue_full_is_written_as_soon_as_there_is_room(tmp_path: Path) -> None:
    """Also where no request comes that would need the memory."""
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES) as stock:
        fill(stock)
        stock.offloader.offer_changed()
        for _ in range(1000):
            settle(stock)
            assert stock.disk.tier.flush(60).is_empty
            if not stock.background.has_work:
                break
        assert [reachable(stock, chat) for chat in CHATS] == [1024] * 10


def test_what_the_disk_has_too_goes_before_others_step_down(tmp_path: Path) -> None:
    with store_on(tmp_path, ladder=LadderConfig(by_pressure=True)) as stock:
        fill(stock)
        stock.offloader.add_entry(tuple(stock.table.entries)[5])
        settle(stock)
        assert stock.reclaimer.shrink_to(9 * MIB, 0.0) == "done"
        assert stock.store.lookup(CHATS[5], "").num_tokens < 1024
        assert stock.usage.count()["stepped_down_spans"] == 0
        # Now none of them is on the disk, and memory is still short.
        stock.reclaimer.shrink_to(8 * MIB, 0.0)
        assert stock.usage.count()["stepped_down_spans"] > 0


def test_what_is_in_use_is_not_thrown_out_just_because_the_disk_has_it(tmp_path: Path) -> None:
    """Where the disk takes nothing that was asked for once, only what is asked for often is there."""
    with store_on(tmp_path, second_touch=True) as stock:
        fill(stock)
        stock.candidates._clock.now_s += 1e6  # pyright: ignore[reportFunctionMemberAccess]
        stock.store.release(stock.store.lease(CHATS[0], ""))
        stock.offloader.offer_changed()
        settle(stock)
        assert written(stock) == 1024
        assert stock.reclaimer.shrink_to(5 * MIB) == "done"
        assert stock.store.lookup(CHATS[0], "").num_tokens == 1024


def test_what_is_written_ahead_of_need_waits_for_the_disk_beside_streams(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    queue_bytes = 16 * BLOCK_BYTES
    with store_on(tmp_path, queue_bytes=queue_bytes, files=files, disk_write="after-reply") as stock:
        fill(stock)
        while stock.background.has_work_beside_streams:
            stock.background.run_background(0)
        queued_bytes = stock.disk.tier.writing().queue_bytes
        assert CALM_SHARE * queue_bytes < queued_bytes <= CALM_SHARE * queue_bytes + BLOCK_BYTES
        assert stock.background.has_work
        goes_on.set()
        while stock.background.has_work:
            settle(stock)
            assert stock.disk.tier.flush(60).is_empty
        assert [reachable(stock, chat) for chat in CHATS] == [1024] * 10


def test_what_memory_must_let_go_waits_for_no_calm_disk(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with store_on(tmp_path, queue_bytes=16 * BLOCK_BYTES, files=files, disk_write="after-reply") as stock:
        fill(stock)
        while stock.background.has_work_beside_streams:
            stock.background.run_background(0)
        stock.reclaimer.shrink_to(stock.table.nbytes, 0.0)
        assert stock.background.has_work_beside_streams
        goes_on.set()
