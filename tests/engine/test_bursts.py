"""A request that needs much memory at once waits while the disk takes evicted leaves, and streams do not wait."""

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

from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Finished, Request
from kvstrata.engine.sequence import Sequence
from kvstrata.kv.packing import count_labels
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.keys import as_ids, chain
from kvstrata.prefix_cache.reclaim import MOST_OVER
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.options import DiskOptions
from tests.engine.drive import GREEDY, Drive
from tests.engine.test_disk import MIB, answer, cached, engine_on, settle
from tests.engine.test_engine import Reply
from tests.engine.test_loop import prompt
from tests.support.eventually import eventually
from tests.support.models import tiny_loaded
from tests.tiers.disk.faults import Act, FaultyFiles, fail, wait_for

NUM_CHATS = 8
CHAT_TOKENS = 512
LIMITS = EngineLimits(buffer_step_tokens=16)


@contextmanager
def full_drive(
    folder: Path,
    loaded: LoadedModel,
    storage: KvConfig | None = None,
    files: Filesystem | None = None,
    queue_share: float = 1 / 16,
) -> Iterator[Drive]:
    """Yield an engine with `NUM_CHATS` chats in memory and none on the disk. The disk's queue holds `queue_share` of
    their bytes."""
    chat_bytes = CHAT_TOKENS * Drive(loaded).budget.token_bytes
    queue_bytes = int(NUM_CHATS * chat_bytes * queue_share)
    options = DiskOptions(folder, 256 * MIB, queue_bytes=queue_bytes, reserve_bytes=0)
    tier = DiskTier(options, chain=chain, tally=count_labels, files=files)
    kv_bytes = (NUM_CHATS + 4) * chat_bytes
    storage = dataclasses.replace(storage or KvConfig(), disk_write="on_evict")
    drive = Drive(loaded, LIMITS, kv_bytes=kv_bytes, storage=storage, tier=tier)
    offer_under_pressure = drive.prefix_cache.offloader.offer_under_pressure
    drive.prefix_cache.offloader.offer_under_pressure = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    for seed in range(NUM_CHATS):
        drive.submit(prompt(CHAT_TOKENS, seed=seed), 2)
        drive.run()
    while drive.core.pacer.has_work:
        drive.core.pacer.run_slice(1.0)
    drive.prefix_cache.offloader.offer_under_pressure = offer_under_pressure
    assert tier.usage().num_queued == tier.usage().num_blocks == 0
    yield drive
    tier.close()


def num_kept(drive: Drive, seed: int) -> int:
    """Return how many tokens of a chat memory or the disk has."""
    ids = as_ids(prompt(CHAT_TOKENS, seed=seed)[:-1])
    on_disk = run_walk(drive.prefix_cache.disk.longest_chain(drive.prefix_cache.matcher.root_of(""), ids))
    return max(drive.prefix_cache.lookup(ids, "").num_tokens, on_disk.num_tokens)


def step_until_request_waits_for_memory(drive: Drive) -> None:
    """Run steps until the disk has answered the lookup and the first request waits for memory."""
    until_s = time.monotonic() + 60
    while (
        drive.core.admission.patience_left_s(drive.core.sequences.waiting[0]) == math.inf
        or not drive.core.executor.is_stalled
    ):
        assert time.monotonic() < until_s
        drive.core.executor.step()


def waiting(drive: Drive) -> Sequence:
    drive.submit(prompt(32, seed=77), 2)
    return drive.core.sequences.waiting[0]


def dropped(drive: Drive) -> dict[str, int]:
    return {name: count for name, count in drive.prefix_cache.usage.counters().items() if name.startswith("dropped_")}


