"""Disk tier under the engine: restarts, faults, and restored precision."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvstrata.codecs.registry import _VERSIONS, parse
from kvstrata.engine.cache_api import CacheApi
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Failed, Request, TextDelta
from kvstrata.engine.speeds import TokenRate
from kvstrata.kv.layout import arrays_in
from kvstrata.kv.precision_estimate import LOWER
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.prefix_cache.matching import Explanation
from kvstrata.prefix_cache.requantize import ChangeResult, PrecisionChange
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.options import DiskOptions
from tests.engine.drive import GREEDY
from tests.engine.test_engine import Reply
from tests.support.eventually import eventually
from tests.support.models import VOCAB, tiny_loaded

MIB = 1 << 20
ARCHITECTURES = ["llama", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v3", "gpt_oss"]


@contextmanager
def engine_on(
    folder: Path, loaded: LoadedModel, storage: KvConfig | None = None, limit_bytes: int = 256 * MIB, **settings: Any
) -> Iterator[Engine]:
    mx.eval(arrays_in(loaded.module))  # what is lazy belongs to this thread
    files = settings.pop("files", None)
    disk = DiskOptions(folder, limit_bytes, reserve_bytes=0, **{"queue_bytes": 64 * MIB, **settings})
    engine = Engine(loaded, EngineLimits(memory_bytes=4096 * MIB), Metrics(), storage, disk, files)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def make_computing_slow(core: EngineCore) -> None:
    """Make loads worthwhile: a tiny model computes a prompt faster than any disk reads it."""
    core.speeds.alone = TokenRate()
    core.speeds.alone.add_work(1, 1.0)


def answer(engine: Engine, name: str, prompt_tokens: int, max_tokens: int = 12) -> Reply:
    engine.ask(make_computing_slow).result(60)
    reply = Reply()
    prompt = tuple(i * 7 % VOCAB for i in range(prompt_tokens))
    engine.submit(Request(name, prompt, max_tokens, GREEDY), reply.sink)
    reply.wait()
    return reply


def cached(reply: Reply) -> int:
    return reply.wait().usage.cached_tokens  # pyright: ignore[reportAttributeAccessIssue]


def settle(engine: Engine) -> None:
    def work(core: EngineCore) -> None:
        while core.pacer.has_work:
            core.pacer.run_slice(1.0)

    engine.ask(work).result(60)


def flush_tier(core: EngineCore) -> bool:
    """Wait until the disk has all that is on its way to it."""
    return core.prefix_cache.disk.tier.flush(30).is_empty


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_restart_computes_only_new_tokens(architecture: str, tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded(architecture)) as engine:
        first = answer(engine, "first", 700)
    with engine_on(tmp_path, tiny_loaded(architecture)) as engine:
        again = answer(engine, "again", 700)
        assert cached(again) == 699
        assert again.ids == first.ids


def stream(engine: Engine, prompt_tokens: int, min_tokens: int) -> Reply:
    """Return a reply that still runs and has at least `min_tokens` tokens."""
    has_begun = threading.Event()
    reply = Reply(lambda _: has_begun.set() if len(reply.ids) >= min_tokens else None)
    prompt = tuple(i * 7 % VOCAB for i in range(prompt_tokens))
    engine.submit(Request("streams", prompt, 7000, GREEDY), reply.sink)
    assert has_begun.wait(60)
    return reply


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_stop_writes_what_running_sequences_have_computed(architecture: str, tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded(architecture)) as engine:
        reply = stream(engine, 700, 30)
    assert reply.wait() == Failed("The server was stopped.")
    with engine_on(tmp_path, tiny_loaded(architecture)) as engine:
        engine.ask(make_computing_slow).result(60)
        prompt = (*(i * 7 % VOCAB for i in range(700)), *reply.ids)
        again = Reply()
        engine.submit(Request("again", prompt, 4, GREEDY), again.sink)
        # The last token of the reply was never fed.
        assert cached(again) == len(prompt) - 1


def test_stop_reports_what_running_sequences_have_computed_and_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_on(tmp_path, tiny_loaded("llama"), flush_s=0.0) as engine:
        reply = stream(engine, 700, 30)
    reply.wait()
    (report,) = [record.getMessage() for record in caplog.records if "were not written" in record.getMessage()]
    num_tokens = int(report.split()[0])
    assert 700 + len(reply.ids) - 2 <= num_tokens <= 700 + len(reply.ids)
    assert "of 1 conversations" in report


def test_failed_step_loses_memory_and_keeps_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is logged would keep the frames of the step that failed, and what they hold.
    monkeypatch.setattr(logging.getLogger("kvstrata.engine.thread"), "disabled", True)
    with engine_on(tmp_path, tiny_loaded("llama")) as engine:
        before = engine.ask(lambda _: mx.get_active_memory()).result(60)
        answer(engine, "first", 2000)
        engine.ask(lambda core: CacheApi(core).requantize(PrecisionChange(parse("raw"), parse("planes:8")))).result(60)
        settle(engine)
        engine.ask(lambda core: core.prefix_cache.flush(30)).result(60)
        counted = engine.ask(lambda core: CacheApi(core).usage().counters).result(60)
        held = engine.ask(lambda core: CacheApi(core).usage().tiers["hot"].nbytes).result(60)
        engine.ask(make_prefill_fail).result(60)
        gc.disable()  # nothing may wait for it
        try:
            assert isinstance(answer(engine, "failing", 2500).wait(), Failed)
            after = engine.ask(lambda _: mx.get_active_memory()).result(60)
        finally:
            gc.enable()
        assert after - before < held / 10
        usage = engine.ask_cache(lambda cache: cache.usage()).result(60)
        assert usage.tiers["hot"].nbytes == 0
        assert all(usage.counters[name] >= count for name, count in counted.items())
        assert usage.counters["stored_tokens"] == counted["stored_tokens"] > 2000
        assert (
            engine.ask(lambda core: CacheApi(core).requantize(PrecisionChange(dry_run=True))).result(60).v == "planes:8"
        )
        assert cached(answer(engine, "again", 2000)) == 1999


def make_prefill_fail(core: EngineCore) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("defect")

    core.runner.prefill = fail


def test_changed_weights_under_the_same_name_have_no_hit(tmp_path: Path) -> None:
    with engine_on(tmp_path, tiny_loaded("llama")) as engine:
        answer(engine, "first", 600)
    changed = dataclasses.replace(tiny_loaded("llama"), fingerprint="other weights")
    with engine_on(tmp_path, changed) as engine:
        assert why(engine, 600).ends_because == "identity"
        assert cached(answer(engine, "again", 600)) == 0
        assert why(engine, 600).ends_because == "complete"


def why(engine: Engine, prompt_tokens: int) -> Explanation:
    prompt = [i * 7 % VOCAB for i in range(prompt_tokens)]

    lookup = engine.ask(lambda core: core.prefix_cache.look_up_on_disk(prompt, "")).result(60)
    assert lookup.wait(60)

    def question(core: EngineCore) -> Explanation:
        return core.prefix_cache.explain(prompt, "", lookup.answer)

    return engine.ask(question).result(60)


class Holding(Filesystem):
    """Files whose writes wait until `go` is set: archived planes are not dropped before the test has seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, fd: int, piece: memoryview) -> int:
        assert self.go.wait(120)
        return super().write(fd, piece)


