"""Random chats for minutes: a tiny memory, a small disk, clients that leave, changes of precision, restarts, lost
catalogues and damaged files.

    make soak                               twenty minutes
    KVSTRATA_SOAK_MINUTES=2 make soak

Every reply is compared with that of an engine that caches nothing; memory, files and threads must be where they were.
On a GPU the models have 16 bits.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import psutil
import pytest

from kvstrata.codecs.registry import parse
from kvstrata.engine.cache_api import CacheApi, CacheUsage
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.engine.executor import EngineCore
from kvstrata.engine.request import Event, Request, Sampling, TextDelta
from kvstrata.engine.speeds import TokenRate
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.platform.memory import trim_heap
from kvstrata.prefix_cache.requantize import PrecisionChange
from kvstrata.tiers.options import DiskOptions
from tests.engine.test_disk import settle
from tests.engine.test_engine import Reply
from tests.support.eventually import eventually
from tests.support.models import VOCAB, cast, tiny_loaded, tiny_module
from tests.tiers.disk.blocks import real_bytes
from tests.tiers.disk.faults import flip

# In a run of all slow tests; `make soak` asks for twenty.
DEFAULT_MINUTES = 0.5
KIB, MIB = 1 << 10, 1 << 20
HOT_BYTES = MIB
DISK_BYTES = 5 * MIB
# On CUDA products have workspaces of their own, whatever the model.
MEMORY_BYTES = (2048 if mx.cuda.is_available() else 256) * MIB
NUM_CHATS = 12
LONGEST_TOKENS = 1500
NUM_AT_ONCE = 3
# Of the log-probability of any token, between a reply over cached KV and one that was computed in one piece.
EXACT = 1e-3
# In 16 bits, and where precision is changed: as a share of the least that another beginning of the prompt makes.
SHARE = 1 / 6
ALL_TOKENS = Sampling(temperature=0, num_logprobs=VOCAB)
IN_16_BITS = mx.default_device() != mx.cpu
# Threads of two engines that were joined, and that the system still counts for a moment. MLX's own are counted too.
NUM_LEAVING = 5
# Of the process, between the second third of the run and the last. The allocators fill their pools in the first dozen
# restarts: a short run sees some of that.
NUM_RESTARTS_TO_JUDGE = 36
# On CUDA it grew by 15 MiB in a run of five minutes.
MOST_GROWTH_BYTES = (64 if mx.cuda.is_available() else 16) * MIB
# Tables of shapes that were met are kept, some hundred small arrays; on CUDA each takes a page.
KEPT_TABLES_BYTES = (16 if mx.cuda.is_available() else 1) * MIB
MOST_GROWTH_OF_SHORT_RUN_BYTES = 128 * MIB
SAYS_EVERY_S = 20.0
DISK_MAY_TAKE_S = 10.0


class Case(NamedTuple):
    """A model, and a folder of its own on the disk."""

    architecture: str
    changes: bool = False  # precision, now and then: what was rounded once stays so

    @property
    def name(self) -> str:
        return f"{self.architecture}, changing" if self.changes else self.architecture


CASES = (Case("llama"), Case("gemma3_text"), Case("qwen3_next"), Case("llama", changes=True))


@dataclass
class Chat:
    number: int
    tokens: list[int]
    salt: str = ""


@dataclass
class Soak:
    directory: Path
    rng: random.Random
    counters: Counter[str] = field(default_factory=Counter)
    resident_bytes: list[int] = field(default_factory=list)
    case: Case = CASES[0]  # of the server that lives
    tolerances: dict[Case, float] = field(default_factory=dict)
    differences: dict[Case, float] = field(default_factory=lambda: dict.fromkeys(CASES, 0.0))  # the largest
    num_requests: int = 0

    def new_chat(self, number: int) -> Chat:
        # Some begin alike, as chats with the same system prompt do.
        shared = [i * 7 % VOCAB for i in range(300 * self.rng.randrange(3))]
        return Chat(number, [*shared, *self.words(50, 400)], self.rng.choice(["", "", "a salt"]))

    def words(self, fewest: int, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(fewest, most))]

    def epoch(self, case: Case, chats: list[Chat]) -> None:
        """One life of a server."""
        self.case = case
        loaded = loaded_of(case.architecture)
        disk = DiskOptions(
            self.directory / case.name,
            DISK_BYTES,
            reserve_bytes=0,
            queue_bytes=self.rng.choice([256 * KIB, 4 * MIB]),
            flush_s=self.rng.choice([0.0, 0.05, 5.0]),
            read_ahead_bytes=self.rng.choice([128 * KIB, 2 * MIB]),
        )
        storage = KvConfig(hot_bytes=HOT_BYTES, disk_write=self.rng.choice(["after_reply", "on_evict"]))
        with engine_of(loaded, storage, disk) as cached, engine_of(loaded, KvConfig(hot_bytes=0), None) as cold:
            for _ in range(self.rng.randint(3, 8)):
                self.turn(cached, cold, self.rng.sample(chats, NUM_AT_ONCE))
            self.counters.update(usage_within_limits(cached).counters)
        assert real_bytes(disk.directory) <= DISK_BYTES
        assert not list((disk.directory / "tmp").iterdir())

    def turn(self, cached: Engine, cold: Engine, chats: list[Chat]) -> None:
        cached.ask(pretend_slow).result(60)
        replies = [self.submit(cached, chat) for chat in chats]
        leaving = [self.leave(cached, self.rng.choice(chats))] if self.rng.random() < 0.4 else []
        if self.case.changes and self.rng.random() < 0.5:
            codec = parse(self.rng.choice(["raw", "planes:8", "planes:4"]))
            cached.ask(lambda core: CacheApi(core).requantize(PrecisionChange(codec, codec))).result(60)
            self.counters["changes"] += 1
        for reply in (*replies, *leaving):
            reply.wait()
        # One thread at a time owns MLX: the engines take turns.
        settle(cached)
        for chat, reply in zip(chats, replies, strict=True):
            expected = self.submit(cold, chat)
            assert cached_tokens(expected) == 0
            settle(cold)
            self.compare(chat, reply, expected)
            self.counters["cached_tokens"] += cached_tokens(reply)
            chat.tokens += [*reply.ids, *self.words(5, 80)]
            if len(chat.tokens) > LONGEST_TOKENS:
                fresh = self.new_chat(chat.number)
                chat.tokens, chat.salt = fresh.tokens, fresh.salt

    def submit(self, engine: Engine, chat: Chat) -> Reply:
        reply = Reply()
        engine.submit(Request(self.new_id(), tuple(chat.tokens), 6, ALL_TOKENS, salt=chat.salt), reply.sink)
        return reply

    def new_id(self) -> str:
        self.num_requests += 1
        return f"chat-{self.num_requests}"

    def leave(self, engine: Engine, chat: Chat) -> Reply:
        """Of a client that asks in this chat, and goes away before the reply ends."""
        name, num_events = self.new_id(), self.rng.randint(1, 8)

        def cancel_in_time(_: Event) -> None:
            if len(reply.events) == num_events:
                engine.cancel(name)

        reply = Reply(cancel_in_time)
        tokens = (*chat.tokens, *self.words(5, 80))
        engine.submit(Request(name, tokens, 200, ALL_TOKENS, salt=chat.salt), reply.sink)
        self.counters["left"] += 1
        return reply

    def compare(self, chat: Chat, reply: Reply, expected: Reply) -> None:
        for number, (ours, theirs) in enumerate(zip(steps_of(reply), steps_of(expected), strict=True)):
            difference = distance(ours, theirs)
            self.differences[self.case] = max(self.differences[self.case], difference)
            where = f"{self.case.name}, token {number} after {len(chat.tokens)}, {cached_tokens(reply)} of them cached"
            assert difference <= self.tolerances[self.case], f"{where}: off by {difference}"
            if ours.id != theirs.id:
                return  # about as likely: from here on they are different texts

    def set_tolerances(self) -> None:
        """Another beginning must show, more than all that is tolerated."""
        for case in CASES:
            with engine_of(loaded_of(case.architecture), KvConfig(hot_bytes=0), None) as engine:
                least = min(self.distance_of_others(engine) for _ in range(4))
            assert least > 6 * EXACT, case.name
            self.tolerances[case] = SHARE * least if case.changes or IN_16_BITS else EXACT

    def distance_of_others(self, engine: Engine) -> float:
        """Between replies to two prompts that end alike."""
        one, other = (steps_of(self.submit(engine, Chat(0, [*self.words(300, 300), *range(20)]))) for _ in range(2))
        return max(distance(a, b) for a, b in zip(one, other, strict=True))

    def between(self, case: Case) -> None:
        """What may happen to a folder while no server uses it."""
        folder = self.directory / case.name
        blocks = sorted(folder.rglob("*.safetensors"))
        if blocks and self.rng.random() < 0.3:
            path = self.rng.choice(blocks)
            flip(path, self.rng.randrange(path.stat().st_size))
        if self.rng.random() < 0.2:
            for path in folder.glob("catalogue*"):
                path.unlink()

    def look(self) -> None:
        """Freed memory is given back first, as a resting server does: each engine's thread leaves some in its arena."""
        gc.collect()
        mx.clear_cache()
        trim_heap()
        self.resident_bytes.append(psutil.Process().memory_info().rss)