@pytest.mark.parametrize("dynamic", [False, True])
def test_request_waits_for_disk_while_stream_decodes_and_no_token_is_lost(dynamic: bool, tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    # At 8 bits the memory almost holds all chats.
    storage = KvConfig(dynamic=dynamic, floor_bits=8)
    with full_drive(tmp_path, tiny_loaded("llama"), storage, files) as drive:
        stream = drive.submit(prompt(32, seed=99), 400)
        while len(stream.ids) < 4:
            drive.core.executor.step()
        before = len(stream.ids)
        late = drive.submit(prompt((NUM_CHATS + 2) * CHAT_TOKENS, seed=77), 2)
        while len(stream.ids) < before + 20:
            drive.core.executor.step()
        # The disk has taken nothing yet.
        assert not late.events
        assert dropped(drive) == {}
        resumes.set()
        drive.run(most_steps=1_000_000)
        assert late.finished.usage.completion_tokens == 2
        assert dropped(drive) == {}
        assert [num_kept(drive, seed) for seed in range(NUM_CHATS)] == [CHAT_TOKENS - 1] * NUM_CHATS


def test_request_with_free_memory_does_not_wait_for_disk(tmp_path: Path) -> None:
    """Bytes above the share of cached KV are evicted once the disk has them."""
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    loaded = tiny_loaded("llama")
    hot_bytes = (NUM_CHATS * CHAT_TOKENS + 200) * Drive(loaded).budget.token_bytes
    with full_drive(tmp_path, loaded, KvConfig(hot_bytes=hot_bytes), files) as drive:
        late = drive.submit(prompt(CHAT_TOKENS // 2, seed=77), 2)
        drive.run()
        assert late.finished.usage.completion_tokens == 2
        assert hot_bytes < drive.prefix_cache.table.nbytes <= MOST_OVER * hot_bytes
        assert dropped(drive) == {}
        resumes.set()
        until_s = time.monotonic() + 60
        while drive.prefix_cache.table.nbytes > hot_bytes:
            assert time.monotonic() < until_s
            drive.core.pacer.run_slice(0.01)
        assert dropped(drive) == {}


def test_request_waits_only_until_cached_bytes_nearly_fit(tmp_path: Path) -> None:
    """Background work does the rest between later steps. The disk could take all bytes at once."""
    with full_drive(tmp_path, tiny_loaded("llama"), queue_share=1.0) as drive:
        table, reclaimer = drive.prefix_cache.table, drive.prefix_cache.reclaimer
        chat_bytes = table.nbytes / NUM_CHATS
        table.max_bytes = int(NUM_CHATS / 2 * chat_bytes)
        assert drive.core.admission.reclaim_for([waiting(drive)], [0], 2 * table.nbytes, slice_s=math.inf) == 1
        assert table.max_bytes + chat_bytes <= table.nbytes <= MOST_OVER * table.max_bytes
        assert reclaimer.shrink_to(table.max_bytes) == "done"
        assert table.nbytes <= table.max_bytes
        assert dropped(drive) == {}


def test_request_waits_for_disk_no_longer_than_its_patience(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    with full_drive(tmp_path, tiny_loaded("llama"), None, files) as drive:
        late = drive.submit(prompt((NUM_CHATS + 2) * CHAT_TOKENS, seed=77), 2)
        step_until_request_waits_for_memory(drive)
        assert drive.core.executor.is_stalled
        assert 0 < drive.core.admission.seconds_to_wait() <= 60
        assert not late.events
        drive.clock.advance(61)
        drive.run()
        assert late.finished.usage.completion_tokens == 2
        assert set(dropped(drive)) == {"dropped_tokens_disk_slow"}
        resumes.set()


def test_growing_stream_does_not_wait_for_disk(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    with full_drive(tmp_path, tiny_loaded("llama"), None, files) as drive:
        stream = drive.submit(prompt(3 * CHAT_TOKENS, seed=99), 600)
        drive.run()
        assert stream.finished.usage.completion_tokens == 600
        assert set(dropped(drive)) == {"dropped_tokens_disk_slow"}
        resumes.set()


def test_prefix_of_waiting_request_is_kept_for_it(tmp_path: Path) -> None:
    """The prefix is the least recently used entry of all."""
    with full_drive(tmp_path, tiny_loaded("llama")) as drive:
        longer = prompt(CHAT_TOKENS, seed=0) + prompt((NUM_CHATS + 1) * CHAT_TOKENS, seed=77)
        late = drive.submit(longer, 2)
        drive.run(most_steps=1_000_000)
        assert late.finished.usage.cached_tokens >= CHAT_TOKENS
        assert dropped(drive) == {}


def test_cancelled_waiting_request_releases_its_prefix(tmp_path: Path) -> None:
    resumes = threading.Event()
    files = FaultyFiles(before={"sync": wait_for(resumes)})
    with full_drive(tmp_path, tiny_loaded("llama"), None, files) as drive:
        late = drive.submit(prompt(CHAT_TOKENS, seed=0) + prompt((NUM_CHATS + 1) * CHAT_TOKENS, seed=77), 2)
        step_until_request_waits_for_memory(drive)
        assert drive.prefix_cache.table.evictable_bytes < drive.prefix_cache.table.nbytes
        drive.core.executor.end_request(late.request.id)
        assert drive.core.executor.is_idle
        assert drive.prefix_cache.table.evictable_bytes == drive.prefix_cache.table.nbytes
        resumes.set()


def test_disk_wakes_engine_after_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wake the engine would rest for an hour."""
    monkeypatch.setattr("kvstrata.engine.admission.MAX_REST_S", 3600.0)
    resumes, waits = threading.Event(), threading.Event()

    def hang() -> None:
        waits.set()
        resumes.wait(30)

    files = FaultyFiles()
    with engine_on(tmp_path, tiny_loaded("llama"), queue_bytes=1000, wait_s=3600.0, files=files) as engine:
        answer(engine, "first", 700)
        settle(engine)
        files.before = {"sync": hang}
        engine.ask(leave_memory_for_one).result(60)
        reply = Reply()
        engine.submit(Request("second", tuple(prompt(900, seed=5)), 2, GREEDY), reply.sink)
        assert waits.wait(60)
        assert not reply.events
        resumes.set()
        assert isinstance(reply.wait(), Finished)
        assert cached(answer(engine, "again", 700)) == 699


def leave_memory_for_one(core: EngineCore) -> None:
    core.memory.budget = dataclasses.replace(core.budget, total_bytes=1000 * core.budget.token_bytes)


def log_line_of_final_write(
    folder: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture, before: dict[str, Act], flush_s: float
) -> str:
    # No block is written before the end: a write after the reply could come before the fault is in place.
    storage = KvConfig(disk_write="on_evict")
    with engine_on(folder, tiny_loaded("llama", 4), storage, files=files, flush_s=flush_s) as engine:
        answer(engine, "first", 700)
        files.before = before
    files.before = {}
    (line,) = [record.getMessage() for record in caplog.records if "conversations" in record.getMessage()]
    return line


def test_log_reports_tokens_not_written_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_synced = itertools.count()

    def hang_after_one() -> None:
        """Hang until the log line appears: closing waits for the current block."""
        if next(num_synced) > 0:
            eventually(lambda: "conversations" in caplog.text, 30)

    line = log_line_of_final_write(tmp_path, FaultyFiles(), caplog, {"sync": hang_after_one}, 1.0)
    # 711 tokens, of which 256 were written.
    assert line.startswith("455 tokens of 1 conversations (0.4 MiB) were not written to the disk cache within 1.")
    assert "the time was up (455 tokens)" in line
    assert "it would have taken" in line


@pytest.mark.parametrize(
    ("code", "why"), [(errno.EIO, "the disk could not be written"), (errno.ENOSPC, "the disk has no room for it")]
)
def test_log_reports_why_disk_took_nothing(
    code: int, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = log_line_of_final_write(tmp_path, FaultyFiles(), caplog, {"sync": fail(code)}, 30.0)
    assert f"{why} (711 tokens)" in line
    assert "is not known" in line


def test_log_is_silent_after_complete_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_on(tmp_path, tiny_loaded("llama")) as engine:
        answer(engine, "first", 700)
    assert "conversations" not in caplog.text
