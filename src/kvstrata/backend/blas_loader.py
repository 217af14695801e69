"""Gives MLX's CPU back-end an optimised BLAS, before mlx.core is imported.

The wheel links a reference BLAS, thirty times slower than what numpy has. A library that exports plain `cblas_sgemm`
and is loaded with RTLD_GLOBAL before libmlx wins the symbol lookup. Candidates: KVSTRATA_BLAS; PyPI's scipy-openblas32
under plain names (renamed.py); a system OpenBLAS. Without one of them everything works, slowly; `reason` says why.

Knows how to find, check and load a library. Never raises: a process without BLAS is slow, not broken.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstrata.backend.machine import mlx_backend, usable_cores
from kvstrata.backend.renamed import UnusableBlasError, renamed_openblas

SPIN = "OPENBLAS_THREAD_TIMEOUT"
ROW_MAJOR, NO_TRANSPOSE = 101, 111
SYSTEM_PATTERNS = (
    "/usr/lib/*/libopenblas.so*",
    "/usr/lib/*/openblas-*/libopenblas.so*",
    "/usr/lib64/libopenblas*.so*",
    "/usr/lib/libopenblas*.so*",
    "/usr/local/lib/libopenblas.so*",
    "/opt/OpenBLAS/lib/libopenblas.so*",
)


@dataclass(frozen=True)
class Blas:
    """What multiplies float32 matrices for MLX on the CPU."""

    name: str  # "openblas", "accelerate", "reference", "none needed", or the file's name
    version: str  # "" where it is not known
    path: Path | None  # the library that was loaded, if one was
    reason: str  # why this one
    num_threads: int


@functools.cache
def blas() -> Blas:
    """Loads one on the first call of the process; afterwards says which it was."""
    if sys.platform == "darwin":
        return Blas("accelerate", "", None, "macOS has its own", usable_cores())
    if mlx_backend() != "cpu":
        return Blas("none needed", "", None, f"MLX's back-end here is: {mlx_backend()}", 1)
    choice = os.environ.get("KVSTRATA_BLAS", "")
    if choice == "off":
        return _reference("KVSTRATA_BLAS=off")
    if "mlx.core" in sys.modules:
        return _reference("mlx.core was imported before kvstrata; import kvstrata first")
    return _first_usable(_named(Path(choice)) if choice else _candidates())


def _first_usable(candidates: Iterator[Callable[[], Blas]]) -> Blas:
    refusals: dict[str, None] = {}  # in order, each once
    for candidate in candidates:
        try:
            return candidate()
        except (UnusableBlasError, OSError) as error:
            refusals[str(error)] = None
    return _reference("; ".join(refusals))


def _named(path: Path) -> Iterator[Callable[[], Blas]]:
    yield lambda: _load(path.expanduser(), "KVSTRATA_BLAS names it")


def _candidates() -> Iterator[Callable[[], Blas]]:
    yield lambda: _load(renamed_openblas(), "from PyPI's scipy-openblas32, under plain names")
    # A copy that passed its checksum and still does not load refers to files that have moved.
    yield lambda: _load(renamed_openblas(rebuild=True), "from PyPI's scipy-openblas32, under plain names")
    found = list(_system_libraries())
    for path in found:
        yield functools.partial(_load, path, "the system's OpenBLAS")
    if not found:
        yield _no_system_library


def _no_system_library() -> Blas:
    raise UnusableBlasError("there is no system OpenBLAS either. Next: pip install 'kvstrata[cpu]'")


def _system_libraries() -> Iterator[Path]:
    here = Path(sys.prefix, "lib")
    yield from sorted(here.glob("libopenblas.so*"))  # conda
    for pattern in SYSTEM_PATTERNS:
        yield from sorted(Path("/").glob(pattern.lstrip("/")))
    from ctypes.util import find_library

    if name := find_library("openblas"):
        yield Path(name)


def _load(path: Path, reason: str) -> Blas:
    """Checks the library while only we can see its symbols, then shows them to the whole process."""
    with _short_spin():
        library = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
    _check_product(library, path)
    num_threads = _set_threads(library)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    version = _openblas_version(library)
    return Blas("openblas" if version else path.name, version, path, reason, num_threads)


@contextmanager
def _short_spin() -> Iterator[None]:
    """OpenBLAS's threads spin for a while after each product, on cores that MLX's own operations need.

    With the shortest spin (2**4 cycles) the default model decoded at 22.5 tokens/s instead of 19 on two quiet cores, at
    about 12 instead of 5 on busy ones. OpenBLAS reads this once, as it is loaded; no child process should inherit it.
    """
    if SPIN in os.environ:
        yield
        return
    os.environ[SPIN] = "4"
    try:
        yield
    finally:
        os.environ.pop(SPIN, None)


def _check_product(library: ctypes.CDLL, path: Path) -> None:
    """[1 2; 3 4] squared. A build with 64-bit integers or other names must not get near MLX."""
    if not hasattr(library, "cblas_sgemm"):
        raise UnusableBlasError(f"{path} does not export cblas_sgemm")
    square, result = (ctypes.c_float * 4)(1, 2, 3, 4), (ctypes.c_float * 4)()
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    layout, sizes = (ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE), (2, 2, 2)
    library.cblas_sgemm(*layout, *sizes, one, square, 2, square, 2, zero, result, 2)
    if list(result) != [7, 10, 15, 22]:
        raise UnusableBlasError(f"{path} multiplies wrongly: {list(result)}")


def _set_threads(library: ctypes.CDLL) -> int:
    """OpenBLAS counts the machine's cores, not the share that a cgroup grants. What the user set stays."""
    if not hasattr(library, "openblas_set_num_threads"):
        return usable_cores()
    if not (os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")):
        library.openblas_set_num_threads(usable_cores())
    return int(library.openblas_get_num_threads())


def _openblas_version(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_config"):
        return ""
    library.openblas_get_config.restype = ctypes.c_char_p
    words = re.search(rb"OpenBLAS\s+([\d.]+)", library.openblas_get_config() or b"")
    return words[1].decode() if words else "unknown"


def _reference(reason: str) -> Blas:
    return Blas("reference", "", None, reason, 1)
