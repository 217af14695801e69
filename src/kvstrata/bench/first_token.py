"""How soon the first token comes: without a cache, with one that has nothing, from memory, from disks after a restart.

Every round has a prompt of its own, goes through all cases, and compares them with its own first one. Files are taken
out of the system's page cache before they are read, where the system lets us.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.bench.driver import Figure, Progress, lay_out, leave_page_cache, median_ratio, silent
from kvstrata.bench.streams import Prompt, Stream, answer, greedy, random_prompt, running
from kvstrata.codecs.registry import parse
from kvstrata.engine.config import EngineLimits, KvConfig
from kvstrata.engine.engine import Engine
from kvstrata.metrics import Metrics
from kvstrata.models.load import LoadedModel
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.options import DiskOptions

DISK_BYTES = 8 << 30
WARM_TOKENS = 64
# A cache may cost this much of the time without one, whatever the disk.
BOUND = 1.05

WITHOUT = "cold, without a cache"
COLD = "cold, with the cache on"
MEMORY = "in memory"
DISK = "on the disk, after a restart"


@dataclass(frozen=True)
class Load:
    prompt_tokens: int = 4000
    precision: str = "raw"
    slow_bytes_s: Sequence[float] = (2e6,)  # what slow disks read in a second


@dataclass(frozen=True)
class FirstToken(Figure):
    case: str
    prompt_tokens: int
    cached_tokens: int  # median, like the next two
    seconds: float
    ratio: float  # to the same round's without a cache
    largest_ratio: float
    is_same_reply: bool  # in all rounds

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "bound": BOUND, "is_within_bound": self.ratio <= BOUND}


class SlowFiles(Filesystem):
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


def measure(loaded: LoadedModel, load: Load, *, rounds: int = 3, progress: Progress = silent) -> list[FirstToken]:
    found = []
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        prompt = random_prompt(random.Random(number), loaded, load.prompt_tokens)
        found.append(_round(loaded, load, prompt))
    return [_row(case, load.prompt_tokens, found) for case in found[0]]


def table(rows: Sequence[FirstToken]) -> str:
    width = max(len(row.case) for row in rows) + 2
    return lay_out(
        rows,
        [
            ("the prompt is", f"<{width}", lambda row: row.case),
            ("cached", ">14", lambda row: f"{row.cached_tokens}/{row.prompt_tokens}"),
            ("seconds", ">10.2f", lambda row: row.seconds),
            ("ratio", ">8.3f", lambda row: row.ratio),
            ("largest", ">9.3f", lambda row: row.largest_ratio),
            ("same reply", ">12", lambda row: "yes" if row.is_same_reply else "no"),
        ],
        "medians; ratio: to the same round without a cache, at most 1.05 whatever the disk",
    )


def _round(loaded: LoadedModel, load: Load, prompt: Prompt) -> dict[str, Stream]:
    """Each case finds what those before it left: they cannot take turns."""
    answers: dict[str, Stream] = {}
    storage = KvConfig(k=parse(load.precision), v=parse(load.precision))
    with _engine(loaded, KvConfig(hot_bytes=0), None) as engine:
        answers[WITHOUT] = _answer(engine, prompt)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as name:
        folder = Path(name)
        with _engine(loaded, storage, folder) as engine:
            answers[COLD] = _answer(engine, prompt)
            answers[MEMORY] = _answer(engine, prompt)
        disks = {DISK: SlowFiles(math.inf)}
        for speed in load.slow_bytes_s:
            disks[f"the same, read at {speed / 1e6:.3g} MB/s"] = SlowFiles(speed)
        for case, files in disks.items():
            leave_page_cache(folder.rglob("*.safetensors"))
            with _engine(loaded, storage, folder, files) as engine:
                answers[case] = _answer(engine, prompt)
                files.end()
    return answers


def _row(case: str, prompt_tokens: int, found: Sequence[dict[str, Stream]]) -> FirstToken:
    answers, without = ([round_[each] for round_ in found] for each in (case, WITHOUT))
    times, times_without = ([stream.first_token_s for stream in streams] for streams in (answers, without))
    return FirstToken(
        case=case,
        prompt_tokens=prompt_tokens,
        cached_tokens=round(statistics.median(stream.usage.cached_tokens for stream in answers)),
        seconds=statistics.median(times),
        ratio=median_ratio(times, times_without),
        largest_ratio=max(a / b for a, b in zip(times, times_without, strict=True)),
        is_same_reply=all(a.ids == b.ids for a, b in zip(answers, without, strict=True)),
    )


@contextmanager
def _engine(
    loaded: LoadedModel, storage: KvConfig, folder: Path | None, files: Filesystem | None = None
) -> Iterator[Engine]:
    """Compiled and warm."""
    disk = None if folder is None else DiskOptions(folder, DISK_BYTES, reserve_bytes=0, queue_bytes=DISK_BYTES)
    with running(Engine(loaded, EngineLimits(), Metrics(), storage, disk, files)) as engine:
        _answer(engine, tuple(range(WARM_TOKENS)))
        yield engine


def _answer(engine: Engine, prompt: Prompt) -> Stream:
    return answer(engine, greedy(prompt, 2))
