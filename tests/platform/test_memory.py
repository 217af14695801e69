"""Freed memory returns to the system: resident memory of processes that allocate as a server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvstrata.platform import memory
from kvstrata.platform.memory import Heap

on_glibc = pytest.mark.skipif(memory.heap().library != "glibc", reason="macOS and musl have their own ways")

# Loading a model frees large buffers: from then on glibc keeps what is smaller.
LOAD = (
    "import kvstrata, json, mlx.core as mx, psutil\nmx.set_cache_limit(0)\nx = mx.ones((7, 1 << 20)); mx.eval(x); del x"
)

RSS = "psutil.Process().memory_info().rss / 2**20"

BUFFERS = f"""
{LOAD}
from kvstrata.platform.memory import map_large_buffers, trim_heap
{{before}}
start = {RSS}
kept, gone = [], []
for _ in range(100):
    large, small = mx.ones((300, 1000)), mx.ones((10, 1000)); mx.eval(large, small)
    gone.append(large); kept.append(small)
held = {RSS}
large = None; gone.clear()
{{after}}
print(json.dumps([held - start, {RSS} - start]))
"""

ENGINE = f"""
{LOAD}
import dataclasses, threading, time
from kvstrata.engine.engine import Engine
from kvstrata.engine import thread
from kvstrata.engine.config import EngineLimits
from kvstrata.engine.request import Finished, Request, Sampling
from kvstrata.metrics import Metrics
from tests.support.models import tiny_loaded, tiny_module
module = tiny_module("llama", num_hidden_layers=4, num_key_value_heads=4, head_dim=128)
loaded = dataclasses.replace(tiny_loaded("llama"), module=module)
engine = Engine(loaded, EngineLimits(memory_bytes=4 << 30, prefill_chunk_tokens=256), Metrics())
KEEPS_FREED_S = thread.KEEPS_FREED_S = 0.3
engine.start()
def ask(i, length):
    end = threading.Event()
    prompt = tuple((i * 7 + j * j) % 97 for j in range(length))
    request = Request(f"r{{i}}", prompt, 2, Sampling(temperature=0))
    engine.submit(request, lambda e: isinstance(e, Finished) and end.set())
    assert end.wait(120)
ask(0, 900)
engine.ask(lambda core: core.prefix_cache.evictor.clear()).result()
def settled():
    values = []
    until_s = time.monotonic() + 2 * KEEPS_FREED_S
    while time.monotonic() < until_s or max(values[-5:]) - min(values[-5:]) > 1:
        values.append({RSS}); time.sleep(0.05)
    return values[-1]
start = settled()
for i in range(1, 5):
    ask(i, 900)
held = settled()
engine.ask(lambda core: core.prefix_cache.evictor.clear()).result()
after = settled()
engine.stop()
print(json.dumps([held - start, after - start]))
"""


def resident_mib(code: str) -> tuple[float, float]:
    """Held, and after it was let go of, each beside the start."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    held, after = json.loads(done.stdout)
    return held, after


@on_glibc
@pytest.mark.parametrize(("before", "after"), [("map_large_buffers()", ""), ("", "trim_heap()")])
def test_what_is_freed_goes_back(before: str, after: str) -> None:
    held, left = resident_mib(BUFFERS.format(before=before, after=after))
    assert held > 100
    assert left < 0.2 * held


@on_glibc
def test_what_the_cache_lets_go_of_goes_back() -> None:
    held, left = resident_mib(ENGINE)
    assert held > 40
    assert left < 0.3 * held


@pytest.mark.parametrize(
    ("environment", "is_set"),
    [
        ({}, False),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x=1"}, False),
    ],
)
def test_what_the_user_has_set_stays(
    environment: dict[str, str], is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in memory.SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert memory._is_set_by_user() == is_set


@pytest.mark.parametrize("library", ["glibc", "macos", "other"])
def test_every_library_is_told_of(library: memory.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_library", lambda: library)
    said = memory.heap()
    assert isinstance(said, Heap)
    assert said.gives_back
