"""Random chats for minutes: a tiny memory, a small disk, restarts, lost catalogues and damaged files.

    make soak                               twenty minutes
    KVSTRATA_SOAK_MINUTES=2 make soak

Every reply is compared with that of an engine that caches nothing; memory, files and threads must be where they were.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from kvstrata.disk.options import DiskOptions
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.loop import Loop
from kvstrata.engine.operations import Operations
from kvstrata.engine.rates import Rate
from kvstrata.engine.request import Piece, Request
from kvstrata.engine.storage import Storage
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from tests.disk.blocks import real_bytes
from tests.disk.faults import flip
from tests.engine.drive import GREEDY
from tests.engine.test_disk import settle
from tests.engine.test_engine import Reply
from tests.tiny import VOCAB, tiny_loaded

# In a run of all slow tests; `make soak` asks for twenty.
DEFAULT_MINUTES = 0.5
ARCHITECTURES = ("llama", "gemma3_text", "qwen3_next")
KIB, MIB = 1 << 10, 1 << 20
HOT_BYTES = 2 * MIB
DISK_BYTES = 10 * MIB
# On CUDA products have workspaces of their own, whatever the model.
MEMORY_BYTES = (2048 if mx.cuda.is_available() else 256) * MIB
NUM_CHATS = 12
LONGEST_TOKENS = 1500
NUM_AT_ONCE = 3
# Between a reply over cached KV and one that was computed in one piece.
TOLERANCE = 1e-3
# Threads of two engines that were joined, and that the system still counts for a moment. MLX's own are counted too.
NUM_LEAVING = 5
# Of the process, between the second third of the run and the last. The allocators fill their pools in the first dozen
# restarts: a short run sees some of that.
NUM_RESTARTS_TO_JUDGE = 36
MOST_GROWTH_BYTES = 16 * MIB
MOST_GROWTH_OF_SHORT_RUN_BYTES = 128 * MIB


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
    architecture: str = ""  # of the server that lives
    num_requests: int = 0
    largest_difference: float = 0.0

    def new_chat(self, number: int) -> Chat:
        # Some begin alike, as chats with the same system prompt do.
        shared = [i * 7 % VOCAB for i in range(300 * self.rng.randrange(3))]
        return Chat(number, [*shared, *self.words(50, 400)], self.rng.choice(["", "", "a salt"]))

    def words(self, fewest: int, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(fewest, most))]

    def epoch(self, architecture: str, chats: list[Chat]) -> None:
        """One life of a server."""
        self.architecture = architecture
        loaded = tiny_loaded(architecture)
        disk = DiskOptions(
            self.directory / architecture,
            DISK_BYTES,
            reserve_bytes=0,
            queue_bytes=self.rng.choice([256 * KIB, 4 * MIB]),
            flush_s=self.rng.choice([0.0, 0.05, 5.0]),
            read_ahead_bytes=self.rng.choice([128 * KIB, 2 * MIB]),
        )
        storage = Storage(hot_bytes=HOT_BYTES, write_through=self.rng.random() < 0.3)
        with engine_of(loaded, storage, disk) as cached, engine_of(loaded, Storage(hot_bytes=0), None) as cold:
            for _ in range(self.rng.randint(3, 8)):
                self.turn(cached, cold, self.rng.sample(chats, NUM_AT_ONCE))
            usage = cached.ask(lambda loop: Operations(loop).usage()).result(60)
        self.counters.update(usage.counters)
        assert usage.tiers["hot"].nbytes <= HOT_BYTES
        assert real_bytes(disk.directory) <= DISK_BYTES
        assert not list((disk.directory / "tmp").iterdir())

    def turn(self, cached: Engine, cold: Engine, chats: list[Chat]) -> None:
        cached.ask(pretend_slow).result(60)
        replies = [self.submit(cached, chat) for chat in chats]
        for reply in replies:
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
        self.num_requests += 1
        reply = Reply()
        request = Request(f"chat-{self.num_requests}", tuple(chat.tokens), 6, GREEDY, salt=chat.salt)
        engine.submit(request, reply.sink)
        return reply

    def compare(self, chat: Chat, reply: Reply, expected: Reply) -> None:
        pairs = zip(steps_of(reply), steps_of(expected), strict=True)
        for number, ((id_, logprob), (expected_id, expected_logprob)) in enumerate(pairs):
            difference = abs(logprob - expected_logprob)
            self.largest_difference = max(self.largest_difference, difference)
            where = (
                f"{self.architecture}, token {number} after {len(chat.tokens)}, {cached_tokens(reply)} of them cached"
            )
            assert difference <= TOLERANCE, (
                f"{where}: {logprob} of {id_} instead of {expected_logprob} of {expected_id}"
            )
            if id_ != expected_id:
                return  # a tie: from here on they are different texts

    def between(self, architecture: str) -> None:
        """What may happen to a folder while no server uses it."""
        folder = self.directory / architecture
        blocks = sorted(folder.rglob("*.safetensors"))
        if blocks and self.rng.random() < 0.3:
            path = self.rng.choice(blocks)
            flip(path, self.rng.randrange(path.stat().st_size))
        if self.rng.random() < 0.2:
            for path in folder.glob("catalogue*"):
                path.unlink()

    def look(self) -> None:
        gc.collect()
        mx.clear_cache()
        self.resident_bytes.append(psutil.Process().memory_info().rss)


@contextmanager
def engine_of(loaded: LoadedModel, storage: Storage, disk: DiskOptions | None) -> Iterator[Engine]:
    engine = Engine(loaded, Limits(memory_bytes=MEMORY_BYTES), Metrics(), storage, disk)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def pretend_slow(loop: Loop) -> None:
    """Tiny models compute a prompt faster than any disk reads it: then nothing would be read."""
    loop.speeds.alone = Rate()
    loop.speeds.alone.add(300, 1.0)


def steps_of(reply: Reply) -> list[tuple[int, float]]:
    reply.wait()
    pieces = [event for event in reply.events if isinstance(event, Piece)]
    return [(id_, lp.logprob) for piece in pieces for id_, lp in zip(piece.ids, piece.logprobs, strict=True)]


def cached_tokens(reply: Reply) -> int:
    return reply.wait().usage.cached_tokens  # pyright: ignore[reportAttributeAccessIssue]


def assert_the_comparison_can_fail(soak: Soak) -> None:
    """Another beginning must show in the figures that are compared, more than rounding does."""
    for architecture in ARCHITECTURES:
        with engine_of(tiny_loaded(architecture), Storage(hot_bytes=0), None) as engine:
            one, other = (steps_of(soak.submit(engine, Chat(0, [*soak.words(300, 300), *range(20)]))) for _ in range(2))
        assert max(abs(a[1] - b[1]) for a, b in zip(one, other, strict=True)) > 3 * TOLERANCE, architecture


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_is_wrong_and_nothing_grows(tmp_path: Path) -> None:
    minutes = float(os.environ.get("KVSTRATA_SOAK_MINUTES", DEFAULT_MINUTES))
    soak = Soak(tmp_path, random.Random(os.environ.get("KVSTRATA_SOAK_SEED", "1")))
    assert_the_comparison_can_fail(soak)
    chats = {name: [soak.new_chat(number) for number in range(NUM_CHATS)] for name in ARCHITECTURES}
    for name in ARCHITECTURES:
        soak.epoch(name, chats[name])
    soak.look()
    process = psutil.Process()
    num_python_threads, num_threads, num_files = threading.active_count(), process.num_threads(), process.num_fds()
    active_bytes = mx.get_active_memory()
    ends_s = time.monotonic() + 60 * minutes
    while time.monotonic() < ends_s:
        name = soak.rng.choice(ARCHITECTURES)
        soak.between(name)
        soak.epoch(name, chats[name])
        soak.look()
        assert threading.active_count() == num_python_threads
        assert process.num_threads() <= num_threads + NUM_LEAVING
        assert process.num_fds() == num_files
        assert mx.get_active_memory() <= active_bytes + MIB
    report(soak)
    for what in ("cached_tokens", "promoted_tokens", "evicted_tokens", "disk_evicted_limit", "disk_written_base"):
        assert soak.counters[what] > 0, what
    third = max(1, len(soak.resident_bytes) // 3)
    before, after = (
        statistics.median(part) for part in (soak.resident_bytes[third:-third], soak.resident_bytes[-third:])
    )
    is_long = len(soak.resident_bytes) >= NUM_RESTARTS_TO_JUDGE
    assert after - before <= (MOST_GROWTH_BYTES if is_long else MOST_GROWTH_OF_SHORT_RUN_BYTES)


def report(soak: Soak) -> None:
    resident = [nbytes // MIB for nbytes in soak.resident_bytes]
    print(f"\n{soak.num_requests} requests, {len(resident)} restarts, largest difference {soak.largest_difference:.1e}")
    shown = resident[:: max(1, len(resident) // 20)]
    print(f"resident MiB: {' '.join(map(str, shown))}, at most {max(resident)}")
    print(", ".join(f"{name} {count}" for name, count in sorted(soak.counters.items()) if count))