def test_damaged_blocks_are_a_miss_with_the_same_reply(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded) as engine:
        first = answer(engine, "first", 700)
    blocks = sorted(path for path in tmp_path.rglob("*.safetensors"))
    assert len(blocks) >= 3
    for path in blocks:
        octets = bytearray(path.read_bytes())
        octets[-100] ^= 1
        path.write_bytes(octets)
    files = Holding()
    with engine_on(tmp_path, loaded, KvConfig(disk_write="on_evict"), files=files) as engine:
        # Else what a reader has put aside by its row could get that row again before its file is moved.
        assert engine.ask(flush_tier).result(60)
        again = answer(engine, "again", 700)
        assert cached(again) == 0
        assert again.ids == first.ids
        counters = engine.ask(lambda core: CacheApi(core).usage().counters).result(60)
        assert counters["disk_quarantined_tensor"] >= 1
        # A reader puts files aside while the answer is computed.
        eventually(lambda: len([*tmp_path.rglob("*.tensor")]) >= counters["disk_quarantined_tensor"], 30)
        engine.ask(lambda core: core.prefix_cache.evictor.clear(tier="hot")).result(60)
        said = why(engine, 700)
        files.go.set()
        assert (said.ends_because, said.at_token) == ("damaged", 0)


def test_evicted_prefix_is_loaded_from_disk_while_memory_is_full(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded, KvConfig(hot_bytes=900 * 1024)) as engine:
        replies = {n: answer(engine, f"a{n}", n) for n in (600, 610, 620)}
        settle(engine)
        for n, before in replies.items():
            again = answer(engine, f"b{n}", n)
            assert cached(again) == n - 1
            assert again.ids == before.ids
            assert engine.ask(lambda core: CacheApi(core).usage().tiers["hot"].nbytes).result(60) <= 900 * 1024


