"""Read a block's file and trust nothing in it. Knows one file, not the folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvstrata.tiers.block import Block, BlockId, BlockTensor, Chain
from kvstrata.tiers.block_file import (
    ALIGNMENT_BYTES,
    DamagedBlock,
    Header,
    header_bytes_of,
    parse_header,
    take_tensor,
    verify_header,
)
from kvstrata.tiers.disk.errors import Damage
from kvstrata.tiers.disk.filesystem import Files, read_all


@contextmanager
def opened(files: Files, path: Path) -> Iterator[int]:
    fd = files.open(path)
    try:
        yield fd
    finally:
        files.close(fd)


def read_header(files: Files, fd: int) -> Header:
    """Read and verify a header: for nearly every block one page, and no payload."""
    beginning = _read(files, fd, 0, ALIGNMENT_BYTES)
    length = header_bytes_of(beginning)
    if len(beginning) < ALIGNMENT_BYTES:
        raise DamagedBlock(Damage.LENGTH, "the file ends in its header")
    rest = _read(files, fd, ALIGNMENT_BYTES, length - ALIGNMENT_BYTES)
    if len(beginning) + len(rest) < length:
        raise DamagedBlock(Damage.LENGTH, "the file ends in its header")
    return parse_header(beginning + rest)


def read_block(files: Files, path: Path, wanted: BlockId, *, chain: Chain, root: bytes | None) -> Block:
    """Read a block and verify all of it. Raises DamagedBlock, or OSError if the file cannot be read."""
    try:
        return _read_block(files, path, wanted, chain=chain, root=root)
    except ValueError as error:
        # The checksums are right, but no block has such values: no tokens, a negative size.
        raise DamagedBlock(Damage.HEADER, str(error)) from error


def _read_block(files: Files, path: Path, wanted: BlockId, *, chain: Chain, root: bytes | None) -> Block:
    with opened(files, path) as fd:
        size_bytes = files.status(fd).size_bytes
        header = read_header(files, fd)
        verify_header(header, wanted=wanted, root=root, chain=chain, size_bytes=size_bytes)
        tensors = _read_tensors(files, fd, header)
    return header.block(tensors)


def _read_tensors(files: Files, fd: int, header: Header) -> dict[str, BlockTensor]:
    payload = _fill(files, fd, header.header_bytes, header.file_bytes - header.header_bytes)
    return {
        name: take_tensor(name, place, payload[place.offset - header.header_bytes :][: place.nbytes])
        for name, place in header.places.items()
    }


def _fill(files: Files, fd: int, offset: int, nbytes: int) -> memoryview:
    # Uninitialised memory: clearing it first would cost as much as a fast disk.
    buffer = np.empty(nbytes, dtype=np.uint8).data if nbytes else memoryview(bytearray())
    if read_all(files, fd, buffer, offset) != nbytes:
        raise DamagedBlock(Damage.LENGTH, "the file ends before its tensors do")
    return buffer.toreadonly()


def _read(files: Files, fd: int, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_all(files, fd, memoryview(buffer), offset)])
