"""The default model, loaded once. Tiny random ones are in tests/support/models.py."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import settings

# Before mlx.core: on a GPU it would round what it multiplies to ten bits.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# Before mlx.core: it makes MLX use a fast BLAS.
import kvstrata  # noqa: F401 # isort: skip
import mlx.core as mx

from kvstrata.attention.cpu import step as cpu_step
from kvstrata.codecs import backends
from kvstrata.engine import build
from kvstrata.models.load import LoadedModel, load
from kvstrata.platform.device import METAL_ARRAYS
from kvstrata.prefix_cache import jobs

pytest_plugins = ["tests.support.cpu_time"]

# Free memory that a process of tests needs: the default model, its caches, a browser.
WORKER_BYTES = 3 << 30

# Other work on the machine must not fail a property.
settings.register_profile("kvstrata", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvstrata")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: one for each core, as many as fit into free memory."""
    return max(1, min(os.cpu_count() or 1, psutil.virtual_memory().available // WORKER_BYTES))


def pytest_configure(config: pytest.Config) -> None:
    """Processes that run tests side by side would each compile the kernels of attention and codecs. Now they find them
    on the disk."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        cpu_step.warm_up()


def pytest_collection_finish() -> None:
    """What was imported stays for good, and the kernels. Looking through it took 0.1 s for each test of memory."""
    cpu_step.warm_up()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _messages() -> Iterator[None]:
    """The command line shows messages in its own way; tests that run it in this process must not decide for others."""
    ours = logging.getLogger("kvstrata")
    before = ours.level, ours.handlers, ours.propagate
    yield
    level, ours.handlers, ours.propagate = before
    ours.setLevel(level)


class _Faults(logging.Handler):
    """Operations of the cache that raised, and that no test would notice: a fault costs no request."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if any(f"({chore}:" in message for chore in ("lookups", "commits", "releases", "reclaims", "slices")):
            self.messages.append(message)


@pytest.fixture(autouse=True)
def _no_cache_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fault of the cache fails the test, unless the test is marked as causing it."""
    faults, log = _Faults(), logging.getLogger(jobs.__name__)
    log.addHandler(faults)
    yield
    log.removeHandler(faults)
    if request.node.get_closest_marker("cache_faults") is None:
        assert not faults.messages


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    return load(None)


@pytest.fixture
def as_on_metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a Mac runs: no kernels of ours, MLX's quantized products, and a GPU's sizes."""
    monkeypatch.setattr(build, "max_arrays", lambda: METAL_ARRAYS)
    # MLX has it on a CPU in float32 only. A GPU adds up in float32 too, and rounds what comes out.
    gather_mm = mx.gather_mm

    def rounded(a: mx.array, b: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return gather_mm(a.astype(mx.float32), b.astype(mx.float32), *args, **kwargs).astype(a.dtype)

    monkeypatch.setattr(mx, "gather_mm", rounded)
    with backends.as_on_metal():
        yield


@pytest.fixture
def exact_buffers() -> Iterator[None]:
    """MLX hands out freed buffers that are larger than what is asked for, which shows where arrays are tiny."""
    if mx.default_device().type != mx.DeviceType.cpu:
        pytest.skip("MLX rounds buffers up to pages on a GPU")
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.fixture(params=["kernels", "plain"])
def attention_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(cpu_step, "available", lambda: False)
    elif not cpu_step.available():
        pytest.skip("no kernels on this machine")
    return request.param
