"""The back-end of this process, its trials and the stand-ins of tests.

`runtime()` is the only mutable object of the process that kernels share.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import mlx.core as mx

from kvstrata.codecs.metal.kernel_text import Dialect, Run, run_on_gpu
from kvstrata.codecs.rope import RopeRotation

P = ParamSpec("P")
R = TypeVar("R")

Backend = Literal["cpu", "metal", "cuda", "plain"]


class VectorKind(NamedTuple):
    """Vectors that kernels are chosen for."""

    dtype: mx.Dtype
    dim: int
    rotation: RopeRotation | None = None


class HeadKind(NamedTuple):
    """Keys and values of a head that kernels are chosen for."""

    k: VectorKind
    v: VectorKind

    @property
    def label(self) -> str:
        dims = f"{self.k.dim}" if self.k.dim == self.v.dim else f"{self.k.dim} and {self.v.dim}"
        means = "" if self.k.rotation is None else ", RoPE-aware means"
        return f"heads of {dims}, {str(self.k.dtype).rpartition('.')[2]}{means}"


NOT_TRIED = "the kernel was not tried yet: a server tries it at its start"


@dataclass(frozen=True)
class KernelChoice:
    """Back-end that computes an operation: "stock" for MLX's own operations."""

    operation: str
    backend: str
    reason: str


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


class Runtime:
    """State that the kernels of a process share: the back-end, results of trials and checks, and stand-ins."""

    def __init__(self) -> None:
        self.trials: dict[TrialKey, Trial] = {}  # in the order in which they ran
        self.checks: dict[tuple[Hashable, ...], Any] = {}  # results of functions that are `checked_once`
        self.codec_kernels = StandIns()
        self.attention_kernels = StandIns()
        self._pretended: list[Backend] = []
        self._found: Backend | None = None

    @property
    def backend(self) -> Backend:
        if self._pretended:
            return self._pretended[-1]
        if self._found is None:
            self._found = _find_backend()
        return self._found

    @contextmanager
    def use_backend(self, backend: Backend) -> Iterator[None]:
        """Take the paths of a back-end on any machine."""
        self._pretended.append(backend)
        try:
            yield
        finally:
            self._pretended.pop()

    def run_once(self, operation: str, kind: Hashable, run_trial: Callable[[], Trial]) -> Trial:
        """Return the trial of an operation on vectors or heads of a kind; run it at the first call."""
        key = TrialKey(operation, kind)
        found = self.trials.get(key)
        if found is None:
            found = self.trials[key] = run_trial()
        return found

    def trials_of(self, kinds: type) -> list[tuple[TrialKey, Trial]]:
        """Return the trials so far on kinds of this type. Another thread may add to them meanwhile."""
        return [(key, trial) for key, trial in list(self.trials.items()) if isinstance(key.kind, kinds)]


class TrialKey(NamedTuple):
    operation: str
    kind: Any  # hashable


_runtime = Runtime()


def runtime() -> Runtime:
    return _runtime


def checked_once(check: Callable[P, R]) -> Callable[P, R]:
    """Keep the results of a check of this machine in the runtime, by the check's arguments."""

    @wraps(check)
    def known(*args: P.args, **kwargs: P.kwargs) -> R:
        checks, key = _runtime.checks, (known, *args, *kwargs.items())
        if key not in checks:
            checks[key] = check(*args, **kwargs)
        return checks[key]

    return known


def known_result(check: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return the result of a check that is `checked_once`. None: it has not run yet."""
    return _runtime.checks.get((check, *args, *kwargs.items()))


def no_kernels() -> str:
    """Say for people why MLX computes where no kernel of ours can."""
    if mx.default_device() == mx.cpu and importlib.util.find_spec("numba") is None:
        return "numba is not installed, and MLX is slow on a CPU: pip install 'kvstrata[cpu]'"
    return f"no kernel for the back-end {_runtime.backend}"


def as_on_metal() -> AbstractContextManager[None]:
    """Take the path of a Mac on any machine: without kernels of ours it needs only MLX. It is slower than on a Mac."""
    return _runtime.use_backend("metal")


def without_kernels() -> AbstractContextManager[None]:
    """Use MLX's operations alone. Our CPU kernels need evaluated arrays; without them a whole pass can stay
    unevaluated."""
    return _runtime.use_backend("plain")


def metal_here() -> Dialect | None:
    """Return "metal" where a Mac's GPU computes, else None."""
    has_metal = _runtime.backend == "metal" and mx.metal.is_available() and mx.default_device() == mx.gpu
    return "metal" if has_metal else None


def _find_backend() -> Backend:
    if mx.default_device() == mx.cpu:
        return "cpu" if importlib.util.find_spec("numba") is not None else "plain"
    if mx.metal.is_available():
        return "metal"
    return "cuda" if mx.cuda.is_available() else "plain"


def relative_error(a: mx.array, b: mx.array) -> float:
    """Return the largest difference as a share of the largest value of `b`."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    value = (mx.abs(a - b).max() / mx.abs(b).max()).item()
    assert isinstance(value, float)
    return value
