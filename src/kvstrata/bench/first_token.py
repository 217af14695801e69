"""How soon the first token comes: nothing cached, all in memory, on the disk after a restart, and on a slow disk."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstrata.engine.engine import Engine
from kvstrata.engine.limits import Disk, Limits, Storage
from kvstrata.engine.request import Event, Failed, Finished, Piece, Request, Sampling
from kvstrata.errors import KvstrataError
from kvstrata.metrics import Metrics
from kvstrata.models.loaded import LoadedModel
from kvstrata.tiers.files import Files

DISK_BYTES = 8 << 30


@dataclass(frozen=True)
class FirstToken:
    case: str
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    ratio: float  # to nothing cached

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class SlowFiles(Files):
    """A disk that reads so many bytes in a second and no more."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the disk has done all that was asked of it

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        num_bytes = super().read_into(fd, buffer, offset)
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            until_s = self._free_s
        threading.Event().wait(max(0.0, until_s - time.monotonic()))
        return num_bytes


def measure(
    loaded: LoadedModel,
    *,
    memory_bytes: int,
    prompt_tokens: int = 4000,
    precision: str = "raw",
    slow_bytes_s: float = 2e6,
) -> list[FirstToken]:
    storage = Storage(k=precision, v=precision)
    rng = random.Random(1)
    prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(prompt_tokens))
    found: list[tuple[str, float, int]] = []
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        with _engine(loaded, memory_bytes, storage, Path(folder)) as engine:
            _first_token(engine, prompt[-64::-1][:64])  # everything compiled and warm
            found.append(("nothing cached", *_first_token(engine, prompt)))
            found.append(("in memory", *_first_token(engine, prompt)))
        with _engine(loaded, memory_bytes, storage, Path(folder)) as engine:
            found.append(("on the disk, after a restart", *_first_token(engine, prompt)))
        with _engine(loaded, memory_bytes, storage, Path(folder), SlowFiles(slow_bytes_s)) as engine:
            name = f"on a disk that reads {slow_bytes_s / 1e6:.3g} MB/s, after a restart"
            found.append((name, *_first_token(engine, prompt)))
    cold_s = found[0][1]
    return [FirstToken(case, prompt_tokens, cached, seconds, seconds / cold_s) for case, seconds, cached in found]


@contextmanager
def _engine(
    loaded: LoadedModel, memory_bytes: int, storage: Storage, folder: Path, files: Files | None = None
) -> Iterator[Engine]:
    disk = Disk(folder, DISK_BYTES, reserve_bytes=0, queue_bytes=DISK_BYTES, files=files)
    engine = Engine(loaded, Limits(memory_bytes=memory_bytes), Metrics(), storage, disk)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def _first_token(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds to the first token, and how many prompt tokens were cached."""
    first, ended = threading.Event(), threading.Event()
    ends: list[Finished | Failed] = []
    times: list[float] = []

    def sink(event: Event) -> None:
        if isinstance(event, Piece) and not first.is_set():
            times.append(time.perf_counter())
            first.set()
        if isinstance(event, Finished | Failed):
            ends.append(event)
            ended.set()

    began = time.perf_counter()
    engine.submit(Request(f"first-token-{began}", prompt, 2, Sampling(temperature=0)), sink)
    ended.wait()
    end = ends[0]
    if isinstance(end, Failed):
        raise KvstrataError(f"The request failed: {end.message}")
    return times[0] - began, end.usage.cached_tokens