@functools.cache
def loaded_of(architecture: str) -> LoadedModel:
    loaded = tiny_loaded(architecture)
    if not IN_16_BITS:
        return loaded
    module = tiny_module(architecture, head_dim=64)
    module.update(cast(module.parameters(), mx.bfloat16))
    mx.eval(module.parameters())  # what is lazy belongs to this thread
    return replace(loaded, module=module, config={**loaded.config, "head_dim": 64}, dtype="bfloat16")


@contextmanager
def engine_of(loaded: LoadedModel, storage: KvConfig, disk: DiskOptions | None) -> Iterator[Engine]:
    engine = Engine(loaded, EngineLimits(memory_bytes=MEMORY_BYTES), Metrics(), storage, disk)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def usage_within_limits(engine: Engine) -> CacheUsage:
    """What a working disk is about to take stays in memory until then, and no longer."""

    def usage() -> CacheUsage | None:
        usage = engine.ask(lambda core: CacheApi(core).usage()).result(60)
        return usage if usage.tiers["hot"].nbytes <= HOT_BYTES else None

    return eventually(usage, DISK_MAY_TAKE_S)


def pretend_slow(core: EngineCore) -> None:
    """Tiny models compute a prompt faster than any disk reads it: then nothing would be read."""
    core.speeds.alone = TokenRate()
    core.speeds.alone.add_work(300, 1.0)


