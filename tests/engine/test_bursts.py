"""A request that needs much memory at once, while the disk takes what has to go: who waits, and for how long."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.disk.tier import DiskTier
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Finished, Request
from kvstrata.engine.sequence import Sequence
from kvstrata.models.loaded import LoadedModel
from kvstrata.prefix_cache.keys import as_ids, chain
from kvstrata.prefix_cache.reclaim import MOST_OVER
from kvstrata.spans.contents import tally
from kvstrata.tier.lookups import finish
from tests.disk.faults import Act, FaultyFiles, fail, wait_for
from tests.engine.drive import GREEDY, Drive
from tests.engine.test_disk import MIB, answer, cached, engine_on, settle
from tests.engine.test_engine import Reply
from tests.engine.test_loop import prompt
from tests.tiny import tiny_loaded

NUM_CHATS = 8
CHAT_TOKENS = 512
LIMITS = EngineLimits(buffer_step_tokens=16)


@contextmanager
def full_drive(
    folder: Path,
    loaded: LoadedModel,
    storage: KvConfig | None = None,
    files: Files | None = None,
    queue_share: float = 1 / 16,
) -> Iterator[Drive]:
    """Memory holds some chats, of which nothing is on the disk, and the disk's queue this share of them."""
    chat_bytes = CHAT_TOKENS * Drive(loaded).budget.token_bytes
    queue_bytes = int(NUM_CHATS * chat_bytes * queue_share)
    options = DiskOptions(folder, 256 * MIB, queue_bytes=queue_bytes, reserve_bytes=0)
    tier = DiskTier(options, chain=chain, tally=tally, files=files)
    kv_bytes = (NUM_CHATS + 4) * chat_bytes
    storage = dataclasses.replace(storage or KvConfig(), disk_write="at-eviction")
    drive = Drive(loaded, LIMITS, kv_bytes=kv_bytes, storage=storage, tier=tier)
    spill_ahead = drive.stock.offloader.offer_under_pressure
    drive.stock.offloader.offer_under_pressure = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    for seed in range(NUM_CHATS):
        drive.submit(prompt(CHAT_TOKENS, seed=seed), 2)
        drive.run()
    while drive.loop.pacer.has_work:
        drive.loop.pacer.run_slice(1.0)
    drive.stock.offloader.offer_under_pressure = spill_ahead
    assert tier.usage().num_queued == tier.usage().num_blocks == 0
    yield drive
    tier.close()


def num_kept(drive: Drive, seed: int) -> int:
    """Tokens of a chat that memory or the disk has."""
    ids = as_ids(prompt(CHAT_TOKENS, seed=seed)[:-1])
    on_disk = finish(drive.stock.disk.longest_chain(drive.stock.matcher.root_of(""), ids))
    return max(drive.stock.store.lookup(ids, "").num_tokens, on_disk.num_tokens)


def step_until_it_waits_for_room(drive: Drive) -> None:
    """First the disk is asked what it has for it."""
    until_s = time.monotonic() + 60
    while (
        drive.loop.admission.patience_left_s(drive.loop.sequences.waiting[0]) == math.inf
        or not drive.loop.executor.is_stalled
    ):
        assert time.monotonic() < until_s
        drive.loop.executor.step()


def waiting(drive: Drive) -> Sequence:
    drive.submit(prompt(32, seed=77), 2)
    return drive.loop.sequences.waiting[0]


