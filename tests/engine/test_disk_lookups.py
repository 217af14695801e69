"""Lookups on the disk run on a thread of their own: no step waits for them, and no request for long."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine import prefix_lookup
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Request, TextDelta
from kvstrata.engine.speeds import TokenRate
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.tiers import read_rates
from kvstrata.tiers.block import BlockId
from kvstrata.tiers.disk.chains import DiskChains
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.tier import DiskTier
from tests.engine.drive import GREEDY
from tests.engine.test_disk import answer, cached, engine_on, flush_tier, make_computing_slow, settle, why
from tests.engine.test_engine import Reply
from tests.support.eventually import eventually
from tests.support.models import VOCAB, tiny_loaded


def blocks_of(engine: Engine) -> DiskChains:
    blocks = engine.ask(lambda core: core.prefix_cache.disk.tier.blocks).result(60)
    assert isinstance(blocks, DiskChains)
    return blocks


class Hanging:
    """A disk whose catalogue answers only after the `with` block. `was_asked` is set by the first question."""

    def __init__(self, blocks: DiskChains) -> None:
        self._blocks = blocks
        self._lengths, self._size = blocks.lengths, blocks.size
        self._goes_on = threading.Event()
        self.was_asked = threading.Event()

    def __enter__(self) -> Hanging:
        self._blocks.lengths = self.lengths
        self._blocks.size = self.size
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()

    def lengths(self, parent: bytes) -> tuple[int, ...]:
        self._hang()
        return self._lengths(parent)

    def size(self, block: BlockId) -> int:
        self._hang()
        return self._size(block)

    def _hang(self) -> None:
        self.was_asked.set()
        assert self._goes_on.wait(60)


@contextmanager
def filled(tmp_path: Path, num_tokens: int = 700) -> Iterator[Engine]:
    """An engine with a prompt on disk and not in memory."""
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded) as engine:
        answer(engine, "first", num_tokens)
    with engine_on(tmp_path, loaded) as engine:
        yield engine


def test_request_continues_without_a_late_answer_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookup, "LOOKUP_S", 0.05)
    with filled(tmp_path) as engine:
        with Hanging(blocks_of(engine)) as disk:
            assert cached(answer(engine, "one", 700)) == 0
            assert disk.was_asked.is_set()
        # It answers again.
        monkeypatch.setattr(prefix_lookup, "LOOKUP_S", 60.0)
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        assert cached(answer(engine, "two", 700)) == 699


def test_streams_continue_during_a_disk_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookup, "LOOKUP_S", 3600.0)
    with filled(tmp_path) as engine:
        stream = Reply()
        engine.submit(Request("stream", tuple(range(40)), 3000, GREEDY), stream.sink)
        eventually(lambda: stream.ids, 60)
        waiting, others = Reply(), Reply()
        with Hanging(blocks_of(engine)) as disk:
            engine.ask(make_computing_slow).result(60)
            engine.submit(Request("waiting", tuple(i * 7 % VOCAB for i in range(700)), 2, GREEDY), waiting.sink)
            assert disk.was_asked.wait(60)
            before = len(stream.ids)
            eventually(lambda: len(stream.ids) > before + 20, 60)
            # Memory has all of this one: it is admitted at once.
            engine.submit(Request("others", tuple(range(40)), 2, GREEDY), others.sink)
            others.wait()
            assert not any(isinstance(event, TextDelta) for event in waiting.events)
        assert cached(waiting) == 699
        engine.cancel("stream")
        stream.wait()


def test_withdrawn_lookup_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_lookup, "LOOKUP_S", 3600.0)
    with filled(tmp_path, 2000) as engine:
        asked: list[bytes] = []
        blocks = blocks_of(engine)
        lengths = blocks.lengths
        reply = Reply()
        with Hanging(blocks) as disk:
            engine.submit(Request("cancelled", tuple(i * 7 % VOCAB for i in range(2000)), 2, GREEDY), reply.sink)
            assert disk.was_asked.wait(60)
            engine.cancel("cancelled")
            reply.wait()
            disk._lengths = lambda parent: (asked.append(parent), lengths(parent))[1]
        assert why(engine, 2000).by_tier["disk"] >= 1999 - 8  # after that one
        assert len(asked) <= 2 + 8 + 2


def asking_threads(blocks: DiskChains) -> dict[str, set[str]]:
    """Return the names of the threads that ask the catalogue, by question. Writing a chain does not count: it takes
    small steps on the engine thread, and a reply may be written at any time."""
    found: dict[str, set[str]] = {}
    for name in ("find", "lengths", "size", "contents"):
        ask: Callable[..., Any] = getattr(blocks, name)

        def noted(*args: Any, name: str = name, ask: Callable[..., Any] = ask) -> Any:
            if all(frame.name != "write_chain" for frame in traceback.extract_stack(limit=12)):
                found.setdefault(name, set()).add(threading.current_thread().name)
            return ask(*args)

        setattr(blocks, name, noted)
    return found


def test_requests_pins_explanations_and_restores_ask_the_disk_on_another_thread(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:8"))
    prompt = [i * 7 % VOCAB for i in range(700)]
    with engine_on(tmp_path, loaded, storage) as engine:
        answer(engine, "first", 700)
        settle(engine)
        engine.ask(
            lambda core: CacheApi(core).requantize(PrecisionChange(parse("planes:4"), parse("planes:4")))
        ).result(60)
        settle(engine)
        assert engine.ask(flush_tier).result(60)
        threads = asking_threads(blocks_of(engine))
        engine.ask(
            lambda core: CacheApi(core).requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
        ).result(60)
        eventually(lambda: engine.ask(is_done).result(60), 60)
        assert engine.ask(lambda core: CacheApi(core).usage().counters["restored_spans"]).result(60) >= 1
        engine.ask(lambda core: core.prefix_cache.pins.pin(prompt, "")).result(60)
        engine.ask(lambda core: core.prefix_cache.pins.unpin(prompt, "")).result(60)
        assert why(engine, 700).ends_because == "complete"
        answer(engine, "again", 700)
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        assert cached(answer(engine, "from the disk", 700)) == 699
        assert threads["lengths"] == {"kvstrata-tier-lookups"}
        assert "kvstrata-engine" not in threads["size"]


def is_done(core: EngineCore) -> bool:
    return not CacheApi(core).requantize_progress().is_running


class Disk(Filesystem):
    """Files whose reads take `read_s` each."""

    read_s = 0.0

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        time.sleep(self.read_s)
        return super().read_into(fd, buffer, offset)


def test_disk_that_was_slow_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rates, "HALF_LIFE_S", 3600.0)
    loaded, files = tiny_loaded("llama"), Disk()

    def ask(name: str) -> int:
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        engine.ask(make_computing_take_a_second).result(60)
        reply = Reply()
        engine.submit(Request(name, tuple(i * 7 % VOCAB for i in range(700)), 2, GREEDY), reply.sink)
        return cached(reply)

    with engine_on(tmp_path, loaded) as engine:
        answer(engine, "first", 700)
    with engine_on(tmp_path, loaded, files=files) as engine:
        files.read_s = 1.0
        assert ask("slow") < 699  # it was given up
        eventually(lambda: disk_rates(engine).under_way_s == 0 and disk_rates(engine).num_blocks > 0, 60)
        files.read_s = 0.0
        num_blocks = disk_rates(engine).num_blocks
        assert ask("not tried") == 0
        assert disk_rates(engine).num_blocks == num_blocks
        monkeypatch.setattr(read_rates, "HALF_LIFE_S", 0.001)
        assert ask("tried") == 699
        monkeypatch.setattr(read_rates, "HALF_LIFE_S", 3600.0)
        assert ask("fast") == 699


def test_late_block_is_awaited_where_computing_takes_seconds(tmp_path: Path) -> None:
    loaded, files = tiny_loaded("llama"), Disk()
    with engine_on(tmp_path, loaded) as engine:
        answer(engine, "first", 700)
    with engine_on(tmp_path, loaded, files=files) as engine:
        files.read_s = 0.1
        engine.ask(lambda core: make_computing_take(core, 2.8)).result(60)
        reply = Reply()
        engine.submit(Request("late", tuple(i * 7 % VOCAB for i in range(700)), 2, GREEDY), reply.sink)
        assert cached(reply) == 699


def make_computing_take_a_second(core: EngineCore) -> None:
    make_computing_take(core, 1.0)


def make_computing_take(core: EngineCore, seconds: float) -> None:
    core.speeds.alone = TokenRate()
    core.speeds.alone.add_work(700, seconds)


def disk_rates(engine: Engine) -> read_rates.ReadRates:
    return engine.ask(lambda core: core.prefix_cache.disk.tier.rates).result(60)


@pytest.mark.cache_faults
@pytest.mark.parametrize("name", ["rates", "start_lookup", "read"])
def test_tier_that_raises_is_a_miss_for_the_request_that_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_once(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect of the tier")

    with filled(tmp_path) as engine:
        monkeypatch.setattr(DiskTier, name, property(fail_once) if name == "rates" else fail_once)
        assert cached(answer(engine, "computed", 700)) == 0
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        assert cached(answer(engine, "from the disk", 700)) == 699
        counters = engine.ask(lambda core: CacheApi(core).usage().counters).result(60)
        assert counters.get("failed_lookups", 0) + counters.get("failed_loads", 0) == 1
    assert sum("a defect of the tier" in record.getMessage() for record in caplog.records) == 1
