"""Much has to go at once: what a working disk has room for gets there, and what is lost is counted by its reason."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from kvstrata.store.precision.pressure import LadderOptions
from kvstrata.store.store import Store
from tests.disk.faults import FaultyFiles, fail, wait_for
from tests.store.disk import MIB, random_tokens, reachable, store_on, written
from tests.store.kv import TOKEN_BYTES, settle, store_tokens

CHATS = [random_tokens(1024, seed) for seed in range(10)]  # 1 MiB each, in 4 blocks
BLOCK_BYTES = 256 * TOKEN_BYTES


def fill(store: Store) -> None:
    for chat in CHATS:
        store_tokens(store, chat)
    while not store._mover.idle:
        store.work(0)


def shrink_with_the_disk(store: Store, limit_bytes: int) -> int:
    """As the engine does it. Tells how often it had to wait for the disk."""
    num_waits = 0
    while store.shrink_to(limit_bytes) == "awaits_disk":
        num_waits += 1
        assert store.cold.tier.flush(60).is_empty
    return num_waits


def num_found(store: Store, chat: list[int]) -> int:
    return max(store.find(chat, "").num_tokens, reachable(store, chat))


def dropped(store: Store) -> dict[str, int]:
    names = [name for name in store.count() if name.startswith("dropped_tokens_")]
    return {name.removeprefix("dropped_tokens_"): store.count()[name] for name in names}


@pytest.mark.parametrize("queue_bytes", [9 * MIB // 16, BLOCK_BYTES, 1000])
def test_a_burst_gets_to_the_disk_through_a_small_queue(queue_bytes: int, tmp_path: Path) -> None:
    with store_on(tmp_path, hot_bytes=16 * MIB, queue_bytes=queue_bytes) as store:
        fill(store)
        assert shrink_with_the_disk(store, MIB) > 3
        assert store.held_bytes <= MIB
        assert [num_found(store, chat) for chat in CHATS] == [1024] * 10
        assert dropped(store) == {}


def test_the_ladder_and_the_disk_together_lose_nothing(tmp_path: Path) -> None:
    ladder, goes_on = LadderOptions(by_pressure=True), threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with store_on(tmp_path, hot_bytes=16 * MIB, queue_bytes=9 * MIB // 16, ladder=ladder, files=files) as store:
        fill(store)
        # As long as the disk takes nothing, spans step down as far as they may; then the store waits for it.
        assert store.shrink_to(MIB // 2, 0.0) == "steps_down"
        while not store._mover.idle:
            store._mover.work(1.0)
        assert store.shrink_to(MIB // 2, 0.0) == "awaits_disk"
        assert set(store.usage().by_precision) == {"planes:4"}
        assert [store.find(chat, "").num_tokens for chat in CHATS] == [1024] * 10
        goes_on.set()
        shrink_with_the_disk(store, MIB // 2)
        assert store.held_bytes <= MIB // 2
        assert [num_found(store, chat) for chat in CHATS] == [1024] * 10
        assert dropped(store) == {}


def test_memory_that_is_needed_now_is_not_waited_for_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    goes_on = threading.Event()
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=FaultyFiles(before={"sync": wait_for(goes_on)})) as store:
        fill(store)
        assert store.shrink_to(MIB) == "awaits_disk"
        assert store.held_bytes == 10 * MIB
        store.shrink_to(5 * MIB, most_bytes=5 * MIB)
        assert store.held_bytes <= 5 * MIB
        # Of one of them the first block is in the queue.
        assert dropped(store) == {"disk_slow": 5 * 1024 - 256}
        assert store.count()["refused_disk_slow"] == 5
        goes_on.set()


def test_what_the_disk_has_goes_rather_than_what_would_be_lost(tmp_path: Path) -> None:
    goes_on, files = threading.Event(), FaultyFiles()
    with store_on(tmp_path, queue_bytes=4 * BLOCK_BYTES, files=files) as store:
        fill(store)
        newest = store.entries[-1]
        store._spills.add(newest)
        settle(store)
        assert written(store) == 1024
        # Whatever it is worth: the others are much older.
        store._shelf._clock.now_s += 1e6  # pyright: ignore[reportFunctionMemberAccess]
        store.release(store.match(CHATS[-1], ""))
        files.before = {"sync": wait_for(goes_on)}
        store.shrink_to(store.held_bytes - 2 * MIB, most_bytes=store.held_bytes - 2 * MIB)
        assert store.find(CHATS[-1], "").num_tokens == 0
        assert dropped(store) == {}
        goes_on.set()


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.EIO, "disk_failed"), (errno.EROFS, "disk_failed"), (errno.ENOSPC, "disk_full")]
)
def test_a_disk_that_fails_holds_up_nobody(code: int, reason: str, tmp_path: Path) -> None:
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=FaultyFiles(before={"sync": fail(code)})) as store:
        fill(store)
        store.shrink_to(9 * MIB)
        while not store.cold.tier.usage().paused_because:
            pass
        assert store.shrink_to(MIB) == "done"
        assert store.held_bytes <= MIB
        assert set(dropped(store)) == {reason}
        assert dropped(store)[reason] >= 8 * 1024


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES, files=files, patience_s=0.2) as store:
        fill(store)
        assert store.shrink_to(9 * MIB) == "awaits_disk"
        while store.shrink_to(9 * MIB) == "awaits_disk":
            pass
        # From now on nobody waits.
        assert store.shrink_to(MIB) == "done"
        assert dropped(store)["disk_slow"] >= 8 * 1024
        goes_on.set()


def test_what_is_not_written_by_choice_is_counted_so(tmp_path: Path) -> None:
    with store_on(tmp_path, second_touch=True) as store:
        fill(store)
        assert store.shrink_to(9 * MIB) == "done"
        assert set(dropped(store)) == {"first_touch"}
    with store_on(tmp_path / "budget", daily_write_bytes=1000) as store:
        fill(store)
        assert store.shrink_to(9 * MIB) == "done"
        assert set(dropped(store)) == {"write_budget"}


def test_what_found_the_queue_full_is_written_as_soon_as_there_is_room(tmp_path: Path) -> None:
    """Also where no request comes that would need the memory."""
    with store_on(tmp_path, queue_bytes=BLOCK_BYTES) as store:
        fill(store)
        store.spill()
        for _ in range(1000):
            settle(store)
            assert store.cold.tier.flush(60).is_empty
            if not store.has_work:
                break
        assert [reachable(store, chat) for chat in CHATS] == [1024] * 10


def test_what_the_disk_has_too_goes_before_others_step_down(tmp_path: Path) -> None:
    with store_on(tmp_path, ladder=LadderOptions(by_pressure=True)) as store:
        fill(store)
        store._spills.add(store.entries[5])
        settle(store)
        assert store.shrink_to(9 * MIB, 0.0) == "done"
        assert store.find(CHATS[5], "").num_tokens < 1024
        assert store.count()["stepped_down_spans"] == 0
        # Now none of them is on the disk, and memory is still short.
        store.shrink_to(8 * MIB, 0.0)
        assert store.count()["stepped_down_spans"] > 0


def test_what_is_in_use_is_not_thrown_out_just_because_the_disk_has_it(tmp_path: Path) -> None:
    """Where the disk takes nothing that was asked for once, only what is asked for often is there."""
    with store_on(tmp_path, second_touch=True) as store:
        fill(store)
        store._shelf._clock.now_s += 1e6  # pyright: ignore[reportFunctionMemberAccess]
        store.release(store.match(CHATS[0], ""))
        store.spill()
        settle(store)
        assert written(store) == 1024
        assert store.shrink_to(5 * MIB) == "done"
        assert store.find(CHATS[0], "").num_tokens == 1024
