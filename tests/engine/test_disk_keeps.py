"""What the disk keeps of what it was given: through faults, pauses, pins, evictions and expiry."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Failed, Request
from kvstrata.prefix_cache.keys import as_ids
from kvstrata.tiers.disk.tier import DiskTier
from kvstrata.tiers.lookups import run_walk
from kvstrata.tiers.write_limits import Backoff
from tests.engine.drive import GREEDY
from tests.engine.test_disk import MIB, cached, engine_on, flush_tier, make_computing_slow, make_prefill_fail, settle
from tests.engine.test_engine import Reply
from tests.support.eventually import eventually
from tests.support.models import VOCAB, tiny_loaded
from tests.tiers.disk.faults import FaultyFiles, fail, fail_once

SMALL_DISK = 3 * MIB  # some prompts of 600 tokens


def prompt_of(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCAB, 600).tolist())


def ask(engine: Engine, seed: int) -> int:
    """A prompt that shares nothing with the others. Tells how much of it was there."""
    reply = Reply()
    engine.ask(make_computing_slow).result(60)
    engine.submit(Request(f"{seed} {uuid.uuid4()}", prompt_of(seed), 2, GREEDY), reply.sink)
    found = cached(reply)
    settle(engine)
    assert engine.ask(flush_tier).result(60)
    return found


def fill_disk_with_others(engine: Engine, *, first: int = 100, between: Callable[[], object] = lambda: None) -> None:
    """More of them than it has room for."""
    for seed in range(first, first + 12):
        ask(engine, seed)
        between()


def disk_of(engine: Engine) -> DiskTier:
    def question(core: EngineCore) -> DiskTier:
        tier = core.prefix_cache.disk.tier
        assert isinstance(tier, DiskTier)
        return tier

    return engine.ask(question).result(60)


def is_on_disk(engine: Engine, seed: int) -> bool:
    """All of a prompt but its last token, as a restart would find it."""

    def question(core: EngineCore) -> bool:
        root = next(entry.root_key for entry in core.prefix_cache.table.entries)
        match = run_walk(core.prefix_cache.disk.longest_chain(root, as_ids(prompt_of(seed)[:-1])))
        return match.num_tokens == 599

    return engine.ask(question).result(60)


class LongBackoff(Backoff):
    """It is not over before the test is, however busy the machine."""

    def __init__(self, _: float, __: float) -> None:
        super().__init__(3600.0, 3600.0)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_what_the_disk_failed_to_write_is_written_when_it_can_be(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.tiers.disk.writer.Backoff", LongBackoff)
    loaded, files = tiny_loaded(architecture), FaultyFiles()
    with engine_on(tmp_path, loaded, KvConfig(), files=files) as engine:
        files.before = {"sync": fail(errno.ENOSPC)}
        assert ask(engine, 1) == 0
        assert not list(tmp_path.rglob("*.safetensors"))
        assert disk_of(engine).usage().paused_because
        files.before = {}
        # The pause is still on, and these are not taken either.
        assert [ask(engine, seed) for seed in (2, 3)] == [0, 0]
        assert not list(tmp_path.rglob("*.safetensors"))
    with engine_on(tmp_path, loaded) as engine:
        assert [ask(engine, seed) for seed in (1, 2, 3)] == [599] * 3


@pytest.mark.parametrize("architecture", ["llama", "mamba2", "gemma3_text"])
def test_after_reply_writes_while_the_server_runs(architecture: str, tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded(architecture)) as engine:
        ask(engine, 1)
        assert is_on_disk(engine, 1)


def test_at_eviction_writes_nothing_while_memory_has_room(tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig(disk_write="on_evict")) as engine:
        ask(engine, 1)
        assert not list(tmp_path.rglob("*.safetensors"))
    assert list(tmp_path.rglob("*.safetensors"))


def test_what_somebody_deleted_is_written_again_before_it_is_evicted(tmp_path: Path) -> None:
    def evict_all(core: EngineCore) -> int:
        core.prefix_cache.reclaimer.shrink_to(0)
        return core.prefix_cache.table.nbytes

    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig()) as engine:
        assert ask(engine, 1) == 0
        assert engine.ask(flush_tier).result(60)
        shutil.rmtree(tmp_path / "blocks")
        assert ask(engine, 2) == 0
        assert engine.ask(flush_tier).result(60)
        assert engine.ask(evict_all).result(60) == 0
        assert engine.ask(flush_tier).result(60)
        assert [ask(engine, seed) for seed in (1, 2)] == [599, 599]


def test_a_fault_while_the_server_ends_costs_nothing_if_it_was_one(tmp_path: Path) -> None:
    loaded, files = tiny_loaded("llama"), FaultyFiles()
    with engine_on(tmp_path, loaded, files=files) as engine:
        for seed in (1, 2, 3):
            ask(engine, seed)
        fail_once(files, "sync", errno.ENOSPC)
    with engine_on(tmp_path, loaded) as engine:
        assert [ask(engine, seed) for seed in (1, 2, 3)] == [599] * 3


def test_a_disk_that_stays_broken_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    files = FaultyFiles(before={"create": fail(errno.EROFS)})
    with engine_on(tmp_path, tiny_loaded("llama"), files=files, flush_s=600.0) as engine:
        for seed in (1, 2, 3):
            ask(engine, seed)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_failed_to_be_written_is_written_again_before_it_is_evicted(tmp_path: Path) -> None:
    loaded, files = tiny_loaded("llama"), FaultyFiles()
    with engine_on(tmp_path, loaded, KvConfig(), files=files) as engine:
        files.before = {"sync": fail(errno.ENOSPC)}
        ask(engine, 1)
        files.before = {}
        disk_of(engine).end_pause()
        engine.ask(lambda core: core.prefix_cache.reclaimer.shrink_to(0)).result(60)
        assert engine.ask(flush_tier).result(60)
        assert ask(engine, 1) == 599


def test_what_is_asked_for_often_is_not_the_first_to_leave_the_disk(tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig(), SMALL_DISK) as engine:
        ask(engine, 1)
        fill_disk_with_others(engine, between=lambda: ask(engine, 1))
        assert is_on_disk(engine, 1)
        assert not is_on_disk(engine, 100)


def test_what_is_pinned_does_not_leave_the_disk(tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig(), SMALL_DISK) as engine:
        ask(engine, 1)
        engine.ask(lambda core: core.prefix_cache.pins.pin(prompt_of(1), "")).result(60)
        fill_disk_with_others(engine)
        assert is_on_disk(engine, 1)
        engine.ask(lambda core: core.prefix_cache.pins.unpin(prompt_of(1), "")).result(60)
        fill_disk_with_others(engine, first=200)
        assert not is_on_disk(engine, 1)


def test_what_is_pinned_before_it_is_written_does_not_leave_the_disk(tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig(), SMALL_DISK) as engine:
        ask(engine, 1)
        engine.ask(lambda core: core.prefix_cache.pins.pin(prompt_of(1), "")).result(60)
        for seed in range(100, 112):
            ask(engine, seed)
            engine.ask(write_all).result(60)
        assert is_on_disk(engine, 1)


def test_pins_outlive_a_step_that_fails(tmp_path: Path) -> None:
    """On the disk; and in memory again as soon as it is there again."""
    with engine_on(tmp_path, tiny_loaded("llama"), KvConfig(), SMALL_DISK) as engine:
        ask(engine, 1)
        engine.ask(lambda core: core.prefix_cache.pins.pin(prompt_of(1), "")).result(60)
        engine.ask(make_prefill_fail).result(60)
        engine.submit(Request("failing", prompt_of(2), 2, GREEDY), (failing := Reply()).sink)
        assert isinstance(failing.wait(), Failed)
        assert engine.ask(lambda core: CacheApi(core).usage().tiers["hot"].tokens).result(60) == 0
        fill_disk_with_others(engine)
        assert is_on_disk(engine, 1)
        assert ask(engine, 1) == 599
        assert engine.ask(lambda core: CacheApi(core).usage().pinned_bytes).result(60) > 0
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        assert engine.ask(lambda core: core.prefix_cache.lookup(prompt_of(1), "").num_tokens).result(60) == 600
        engine.ask(lambda core: core.prefix_cache.pins.unpin(prompt_of(1), "")).result(60)
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        assert engine.ask(lambda core: CacheApi(core).usage().tiers["hot"].tokens).result(60) == 0


def write_all(core: EngineCore) -> bool:
    for entry in core.prefix_cache.table.entries:
        core.prefix_cache.offloader.add_entry(entry)
    while core.pacer.has_work:
        core.pacer.run_slice(1.0)
    return flush_tier(core)


def test_the_end_writes_what_the_disk_has_evicted_and_the_newest_stays(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", 4)
    with engine_on(tmp_path, loaded, KvConfig(), SMALL_DISK) as engine:
        ask(engine, 1)
        fill_disk_with_others(engine)
        assert not is_on_disk(engine, 1)
        assert ask(engine, 1) == 599  # from memory
        assert not is_on_disk(engine, 1)
    with engine_on(tmp_path, loaded, KvConfig(), SMALL_DISK) as engine:
        assert ask(engine, 1) == 599
        assert ask(engine, 111) == 599


def test_what_has_expired_is_neither_written_nor_kept(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded) as engine:
        ask(engine, 1)
    assert list(tmp_path.rglob("*.safetensors"))
    with engine_on(tmp_path, loaded, KvConfig(ttl_s=0.01, disk_write="on_evict")) as engine:
        assert engine.ask(flush_tier).result(60)
        assert not list(tmp_path.rglob("*.safetensors"))
        ask(engine, 2)
        eventually(lambda: not engine.ask(num_entries_in_time).result(60), 30)
        settle(engine)
        assert engine.ask(flush_tier).result(60)
        assert disk_of(engine).usage().counters["written"] == {}
    assert not list(tmp_path.rglob("*.safetensors"))


def num_entries_in_time(core: EngineCore) -> int:
    core.prefix_cache.evictor.expire()
    return len(core.prefix_cache.table.entries)