def dropped(drive: Drive) -> dict[str, int]:
    return {name: count for name, count in drive.stock.usage.count().items() if name.startswith("dropped_")}


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_request_waits_for_the_disk_while_streams_go_on_and_nothing_is_lost(dynamic: bool, tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    # At 8 bits there would almost be room for all.
    storage = KvConfig(dynamic=dynamic, floor_k_bits=8, floor_v_bits=8)
    with full_drive(tmp_path, tiny_loaded("llama"), storage, files) as drive:
        stream = drive.submit(prompt(32, seed=99), 400)
        while len(stream.ids) < 4:
            drive.loop.executor.step()
        before = len(stream.ids)
        late = drive.submit(prompt((NUM_CHATS + 2) * CHAT_TOKENS, seed=77), 2)
        while len(stream.ids) < before + 20:
            drive.loop.executor.step()
        # The disk has not taken anything yet.
        assert not late.events
        assert dropped(drive) == {}
        goes_on.set()
        drive.run(most_steps=1_000_000)
        assert late.finished.usage.completion_tokens == 2
        assert dropped(drive) == {}
        assert [num_kept(drive, seed) for seed in range(NUM_CHATS)] == [CHAT_TOKENS - 1] * NUM_CHATS


def test_a_request_does_not_wait_for_the_disk_while_there_is_memory(tmp_path: Path) -> None:
    """What is over the share of stored KV goes when the disk has taken it."""
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    loaded = tiny_loaded("llama")
    hot_bytes = (NUM_CHATS * CHAT_TOKENS + 200) * Drive(loaded).budget.token_bytes
    with full_drive(tmp_path, loaded, KvConfig(hot_bytes=hot_bytes), files) as drive:
        late = drive.submit(prompt(CHAT_TOKENS // 2, seed=77), 2)
        drive.run()
        assert late.finished.usage.completion_tokens == 2
        assert hot_bytes < drive.stock.table.nbytes <= MOST_OVER * hot_bytes
        assert dropped(drive) == {}
        goes_on.set()
        until_s = time.monotonic() + 60
        while drive.stock.table.nbytes > hot_bytes:
            assert time.monotonic() < until_s
            drive.loop.pacer.run_slice(0.01)
        assert dropped(drive) == {}


def test_a_request_waits_only_until_what_is_held_nearly_fits(tmp_path: Path) -> None:
    """The rest is for the chores, between later steps. The disk could take all of it at once."""
    with full_drive(tmp_path, tiny_loaded("llama"), queue_share=1.0) as drive:
        shelf, room = drive.stock.table, drive.stock.reclaimer
        chat_bytes = shelf.nbytes / NUM_CHATS
        shelf.max_bytes = int(NUM_CHATS / 2 * chat_bytes)
        assert drive.loop.admission.reclaim_for([waiting(drive)], [0], 2 * shelf.nbytes, slice_s=math.inf) == 1
        assert shelf.max_bytes + chat_bytes <= shelf.nbytes <= MOST_OVER * shelf.max_bytes
        assert room.shrink_to(shelf.max_bytes) == "done"
        assert shelf.nbytes <= shelf.max_bytes
        assert dropped(drive) == {}


def test_a_request_waits_no_longer_than_its_patience(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with full_drive(tmp_path, tiny_loaded("llama"), None, files) as drive:
        late = drive.submit(prompt((NUM_CHATS + 2) * CHAT_TOKENS, seed=77), 2)
        step_until_it_waits_for_room(drive)
        assert drive.loop.executor.is_stalled
        assert 0 < drive.loop.admission.seconds_to_wait() <= 60
        assert not late.events
        now_s = time.monotonic()
        drive.loop.admission._clock = lambda: now_s + 61
        drive.run()
        assert late.finished.usage.completion_tokens == 2
        assert set(dropped(drive)) == {"dropped_tokens_disk_slow"}
        goes_on.set()


def test_a_stream_that_has_to_grow_waits_for_no_disk(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with full_drive(tmp_path, tiny_loaded("llama"), None, files) as drive:
        stream = drive.submit(prompt(3 * CHAT_TOKENS, seed=99), 600)
        drive.run()
        assert stream.finished.usage.completion_tokens == 600
        assert set(dropped(drive)) == {"dropped_tokens_disk_slow"}
        goes_on.set()


def test_what_a_waiting_request_would_go_on_from_is_held_for_it(tmp_path: Path) -> None:
    """Though nothing was asked for longer ago."""
    with full_drive(tmp_path, tiny_loaded("llama")) as drive:
        longer = prompt(CHAT_TOKENS, seed=0) + prompt((NUM_CHATS + 1) * CHAT_TOKENS, seed=77)
        late = drive.submit(longer, 2)
        drive.run(most_steps=1_000_000)
        assert late.finished.usage.cached_tokens >= CHAT_TOKENS
        assert dropped(drive) == {}


def test_one_that_waits_and_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    goes_on = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(goes_on)})
    with full_drive(tmp_path, tiny_loaded("llama"), None, files) as drive:
        late = drive.submit(prompt(CHAT_TOKENS, seed=0) + prompt((NUM_CHATS + 1) * CHAT_TOKENS, seed=77), 2)
        step_until_it_waits_for_room(drive)
        assert drive.stock.table.evictable_bytes < drive.stock.table.nbytes
        drive.loop.executor.end_request(late.request.id)
        assert drive.loop.executor.is_idle
        assert drive.stock.table.evictable_bytes == drive.stock.table.nbytes
        goes_on.set()


def test_the_engine_is_woken_when_the_disk_has_taken_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look again in an hour."""
    monkeypatch.setattr("kvstrata.engine.admission.MAX_REST_S", 3600.0)
    goes_on, waits = threading.Event(), threading.Event()

    def hang() -> None:
        waits.set()
        goes_on.wait(30)

    files = FaultyFiles()
    with engine_on(tmp_path, tiny_loaded("llama"), queue_bytes=1000, wait_s=3600.0, files=files) as engine:
        answer(engine, "first", 700)
        settle(engine)
        files.before = {"sync": hang}
        engine.ask(leave_room_for_one).result(60)
        reply = Reply()
        engine.submit(Request("second", tuple(prompt(900, seed=5)), 2, GREEDY), reply.sink)
        assert waits.wait(60)
        assert not reply.events
        goes_on.set()
        assert isinstance(reply.wait(), Finished)
        assert cached(answer(engine, "again", 700)) == 699


def leave_room_for_one(loop: EngineCore) -> None:
    loop.memory.budget = dataclasses.replace(loop.budget, total_bytes=1000 * loop.budget.token_bytes)


def logged_at_the_end(
    folder: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture, before: dict[str, Act], flush_s: float
) -> str:
    with engine_on(folder, tiny_loaded("llama", 4), files=files, flush_s=flush_s) as engine:
        answer(engine, "first", 700)
        files.before = before
    files.before = {}
    (line,) = [record.getMessage() for record in caplog.records if "conversations" in record.getMessage()]
    return line


def test_the_log_says_what_was_not_written_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_synced = itertools.count()

    def hang_after_one() -> None:
        """Until it is said; closing waits for the block at hand."""
        until_s = time.monotonic() + 30
        while next(num_synced) > 0 and "conversations" not in caplog.text and time.monotonic() < until_s:
            time.sleep(0.01)

    line = logged_at_the_end(tmp_path, FaultyFiles(), caplog, {"sync": hang_after_one}, 1.0)
    # 711 tokens, of which 256 were written.
    assert line.startswith("455 tokens of 1 conversations (0.4 MiB) were not written to the disk cache within 1.")
    assert "the time was up (455 tokens)" in line
    assert "it would have taken" in line


@pytest.mark.parametrize(
    ("code", "why"), [(errno.EIO, "the disk could not be written"), (errno.ENOSPC, "the disk has no room for it")]
)
def test_the_log_says_why_the_disk_took_nothing(
    code: int, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = logged_at_the_end(tmp_path, FaultyFiles(), caplog, {"sync": fail(code)}, 30.0)
    assert f"{why} (711 tokens)" in line
    assert "is not known" in line


def test_the_log_says_nothing_where_all_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_on(tmp_path, tiny_loaded("llama")) as engine:
        answer(engine, "first", 700)
    assert "conversations" not in caplog.text
