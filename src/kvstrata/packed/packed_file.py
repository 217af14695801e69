"""Packed weights in a file, so that the next start of a model reads them instead of packing them again.

    arrays, one after the other | index: JSON | length of the index: 8 bytes | blake3 of all that comes before: 32 bytes

The file's name is a hash of the model, the form of its weights, the machine and the code that packs. A file that is
truncated, changed, not private to this user, or of other shapes is a miss. Files are published by a rename. If they
exceed `MAX_BYTES` together, the least recently read ones are deleted.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import llvmlite.binding as llvm
import mlx.core as mx
import numpy as np
from blake3 import blake3

from kvstrata.packed.cpu.tiles import DOT
from kvstrata.packed.weight import PackedWeight, TileFormat
from kvstrata.platform.files import cache_root
from kvstrata.platform.source_digest import source_digest

log = logging.getLogger(__name__)

SUFFIX = ".packed"
TEMPORARY = ".tmp"
# Most bytes of all files together, and bytes that a new file leaves free on its volume.
MAX_BYTES = 32 << 30
FREE_BYTES = 4 << 30
# Shortest packing that is worth a file.
MIN_PACKING_S = 0.3
LENGTH_BYTES, DIGEST_BYTES = 8, 32
# Age of a temporary file whose writer has certainly ended.
ABANDONED_S = 86_400


@dataclass(frozen=True)
class PackedModelWeights:
    """Contents of a file of packed weights."""

    weights: Mapping[str, Sequence[PackedWeight]]  # of layers by their names: one, or one for each expert or head
    activations: Mapping[str, int]  # activation functions of fused blocks (block.py), by their names


def packed_file_path(fingerprint: str) -> Path:
    """Return the path for a model. `fingerprint`: of the model, including the form of its weights."""
    return cache_root() / "packed" / f"{blake3(f'{fingerprint} {_machine()}'.encode()).hexdigest()[:32]}{SUFFIX}"


@cache
def _machine() -> str:
    """Describe everything but the model that decides how weights are packed and which blocks are fused."""
    libraries = [version(name) for name in ("mlx", "mlx-lm", "numba", "llvmlite")]
    cpu = [llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), DOT]
    return json.dumps([source_digest(Path(__file__).parent), libraries, cpu])


def read_packed_file(path: Path) -> PackedModelWeights | None:
    """Read packed weights. None: no file exists that can be trusted."""
    try:
        content = _read_content(path)
        weights = None if content is None else _parse_content(content)
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.info("Packed weights in %s cannot be used, so they are packed again: %s", path, error)
        return None
    return weights


def _read_content(path: Path) -> memoryview | None:
    """Return the bytes of a file. None: the file is truncated, changed or not private to this user."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not stat.S_ISREG(status.st_mode) or not is_own or status.st_size <= LENGTH_BYTES + DIGEST_BYTES:
            return None
        content = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(fd)
    digest = blake3(content[:-DIGEST_BYTES], max_threads=blake3.AUTO).digest()
    return content if digest == content[-DIGEST_BYTES:] else None


def _parse_content(content: memoryview) -> PackedModelWeights:
    index_end = len(content) - LENGTH_BYTES - DIGEST_BYTES
    length = int.from_bytes(content[index_end : index_end + LENGTH_BYTES], "little")
    index = json.loads(bytes(content[index_end - length : index_end]))
    weights = {name: tuple(_read_weight(content, *each) for each in found) for name, found in index["weights"].items()}
    return PackedModelWeights(weights, index["activations"])


def _read_weight(content: memoryview, at: int, sizes: Sequence[int], form: Sequence[int], rows: int) -> PackedWeight:
    num_codes, num_scales = sizes
    codes, scales = (
        mx.array(np.frombuffer(content, np.uint8, count, start))
        for start, count in ((at, num_codes), (at + num_codes, num_scales))
    )
    return PackedWeight(codes, scales, TileFormat(*form), rows)


@dataclass
class PackedFileWriter:
    """Writer of a file while a model is packed. A disk error ends the file, and packing continues."""

    path: Path
    _file: BinaryIO | None = None
    _digest: Any = field(default_factory=lambda: blake3(max_threads=blake3.AUTO))
    _weights: dict[str, list[Any]] = field(default_factory=dict)
    _num_bytes: int = 0
    _began_s: float = field(default_factory=time.perf_counter)

    @property
    def _temporary(self) -> Path:
        return self.path.with_suffix(f".{os.getpid()}{TEMPORARY}")

    def open(self, needed_bytes: int) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A killed process with the same id may have left one; ids repeat in containers.
            self._temporary.unlink(missing_ok=True)
            _reclaim_space(self.path.parent, needed_bytes)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = open(os.open(self._temporary, flags, 0o600), "wb")  # noqa: SIM115
        except OSError as error:
            self._give_up(error)

    def add_weights(self, name: str, weights: Sequence[PackedWeight]) -> None:
        """Add the packed weights of a layer."""
        found: list[Any] = []
        for weight in weights:
            arrays: list[Any] = [np.asarray(array) for array in weight.arrays]
            form = weight.form
            sizes = [array.nbytes for array in arrays]
            fields = [form.bits, form.kind, form.group, form.columns]
            found.append([self._num_bytes, sizes, fields, weight.shape[0]])
            for array in arrays:
                self._write(memoryview(array))
        self._weights[name] = found

    def publish(self, activations: Mapping[str, int]) -> None:
        """Complete and publish the file, unless packing was fast. `activations`: as in `PackedModelWeights`."""
        if self._file is None or time.perf_counter() - self._began_s < MIN_PACKING_S:
            return
        index = json.dumps({"weights": self._weights, "activations": dict(activations)}).encode()
        self._write(memoryview(index))
        self._write(memoryview(len(index).to_bytes(LENGTH_BYTES, "little")))
        self._write(memoryview(self._digest.digest()))
        try:
            if self._file is not None:
                self._file.close()
                self._temporary.replace(self.path)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)
        self._file = None

    def _write(self, content: memoryview) -> None:
        if self._file is None:
            return
        try:
            self._file.write(content)
        except OSError as error:
            self._give_up(error)
        self._digest.update(content)
        self._num_bytes += content.nbytes

    def _give_up(self, error: OSError) -> None:
        log.info("Packed weights are not kept in %s: %s", self.path.parent, error)
        self.close()


@contextmanager
def writing_packed_file(path: Path, needed_bytes: int) -> Iterator[PackedFileWriter]:
    """Yield a writer, which leaves a complete file or none."""
    writer = PackedFileWriter(path)
    writer.open(needed_bytes)
    try:
        yield writer
    finally:
        writer.close()


def _reclaim_space(folder: Path, needed_bytes: int) -> None:
    """Delete the least recently read files. Raise OSError if the new file does not fit even then."""
    if needed_bytes > MAX_BYTES:
        # Checked before anything is deleted, because no deletion would suffice.
        raise OSError(f"{needed_bytes} bytes are more than all files may take")
    now = time.time()
    for path in folder.glob(f"*{TEMPORARY}"):
        if now - path.stat().st_mtime > ABANDONED_S:
            path.unlink(missing_ok=True)
    newest_first = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = needed_bytes
    for path in newest_first:
        total += path.stat().st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)
    if shutil.disk_usage(folder).free < needed_bytes + FREE_BYTES:
        raise OSError(f"{needed_bytes} bytes more are too many there")
