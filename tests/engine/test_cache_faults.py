"""Faults of the cache are misses: whatever operation raises, requests end as they do without a fault."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.cache_api import RequantizedCache
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Failed, Finished, PinRequest, Request, Sampling
from kvstrata.errors import Unavailable
from kvstrata.grammar.constraint import Constraint
from kvstrata.kv.layout import arrays_in
from kvstrata.metrics import Metrics
from kvstrata.prefix_cache.keys import as_ids
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.prefix_cache.worth import ReuseClass
from kvstrata.sizes import Size
from kvstrata.tiers.options import DiskOptions
from tests.engine.test_disk import make_computing_slow
from tests.engine.test_engine import Reply
from tests.support.faults import Fault, Faults, Site
from tests.support.models import byte_grammars, byte_model, layout_of
from tests.tiers.remote.stores import options_for, private_folder, secret_file

pytestmark = pytest.mark.cache_faults

MIB = 1 << 20
HOT_TOKENS = 1100  # less than a run stores: it evicts, writes and loads
NUM_SAMPLED = 8
LOGGERS = [f"kvstrata.{name}" for name in ("prefix_cache.jobs", "engine.sequence", "engine.thread", "engine.runner")]


class Work:
    """Requests of several conversations and questions to the cache, in a fixed order."""

    def __init__(self, folder: Path, architecture: str, *, is_shared: bool = False) -> None:
        """`is_shared`: beside the disk there is a tier that other servers share."""
        loaded = byte_model(architecture)
        mx.eval(arrays_in(loaded.module))
        self.token_bytes = layout_of(loaded).token_bytes
        self.hot_bytes = HOT_TOKENS * self.token_bytes
        disk = DiskOptions(folder / "disk", 64 * MIB, reserve_bytes=0, queue_bytes=16 * MIB)
        # In raw form: blocks of another precision would change the replies.
        remote = options_for(private_folder(folder), secret_file(folder), precision="raw") if is_shared else None
        self._shared_folder = folder / "shared"
        storage = KvConfig(hot_bytes=self.hot_bytes, archives_planes=True)
        limits = EngineLimits(memory_bytes=4096 * MIB, max_running=3)
        self.engine = Engine(loaded, limits, Metrics(), storage, disk, remote=remote)
        self.engine.start()
        self._rng = random.Random(7)
        self._shared = self._prompt(300)
        self._prompts = {name: self._prompt(length) for name, length in [("c", 330), ("d", 40), ("e", 600), ("g", 280)]}
        self._num_runs = 0

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(250) for _ in range(length)]

    def reset(self) -> None:
        def forget(core: EngineCore) -> None:
            core.prefix_cache.pins.unpin(as_ids(self._prompts["c"]), "")
            core.prefix_cache.pins.unpin(as_ids(self._shared), "")

        self.engine.ask(forget).result(60)
        self._requantize("raw").result(60)
        self._settle()
        self.engine.ask_cache(lambda cache: cache.clear(None, "all", owner=None)).result(60)
        for path in self._shared_folder.rglob("*"):
            if path.is_file() and path.name != "cluster":
                path.unlink(missing_ok=True)  # the writer's own file may be gone by now
        self.engine.ask(make_computing_slow).result(60)

    def _requantize(self, precision: str) -> Future[RequantizedCache]:
        """Begin a change of precision, and return the future of its result."""
        change = PrecisionChange(parse(precision), parse(precision))
        return self.engine.ask_cache(lambda cache: cache.begin_requantize(change)).result(60)

    def run(self) -> dict[str, Reply]:
        self._num_runs += 1
        shared, replies = self._shared, dict[str, Reply]()
        a, b = [*shared, *range(40)], [*shared, *range(100, 160)]
        pinned = PinRequest(60.0, 200, Size.parse("50%"))
        grammar = byte_grammars().compile(Constraint.regex("[0-9]{1,4}(,[0-9]{1,4})*"))
        eos_ids = byte_model().eos_ids
        replies |= self._ask_all(
            {
                "a": {"prompt": a},
                "b": {"prompt": b},
                "c": {"prompt": self._prompts["c"], "session": "s", "pin": pinned},
                "d": {"prompt": self._prompts["d"], "grammar": grammar, "stop_ids": eos_ids, "max_tokens": 6},
            }
        )
        self._try(lambda: self.engine.ask_cache(lambda cache: cache.usage()))
        replies |= self._ask_all({"e": {"prompt": self._prompts["e"]}})
        c = [*self._prompts["c"], *replies["c"].ids[:2], *range(30)]
        replies |= self._ask_all({"c2": {"prompt": c, "session": "s"}})
        replies |= self._ask_all({"a2": {"prompt": [*a, *replies["a"].ids, *range(20)]}, "b2": {"prompt": b}})
        self._try(lambda: self.engine.ask_cache(lambda cache: cache.pin(as_ids(a), "", None)))
        self._try(lambda: self.engine.ask_cache(lambda cache: cache.explain(as_ids(b), "", None)))
        self._try(lambda: self.engine.ask_cache(lambda cache: cache.unpin(as_ids(a), "")))
        self._try(lambda: self._requantize("planes:8"))
        # It shares nothing with the others: precision does not change its reply.
        replies |= self._ask_all({"g": {"prompt": self._prompts["g"], "salt": "own"}})
        self._settle()
        self._try(lambda: self.engine.ask_cache(lambda cache: cache.requantize_progress()))
        self._try(lambda: self.engine.ask_cache(lambda cache: cache.drop_conversation(as_ids(b), "", is_dry=False)))
        self._try(lambda: self.engine.ask(lambda core: core.prefix_cache.flush(30)))
        return replies

    def _ask_all(self, asked: dict[str, dict[str, Any]]) -> dict[str, Reply]:
        """All of them are there before the first begins."""
        replies = {name: Reply() for name in asked}
        are_there = threading.Event()
        waits = self.engine.ask(lambda _: are_there.wait(60))
        for name, fields in asked.items():
            prompt = tuple(fields.pop("prompt"))
            fields = {"max_tokens": 4, "sampling": Sampling(temperature=0), **fields}
            request = Request(f"{name} of {self._num_runs}", prompt, **fields)
            self.engine.submit(request, replies[name].sink)
        are_there.set()
        waits.result(60)
        for reply in replies.values():
            reply.wait()
        return replies

    def _settle(self) -> None:
        def work(core: EngineCore) -> None:
            while core.pacer.has_work:
                core.pacer.run_slice(1.0)

        self.engine.ask(work).result(60)

    def _try(self, question: Callable[[], Future[Any]]) -> None:
        """A question may fail where it is the one that the fault concerns."""
        with suppress(Fault, Unavailable):
            question().result(60)

    def active_bytes(self) -> int:
        def count(_: EngineCore) -> int:
            gc.collect()
            return mx.get_active_memory()

        return self.engine.ask(count).result(60)

    def assert_nothing_is_held(self) -> None:
        def held(core: EngineCore) -> None:
            entries = core.prefix_cache.table.entries
            assert not core.sequences.all
            assert not [entry for entry in entries if entry.num_leases or entry.is_running]
            assert core.prefix_cache.table.nbytes == sum(entry.nbytes for entry in entries)
            assert core.memory.running_bytes == 0
            assert core.prefix_cache.disk.loader.unused_bytes == 0

        self._settle()
        self.engine.ask(held).result(60)


def replies_of(work: Work) -> dict[str, list[int]]:
    ends = {name: (reply.wait(), reply.ids) for name, reply in work.run().items()}
    assert all(isinstance(end, Finished) for end, _ in ends.values())
    return {name: ids for name, (_, ids) in ends.items()}


WORKS = {"llama": ("llama", False), "qwen3_next": ("qwen3_next", False), "shared": ("llama", True)}


@pytest.fixture(params=WORKS)
def work(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Work]:
    architecture, is_shared = WORKS[request.param]
    work = Work(tmp_path, architecture, is_shared=is_shared)
    yield work
    work.engine.stop()


def check_site(work: Work, faults: Faults, at: tuple[Site, int], expected: dict[str, list[int]]) -> bool:
    """Return whether the call came: with threads of the tier, runs differ."""
    work.reset()
    with faults.planned(at) as plan:
        replies = work.run()
    for name, reply in replies.items():
        end = reply.wait()
        concerns_grammar = name == "d" and at[0].operation.startswith(("Matcher.", "TokenMasks.", "Grammar."))
        if concerns_grammar and isinstance(end, Failed):
            continue
        assert isinstance(end, Finished), (name, at, end)
        assert reply.ids == expected[name], (name, at)
    work.assert_nothing_is_held()
    assert work.engine.alive
    return plan.has_raised


def measured_calls(work: Work, faults: Faults, expected: dict[str, list[int]]) -> dict[Site, int]:
    """Return how often each site is called in a run without faults."""
    work.reset()
    with faults.planned(None) as plan:
        assert replies_of(work) == expected
    return dict(plan.seen)


def sweep(work: Work, monkeypatch: pytest.MonkeyPatch, num_sites: int | None) -> None:
    faults, rng = Faults(), random.Random(1)
    faults.watch(monkeypatch)
    # What is logged would keep the frames of an operation that failed, and what they hold.
    for name in LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    work.reset()
    expected = replies_of(work)
    work.reset()
    before_bytes = work.active_bytes()
    # Of two runs: what only one of them calls, because a queue was full, is no site to rely on.
    seen = [measured_calls(work, faults, expected) for _ in range(2)]
    counts = sorted((site, min(count, seen[1][site])) for site, count in seen[0].items() if site in seen[1])
    chosen = counts if num_sites is None else rng.sample(counts, num_sites)
    threads = {thread.name for thread in threading.enumerate()}
    num_raised = 0
    for site, count in chosen:
        # Where the chosen call does not come, because a tier's thread was faster or slower, the first one is tried.
        calls = (rng.randint(1, count), 1)
        num_raised += any(check_site(work, faults, (site, call), expected) for call in calls)
    assert num_raised >= 0.8 * len(chosen)
    assert {thread.name for thread in threading.enumerate()} >= threads
    # After all of them the cache works as before, and no memory stayed behind.
    work.reset()
    assert work.active_bytes() < before_bytes + work.hot_bytes / 10
    assert replies_of(work) == expected


def test_fault_at_any_call_site_costs_no_request(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(work, monkeypatch, NUM_SAMPLED)


@pytest.mark.slow
def test_fault_at_every_call_site_costs_no_request(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(work, monkeypatch, None)


def test_half_done_operation_empties_the_cache_under_running_requests(work: Work) -> None:
    def fail_half_way(core: EngineCore) -> None:
        core.prefix_cache.table.record_use((), ReuseClass.FRESH)
        raise Fault("half done")

    def bytes_of(core: EngineCore) -> tuple[int, int]:
        return core.memory.running_bytes, core.memory.cached_bytes

    prompt = tuple(range(200)) + tuple(range(100))
    whole = Reply()
    work.engine.submit(Request("whole", prompt, 60, Sampling(temperature=0)), whole.sink)
    assert isinstance(whole.wait(), Finished)
    has_begun, has_enough = threading.Event(), threading.Event()

    def look(_: object) -> None:
        if len(reply.ids) >= 5:
            has_begun.set()
        if len(reply.ids) >= 60:
            has_enough.set()

    reply = Reply(look)
    work.engine.submit(Request("runs", prompt, 7000, Sampling(temperature=0)), reply.sink)
    assert has_begun.wait(60)
    before_bytes, _ = work.engine.ask(bytes_of).result(60)
    with pytest.raises(Fault):
        work.engine.ask(fail_half_way).result(60)
    running_bytes, stored_bytes = work.engine.ask(bytes_of).result(60)
    assert stored_bytes == 0
    # What it reads is counted with it now.
    assert running_bytes - before_bytes >= 299 * work.token_bytes
    assert has_enough.wait(60)
    work.engine.cancel("runs")
    reply.wait()
    assert reply.ids[:60] == whole.ids
    work.assert_nothing_is_held()
