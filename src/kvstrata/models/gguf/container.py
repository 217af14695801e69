"""The container: metadata and tensors of a GGUF file, or of the files that one was split into. Reads no weights.

Every number is checked against the length of the file before it is used, so a file that was cut off or is none of the
kind is a clear error.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.errors import ModelError
from kvstrata.models.gguf.tensor_types import BLOCKS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Beyond these a count is nonsense, and a list of that length would fill the memory.
MAX_ENTRIES = 1 << 20
MAX_DIMS = 4
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class BadGguf(ModelError):
    """A file that cannot be read as GGUF."""


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # rows first, as MLX has it
    kind: str  # F16, Q4_K ...
    octets: np.ndarray  # uint8, mapped: read when used

    @property
    def nbytes(self) -> int:
        return self.octets.nbytes


@dataclass(frozen=True)
class Gguf:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read(path: Path) -> Gguf:
    """Read a file, and the files that belong to it when the model is split."""
    first, *others = [_read_one(part) for part in parts_of(path)]
    tensors = dict(first.tensors)
    for other in others:
        tensors |= other.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise BadGguf(f"{path} has {len(tensors)} tensors in all its parts, and says {expected}. Get it again")
    return Gguf(path, first.metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """Return all files of a split model in order. `path` may be any of them."""
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    stem, _, total = found.groups()
    parts = [path.with_name(f"{stem}-{number:05}-of-{total}.gguf") for number in range(1, int(total) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise BadGguf(
            f"{path.name} is one of {len(parts)} files, and {', '.join(missing)} is not beside it. Get it too"
        )
    return parts


def _read_one(path: Path) -> Gguf:
    try:
        with path.open("rb") as file:
            octets = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BadGguf(f"{path} cannot be read: {error}") from error
    reader = _Reader(path, octets)
    try:
        return reader.read()
    except (struct.error, ValueError, TypeError, IndexError, RecursionError) as error:
        raise BadGguf(f"{path} is damaged near byte {reader.at}: {error}. Get it again") from error


class _Reader:
    def __init__(self, path: Path, octets: mmap.mmap) -> None:
        self._path = path
        self._octets = octets
        self.at = 0

    def read(self) -> Gguf:
        if self._octets[:4] != MAGIC:
            raise BadGguf(f"{self._path} is not a GGUF file.")
        self.at = 4
        version = self._number("<I")
        if version not in VERSIONS:
            raise BadGguf(f"{self._path} is GGUF of version {version}; kvstrata reads versions 2 and 3.")
        num_tensors, num_entries = self._count(), self._count()
        metadata = {self._string(): self._value(self._number("<I")) for _ in range(num_entries)}
        described = [self._described() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise BadGguf(f"{self._path} is damaged: it aligns its tensors to {alignment!r}. Get it again")
        start = -(-self.at // alignment) * alignment
        return Gguf(self._path, metadata, {each[0]: self._tensor(start, *each) for each in described})

    def _described(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._number("<I")
        if num_dims > MAX_DIMS:
            raise BadGguf(f"{self._path} is damaged: tensor {name!r} has {num_dims} dims. Get it again")
        shape = tuple(self._number("<Q") for _ in range(num_dims))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _tensor(self, start: int, name: str, shape: tuple[int, ...], code: int, offset: int) -> GgufTensor:
        block = BLOCKS.get(code)
        if block is None:
            known = ", ".join(sorted(each.name for each in BLOCKS.values()))
            raise BadGguf(
                f"{self._path}: tensor {name!r} is of a type ({code}) that kvstrata cannot read. It reads {known}."
            )
        num_values = math.prod(shape)
        if num_values % block.num_values or (shape and shape[-1] % block.num_values):
            raise BadGguf(f"{self._path} is damaged: {block.name} cannot hold rows of {shape[-1]} values.")
        num_bytes, first = num_values // block.num_values * block.num_bytes, start + offset
        if first + num_bytes > len(self._octets):
            raise BadGguf(
                f"{self._path} ends at byte {len(self._octets)}, in the middle of tensor {name!r}, which goes on to "
                f"{first + num_bytes}. It was cut off: get it again"
            )
        return GgufTensor(name, shape, block.name, np.frombuffer(self._octets, np.uint8, num_bytes, first))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("<I"), self._count())
        return self._number(self._format(kind))

    def _array(self, kind: int, count: int) -> Any:
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        numbers = np.frombuffer(self._bytes(count * struct.calcsize(self._format(kind))), self._format(kind))
        return numbers.tolist()

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise BadGguf(f"{self._path} is damaged near byte {self.at}: there is no type {kind}. Get it again")
        return _NUMBERS[kind]

    def _count(self) -> int:
        count = self._number("<Q")
        if count > MAX_ENTRIES:
            raise BadGguf(f"{self._path} is damaged near byte {self.at}: {count} entries. Get it again")
        return count

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return number

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8")

    def _bytes(self, count: int) -> bytes:
        if count > len(self._octets) - self.at:
            raise BadGguf(f"{self._path} ends in the middle of its header. It was cut off: get it again")
        self.at += count
        return self._octets[self.at - count : self.at]