class Step(NamedTuple):
    id: int
    logprobs: dict[int, float]  # of every token


def steps_of(reply: Reply) -> list[Step]:
    reply.wait()
    rows = [row for event in reply.events if isinstance(event, TextDelta) for row in event.logprobs]
    return [Step(row.id, dict(row.top)) for row in rows]


def distance(one: Step, other: Step) -> float:
    assert len(one.logprobs) == len(other.logprobs) == VOCAB
    return max(abs(logprob - other.logprobs[id_]) for id_, logprob in one.logprobs.items())


def cached_tokens(reply: Reply) -> int:
    return reply.wait().usage.cached_tokens  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_is_wrong_and_nothing_grows(tmp_path: Path) -> None:
    minutes = float(os.environ.get("KVSTRATA_SOAK_MINUTES", DEFAULT_MINUTES))
    soak = Soak(tmp_path, random.Random(os.environ.get("KVSTRATA_SOAK_SEED", "1")))
    soak.set_tolerances()
    chats = {case: [soak.new_chat(number) for number in range(NUM_CHATS)] for case in CASES}
    for case in CASES:
        soak.epoch(case, chats[case])
    soak.look()
    process = psutil.Process()
    num_python_threads, num_threads, num_files = threading.active_count(), process.num_threads(), process.num_fds()
    active_bytes = mx.get_active_memory()
    began_s = said_s = time.monotonic()
    while time.monotonic() < began_s + 60 * minutes:
        case = soak.rng.choice(CASES)
        soak.between(case)
        soak.epoch(case, chats[case])
        soak.look()
        assert threading.active_count() == num_python_threads
        assert process.num_threads() <= num_threads + NUM_LEAVING
        assert process.num_fds() == num_files
        assert mx.get_active_memory() <= active_bytes + KEPT_TABLES_BYTES
        if time.monotonic() >= said_s + SAYS_EVERY_S:
            said_s = time.monotonic()
            more = mx.get_active_memory() - active_bytes
            print(f"{said_s - began_s:.0f} s: {soak.num_requests} requests, {more / MIB:.1f} MiB more than before")
    report(soak)
    moved = ("promoted_tokens", "evicted_tokens", "disk_evicted_limit", "disk_written_base")
    for what in ("cached_tokens", *moved, "left", "changes"):
        assert soak.counters[what] > 0, what
    third = max(1, len(soak.resident_bytes) // 3)
    before, after = (
        statistics.median(part) for part in (soak.resident_bytes[third:-third], soak.resident_bytes[-third:])
    )
    is_long = len(soak.resident_bytes) >= NUM_RESTARTS_TO_JUDGE
    assert after - before <= (MOST_GROWTH_BYTES if is_long else MOST_GROWTH_OF_SHORT_RUN_BYTES)


def report(soak: Soak) -> None:
    resident = [nbytes // MIB for nbytes in soak.resident_bytes]
    print(f"\n{soak.num_requests} requests, {len(resident)} restarts; the largest differences:")
    for case, difference in soak.differences.items():
        print(f"  {case.name}: {difference:.1e}, up to {soak.tolerances[case]:.1e} are tolerated")
    shown = resident[:: max(1, len(resident) // 20)]
    print(f"resident MiB: {' '.join(map(str, shown))}, at most {max(resident)}")
    print(", ".join(f"{name} {count}" for name, count in sorted(soak.counters.items()) if count))