@pytest.mark.parametrize("name", ["planes:8", "planes:2", "planes:4"])
def test_blocks_on_disk_have_the_precision_of_memory(name: str, tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    storage = KvConfig(k=parse(name), v=parse(name))
    with engine_on(tmp_path, loaded, storage) as engine:
        answer(engine, "first", 700)
        warm = answer(engine, "warm", 700)
    with engine_on(tmp_path, loaded, storage) as engine:
        cold = answer(engine, "cold", 700)
        assert cached(cold) == 699
        assert cold.ids == warm.ids
        settle(engine)
        usage = engine.ask_cache(lambda cache: cache.usage()).result(60)
        assert set(usage.tiers["hot"].by_precision) == {name}


def test_archived_planes_are_restored_bit_for_bit(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    storage = KvConfig(k=parse("planes:8"), v=parse("planes:8"))

    def planes(core: EngineCore) -> list[bytes]:
        (entry,) = [entry for entry in core.prefix_cache.table.entries if entry.span.end > 600]
        parts = [part for layer in entry.span.layers for part in entry.span.sealed(layer)]
        return sorted(np.asarray(array).tobytes() for part in parts for array in part.arrays())

    with engine_on(tmp_path, loaded, storage) as engine:
        answer(engine, "first", 700)
        settle(engine)
        before = engine.ask(planes).result(60)
        engine.ask(
            lambda core: CacheApi(core).requantize(PrecisionChange(parse("planes:4"), parse("planes:4")))
        ).result(60)
        settle(engine)
        assert len(engine.ask(planes).result(60)) < len(before)
        assert engine.ask(flush_tier).result(60)
        of_disk = engine.ask(
            lambda core: CacheApi(core).requantize(PrecisionChange(parse("planes:2"), scope="disk", dry_run=True))
        ).result(60)
        assert [left.reason for left in of_disk.left_alone] == [
            "blocks on the disk keep the precision they were written in"
        ]
        engine.ask(
            lambda core: CacheApi(core).requantize(PrecisionChange(parse("planes:8"), parse("planes:8")))
        ).result(60)
        eventually(lambda: engine.ask_cache(lambda cache: cache.usage()).result(60).counters.get("restored_spans"), 30)
        assert engine.ask(planes).result(60) == before


def change(engine: Engine, name: str, *, dry_run: bool = False) -> ChangeResult:
    changed = engine.ask(
        lambda core: CacheApi(core).requantize(PrecisionChange(parse(name), parse(name), dry_run=dry_run))
    ).result(60)
    eventually(lambda: not engine.ask(lambda core: CacheApi(core).requantize_progress().is_running).result(60), 30)
    settle(engine)
    return changed


@pytest.mark.parametrize("began", ["raw", "planes:8"])
def test_output_after_step_down_and_restore_equals_a_run_without(began: str, tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    storage = KvConfig(k=parse(began), v=parse(began), disk_write="on_evict")
    with engine_on(tmp_path / "never", loaded, storage) as engine:
        answer(engine, "first", 700)
        change(engine, "planes:8")
        never = answer(engine, "again", 700, 40)
    with engine_on(tmp_path / "down", loaded, storage) as engine:
        answer(engine, "first", 700)
        change(engine, "planes:8")
        down = change(engine, "planes:4")
        on_disk = down.tiers["disk"]
        # What was raw is there already.
        assert (on_disk.bytes_freed < 0) == (began == "planes:8")
        lower = answer(engine, "lower", 700, 40)
        assert logprobs(lower) != logprobs(never)
        up = change(engine, "planes:8", dry_run=True)
        assert up.tiers["hot"].bytes_freed < 0
        # The reply that was computed at the lower precision was never higher.
        assert [left.spans for left in up.left_alone if left.reason == LOWER] == [1]
        change(engine, "planes:8")
        again = answer(engine, "again", 700, 40)
        settle(engine)
        now = engine.ask(lambda core: CacheApi(core).usage().tiers["hot"].by_precision).result(60)
    assert again.ids == never.ids
    assert logprobs(again) == logprobs(never)
    assert cached(again) == 699
    assert set(now) == {"planes:8", "planes:4"}


def logprobs(reply: Reply) -> list[float]:
    """Return log-probabilities, which tell two precisions of a tiny model apart: its tokens seldom do."""
    pieces = [event for event in reply.events if isinstance(event, TextDelta)]
    return [logprob.logprob for piece in pieces for logprob in piece.logprobs]


class Watched(Filesystem):
    """A slow disk that records at each read how much was read and not used yet."""

    def __init__(self) -> None:
        self.unused_bytes: list[int] = []
        self.look: Callable[[], int] = lambda: 0

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.unused_bytes.append(self.look())
        time.sleep(0.004)
        return super().read_into(fd, buffer, offset)


@pytest.mark.parametrize(("architecture", "bound_bytes"), [("llama", 2 * MIB), ("gemma3_text", MIB)])
def test_long_match_loads_in_bounded_batches_beside_streams(
    architecture: str, bound_bytes: int, tmp_path: Path
) -> None:
    loaded = tiny_loaded(architecture, 4)
    with engine_on(tmp_path, loaded) as engine:
        first = answer(engine, "first", 4000)
    files = Watched()
    with engine_on(tmp_path, loaded, files=files, read_ahead_bytes=bound_bytes // 2) as engine:
        cold = engine.ask(lambda core: core.prefix_cache.disk).result(60)
        files.look = lambda: cold.tier.usage().unused_bytes + cold.loader.unused_bytes
        decodes = threading.Event()
        other = Reply(lambda event: decodes.set() if isinstance(event, TextDelta) else None)
        engine.submit(Request("other", tuple(range(40)), 3000, GREEDY), other.sink)
        assert decodes.wait(60)
        before = len(other.ids)
        again = answer(engine, "again", 4000)
        assert (cached(again), again.ids) == (3999, first.ids)
        assert len(other.ids) > before + 10
        usage = engine.ask_cache(lambda cache: cache.usage()).result(60)
        engine.cancel("other")
        other.wait()
    assert usage.counters["disk_read_bytes"] > bound_bytes
    assert bound_bytes / 4 < max(files.unused_bytes) <= bound_bytes
    assert usage.tiers["hot"].spans > 2


def test_match_larger_than_memory_is_loaded_as_far_as_it_fits(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama", 4)
    with engine_on(tmp_path, loaded) as engine:
        first = answer(engine, "first", 4000)
    with engine_on(tmp_path, loaded, KvConfig(hot_bytes=2 * MIB), read_ahead_bytes=MIB // 2) as engine:
        again = answer(engine, "again", 4000)
        assert again.ids == first.ids
        assert 1000 < cached(again) < 2100
        usage = engine.ask_cache(lambda cache: cache.usage()).result(60)
        assert usage.counters["refused_promotions"] == 1
        assert usage.tiers["hot"].nbytes <= 2 * MIB


def test_load_without_its_parent_prefix_is_refused(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded) as engine:
        answer(engine, "first", 700)
    prompt = [i * 7 % VOCAB for i in range(700)]

    def load_and_lose_the_beginning(core: EngineCore) -> tuple[int, int]:
        prefix_cache = core.prefix_cache
        lookup = prefix_cache.prefetcher.ask(prompt, "")
        assert lookup is not None
        assert lookup.wait(30)
        load = prefix_cache.prefetcher.begin_load(lookup.offers[0], prompt, "")
        assert load is not None
        assert load.links[0].start > 0
        assert load.lease is not None
        assert prefix_cache.evictor.clear(tier="hot").tokens == 0  # it is kept for the load
        prefix_cache.release(load.lease)
        assert prefix_cache.evictor.clear(tier="hot").tokens > 0
        until_s = time.monotonic() + 30
        while not load.is_done:
            assert time.monotonic() < until_s
            prefix_cache.run_background(0.01)
        prefix_cache.prefetcher.promote(load)
        return prefix_cache.lookup(prompt, "").num_tokens, prefix_cache.counters["refused_promotions"]

    with engine_on(tmp_path, loaded) as engine:
        assert cached(answer(engine, "beginning", 300, 1)) == 256
        assert engine.ask(load_and_lose_the_beginning).result(60) == (0, 1)
        assert cached(answer(engine, "again", 700)) == 699


def test_blocks_that_cannot_be_read_are_counted_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = tiny_loaded("llama")
    with engine_on(tmp_path, loaded) as engine:
        first = answer(engine, "first", 700)
    # As if a later version had written them.
    monkeypatch.setitem(_VERSIONS, "raw", (9,))
    with engine_on(tmp_path, loaded) as engine:
        again = answer(engine, "again", 700)
        assert (cached(again), again.ids) == (0, first.ids)
        assert engine.ask(lambda core: CacheApi(core).usage().counters["unreadable_blocks"]).result(60) == 1
    assert "cannot be read by this version" in caplog.text


def test_hot_only_writes_nothing(tmp_path: Path) -> None:
    loaded = tiny_loaded("llama")
    engine = Engine(loaded, EngineLimits(memory_bytes=4096 * MIB), Metrics(), KvConfig(hot_bytes=300 * 1024))
    engine.start()
    for n in (600, 610):
        answer(engine, f"a{n}", n)
    usage = engine.ask_cache(lambda cache: cache.usage()).result(60)
    engine.stop()
    assert set(usage.tiers) == {"hot"}
    assert not list(tmp_path.iterdir())
