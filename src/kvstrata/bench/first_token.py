"""How soon the first token comes: without a cache, with one that has nothing, from memory, from disks after a restart.

Every round has a prompt of its own, goes through all cases, and compares them with its own first one. Files are taken
out of the system's page cache before they are read, where the system lets us.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstrata.codecs.registry import parse
from kvstrata.disk.files import Files
from kvstrata.disk.options import DiskOptions
from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Limits
from kvstrata.engine.request import Event, Failed, Finished, Piece, Request, Sampling
from kvstrata.engine.storage import Storage
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel

DISK_BYTES = 8 << 30
WARM_TOKENS = 64
# A cache may cost this much of the time without one, whatever the disk.
BOUND = 1.05

WITHOUT = "cold, without a cache"
COLD = "cold, with the cache on"
MEMORY = "in memory"
DISK = "on the disk, after a restart"


@dataclass(frozen=True)
class FirstToken:
    case: str
    prompt_tokens: int
    cached_tokens: int  # median, like the next two
    seconds: float
    ratio: float  # to the same round's without a cache
    largest_ratio: float
    is_same_reply: bool  # in all rounds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "bound": BOUND, "is_within_bound": self.ratio <= BOUND}


@dataclass(frozen=True)
class _Answer:
    seconds: float
    cached_tokens: int
    reply: tuple[int, ...]


class SlowFiles(Files):
    """A disk that reads so many bytes in a second and no more, until `end` is called."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._free_s = 0.0  # when the disk has done all that was asked of it

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        num_bytes = super().read_into(fd, buffer, offset)
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            until_s = self._free_s
        self._ended.wait(max(0.0, until_s - time.monotonic()))
        return num_bytes

    def end(self) -> None:
        self._ended.set()


def measure(
    loaded: LoadedModel,
    *,
    memory_bytes: int,
    prompt_tokens: int = 4000,
    precision: str = "raw",
    slow_bytes_s: Sequence[float] = (2e6,),
    rounds: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> list[FirstToken]:
    found = []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        rng = random.Random(number)
        prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(prompt_tokens))
        found.append(
            _round(loaded, memory_bytes, Storage(k=parse(precision), v=parse(precision)), prompt, slow_bytes_s)
        )
    return [_row(case, prompt_tokens, found) for case in found[0]]


def _round(
    loaded: LoadedModel, memory_bytes: int, storage: Storage, prompt: tuple[int, ...], slow_bytes_s: Sequence[float]
) -> dict[str, _Answer]:
    answers: dict[str, _Answer] = {}
    with _engine(loaded, memory_bytes, Storage(hot_bytes=0), None) as engine:
        answers[WITHOUT] = _first_token(engine, prompt)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        folder = Path(name)
        with _engine(loaded, memory_bytes, storage, _disk(folder)) as engine:
            answers[COLD] = _first_token(engine, prompt)
            answers[MEMORY] = _first_token(engine, prompt)
        disks = {DISK: SlowFiles(math.inf)}
        for speed in slow_bytes_s:
            disks[f"the same, read at {speed / 1e6:.3g} MB/s"] = SlowFiles(speed)
        for case, files in disks.items():
            _leave_page_cache(folder)
            with _engine(loaded, memory_bytes, storage, _disk(folder), files) as engine:
                answers[case] = _first_token(engine, prompt)
                files.end()
    return answers


def _row(case: str, prompt_tokens: int, found: Sequence[dict[str, _Answer]]) -> FirstToken:
    ratios = [answers[case].seconds / answers[WITHOUT].seconds for answers in found]
    return FirstToken(
        case=case,
        prompt_tokens=prompt_tokens,
        cached_tokens=round(statistics.median(answers[case].cached_tokens for answers in found)),
        seconds=statistics.median(answers[case].seconds for answers in found),
        ratio=statistics.median(ratios),
        largest_ratio=max(ratios),
        is_same_reply=all(answers[case].reply == answers[WITHOUT].reply for answers in found),
    )


def _disk(folder: Path) -> DiskOptions:
    return DiskOptions(folder, DISK_BYTES, reserve_bytes=0, queue_bytes=DISK_BYTES)


def _leave_page_cache(folder: Path) -> None:
    """So that they are read from the disk. Not every system can be asked for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@contextmanager
def _engine(
    loaded: LoadedModel, memory_bytes: int, storage: Storage, disk: DiskOptions | None, files: Files | None = None
) -> Iterator[Engine]:
    """Compiled and warm."""
    engine = Engine(loaded, Limits(memory_bytes=memory_bytes), Metrics(), storage, disk, files)
    engine.start()
    try:
        _first_token(engine, tuple(range(WARM_TOKENS)))
        yield engine
    finally:
        engine.stop()


def _first_token(engine: Engine, prompt: tuple[int, ...]) -> _Answer:
    ended = threading.Event()
    events: list[Event] = []
    times: list[float] = []

    def sink(event: Event) -> None:
        events.append(event)
        if isinstance(event, Piece):
            times.append(time.perf_counter())
        if isinstance(event, Finished | Failed):
            ended.set()

    began = time.perf_counter()
    engine.submit(Request(f"first-token-{began}", prompt, 2, Sampling(temperature=0)), sink)
    ended.wait()
    end = events[-1]
    if not isinstance(end, Finished):
        raise KvstrataError(f"The request failed: {end.message if isinstance(end, Failed) else end}")
    reply = tuple(id_ for event in events if isinstance(event, Piece) for id_ in event.ids)
    return _Answer(times[0] - began, end.usage.cached_tokens, reply)
