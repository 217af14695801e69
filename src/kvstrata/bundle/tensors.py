"""Any safetensors file: where its tensors lie, and its metadata. Trusts nothing that a header says. Knows no arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from kvstrata.bundle.reading import CHANGED
from kvstrata.errors import UnusableFile
from kvstrata.tier.block import ITEM_BYTES

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 << 20
# Commas, lists and objects of a header: their parsing holds up other threads.
MAX_HEADER_VALUES = 1 << 20
MAX_TENSORS = 1 << 16
MAX_AXES = 8
METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorPlace:
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file that it is read from
    nbytes: int


@dataclass(frozen=True)
class TensorTable:
    file: BinaryIO
    places: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places.values())

    def read(self, name: str) -> bytes:
        place = self.places[name]
        self.file.seek(place.offset)
        content = self.file.read(place.nbytes)
        if len(content) != place.nbytes:
            raise _unusable("it ends early")
        return content


def looks_like_tensors(beginning: bytes) -> bool:
    return len(beginning) > LENGTH_BYTES and beginning[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{"


def read_table(file: BinaryIO, offset: int, nbytes: int) -> TensorTable:
    """Of the file that lies at `offset`. Raises UnusableFile."""
    file.seek(offset)
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, nbytes - LENGTH_BYTES):
        raise _unusable(f"its header would have {length} bytes")
    header = file.read(length)
    if sum(map(header.count, (b",", b"[", b"{"))) > MAX_HEADER_VALUES:
        raise _unusable(f"its header has more than {MAX_HEADER_VALUES} values")
    try:
        fields = json.loads(header)
        metadata = fields.pop(METADATA, {})
        if len(fields) > MAX_TENSORS or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("too many tensors, or metadata that is no text")
        begins = offset + LENGTH_BYTES + length
        places = {name: _place(entry, begins, offset + nbytes) for name, entry in fields.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise _unusable(f"its header makes no sense ({type(error).__name__})") from error
    if sum(place.nbytes for place in places.values()) > nbytes:
        raise _unusable("its tensors lie on each other")
    return TensorTable(file, places, metadata)


def _place(entry: Mapping[str, Any], begins: int, ends: int) -> TensorPlace:
    first, last = entry["data_offsets"]
    shape, dtype = entry["shape"], entry["dtype"]
    whole_numbers = [first, last, *shape]
    if len(shape) > MAX_AXES or any(type(number) is not int or number < 0 for number in whole_numbers):
        raise ValueError("a size that is no whole number")
    if last - first != prod(shape) * ITEM_BYTES[dtype] or begins + last > ends:
        raise ValueError("a tensor that is not where it should be")
    return TensorPlace(dtype, tuple(shape), begins + first, last - first)


@dataclass(frozen=True)
class TensorNamed:
    """One that is about to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def encode_table(tensors: Iterable[TensorNamed], metadata: Mapping[str, str]) -> bytes:
    """The header of a file whose tensors follow in this order, without gaps."""
    fields: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        begin, end = end, end + prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        fields[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _unusable(why: str) -> UnusableFile:
    return UnusableFile(f"This is no file of tensors that can be read: {why}. Make it or copy it again. {CHANGED}")
