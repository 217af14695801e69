"""The back-end of this process, its trials and the stand-ins of tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from kvstrata.codecs.metal.kernel_text import Dialect, Run, run_on_gpu

Path = Literal["cpu", "metal", "cuda", "plain"]

_pretended: list[Path] = []


def active() -> Path:
    return _pretended[-1] if _pretended else _found()


def on_cpu() -> bool:
    """Whether to use a CPU's work sizes: Metal's path uses a GPU's, on whatever machine it runs."""
    return active() in ("cpu", "plain") and mx.default_device() == mx.cpu


@contextmanager
def as_on_metal() -> Iterator[None]:
    """Take the path of a Mac on any machine: without kernels of ours it needs only MLX. It is slower than on a Mac."""
    with _as_if("metal"):
        yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use MLX's operations alone. Our CPU kernels need evaluated arrays; without them a whole pass can stay
    unevaluated."""
    with _as_if("plain"):
        yield


@contextmanager
def _as_if(path: Path) -> Iterator[None]:
    _pretended.append(path)
    try:
        yield
    finally:
        _pretended.pop()


@cache
def _found() -> Path:
    if mx.default_device() == mx.cpu:
        return "cpu" if importlib.util.find_spec("numba") is not None else "plain"
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "plain"


@dataclass(frozen=True)
class Trial:
    what: str
    error: float | None  # None: the kernel failed
    allowed: float
    ours_ms: float | None = None  # None: not timed, because the result is wrong
    stock_ms: float | None = None
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return self.error is not None and self.error <= self.allowed

    @property
    def is_used(self) -> bool:
        if not self.is_right or self.ours_ms is None or self.stock_ms is None:
            return False
        return self.ours_ms < self.stock_ms

    def __str__(self) -> str:
        """Say for people to read whether the kernel or MLX is used, and why."""
        if self.error is None:
            return f"{self.what}: MLX, for the kernel failed: {self.failure}"
        if not self.is_right:
            return f"{self.what}: MLX, for the kernel is off by {self.error:.3g}"
        return f"{self.what}: {'own' if self.is_used else 'MLX'} ({self.ours_ms:.3g} ms, MLX {self.stock_ms:.3g})"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "used": self.is_used}


def failed(what: str, allowed: float, failure: Exception) -> Trial:
    return Trial(what, None, allowed, failure=f"{type(failure).__name__}: {failure}"[:300])


def largest(errors: Iterable[float]) -> float:
    """Return the largest error, NaN being larger than all numbers."""
    return max(errors, key=lambda error: error if error == error else float("inf"))


class StandIn(NamedTuple):
    """Dialect and runner that replace this machine's, without a trial."""

    dialect: Dialect
    run: Run


class StandIns:
    """Dialect and runner of the portable kernels: this machine's, or a stand-in."""

    def __init__(self) -> None:
        self._stands: list[StandIn] = []

    def __bool__(self) -> bool:
        return bool(self._stands)

    @contextmanager
    def use(self, dialect: Dialect, run: Run) -> Iterator[None]:
        self._stands.append(StandIn(dialect, run))
        try:
            yield
        finally:
            self._stands.pop()

    @property
    def dialect(self) -> Dialect | None:
        """Dialect of the kernels. None: this machine does not use them; CUDA has other kernels."""
        return self._stands[-1].dialect if self._stands else metal_here()

    @property
    def run(self) -> Run:
        return self._stands[-1].run if self._stands else run_on_gpu


def metal_here() -> Dialect | None:
    """Return "metal" where a Mac's GPU computes, else None."""
    has_metal = active() == "metal" and mx.metal.is_available() and mx.default_device() == mx.gpu
    return "metal" if has_metal else None


def relative_error(a: mx.array, b: mx.array) -> float:
    """Return the largest difference as a share of the largest value of `b`."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    value = (mx.abs(a - b).max() / mx.abs(b).max()).item()
    assert isinstance(value, float)
    return value
