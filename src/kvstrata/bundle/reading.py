"""Reads a bundle and trusts nothing in it. First the whole file is hashed, then records are read one at a time.

A file can be made by anyone with right checksums: sizes, counts and order are checked too. What the bytes of a block
mean is checked by who makes arrays of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from kvstrata.bundle.format import (
    AGAIN,
    DIGEST_BYTES,
    LENGTH,
    PREAMBLE,
    Header,
    decode_header,
    header_bytes_of,
)
from kvstrata.disk.format import (
    ALIGNMENT_BYTES,
    DamagedBlock,
    parse_header,
    take_tensor,
    verify_header,
)
from kvstrata.disk.format import (
    header_bytes_of as block_header_bytes_of,
)
from kvstrata.errors import UnusableFile
from kvstrata.tier.block import BASE, BLOCK_TOKENS, MARK, Block, Chain

HASHED_BYTES = 4 << 20  # at once
CHANGED = "Nothing was changed."


@dataclass(frozen=True)
class Record:
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bundle:
    """A file whose checksum is right."""

    file: BinaryIO
    header: Header
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Lineage:
    """What keys are chained from. `max_bytes`: of one record."""

    root: bytes
    chain: Chain
    max_bytes: int


def open_bundle(file: BinaryIO, size_bytes: int, on_hashed: Callable[[], None] = lambda: None) -> Bundle:
    """Raises UnusableFile. `on_hashed` is called now and then: it may raise, to end a long reading."""
    file.seek(0)
    preamble = file.read(PREAMBLE.size)
    header_end = PREAMBLE.size + header_bytes_of(preamble)
    if size_bytes < header_end + 2 * DIGEST_BYTES + LENGTH.size:
        raise UnusableFile(f"The file ends early: it has {size_bytes} bytes. {AGAIN} {CHANGED}")
    _check_whole(file, size_bytes, on_hashed)
    file.seek(0)
    beginning = file.read(header_end)
    if file.read(DIGEST_BYTES) != blake3(beginning).digest():
        raise UnusableFile(f"The file's header is damaged. {AGAIN} {CHANGED}")
    header = decode_header(beginning[PREAMBLE.size :])
    return Bundle(file, header, tuple(_records(file, header_end + DIGEST_BYTES, size_bytes - DIGEST_BYTES)))


def _check_whole(file: BinaryIO, size_bytes: int, on_hashed: Callable[[], None]) -> None:
    digest, left = blake3(), size_bytes - DIGEST_BYTES
    file.seek(0)
    while left:
        piece = file.read(min(HASHED_BYTES, left))
        if not piece:
            raise UnusableFile(f"The file ends early. {AGAIN} {CHANGED}")
        digest.update(piece)
        left -= len(piece)
        on_hashed()
    if file.read(DIGEST_BYTES + 1) != digest.digest():
        raise UnusableFile(f"The file is damaged or cut short: its checksum is another. {AGAIN} {CHANGED}")


def _records(file: BinaryIO, offset: int, end: int) -> Iterator[Record]:
    while True:
        file.seek(offset)
        stored = file.read(LENGTH.size) if offset + LENGTH.size <= end else b""
        if len(stored) < LENGTH.size:
            raise UnusableFile(f"The file has no end. {AGAIN} {CHANGED}")
        (nbytes,) = LENGTH.unpack(stored)
        offset += LENGTH.size
        if not nbytes:
            break
        if nbytes < ALIGNMENT_BYTES // 8 or offset + nbytes > end:
            raise UnusableFile(f"The file has a record of {nbytes} bytes where none can be. {AGAIN} {CHANGED}")
        yield Record(offset, nbytes)
        offset += nbytes
    if offset != end:
        raise UnusableFile(f"The file goes on after its end. {AGAIN} {CHANGED}")


def blocks(bundle: Bundle, lineage: Lineage) -> Iterator[Block]:
    """All blocks in order, each verified: they follow each other from the first token to the last. A mark comes after
    the block at whose end it is."""
    parent, at, last = lineage.root, 0, None
    for record in bundle.records:
        block = _block(bundle.file, record, lineage)
        if block.part == MARK and last is not None:
            if (block.key, block.start) != (last.key, last.start) or block.token_ids != last.token_ids:
                raise _out_of_order()
            last = None
        elif block.part == BASE and (block.parent, block.start) == (parent, at):
            if at // BLOCK_TOKENS != (at + block.num_tokens - 1) // BLOCK_TOKENS:
                raise UnusableFile(f"A block of the file goes across a multiple of {BLOCK_TOKENS}. {AGAIN} {CHANGED}")
            parent, at, last = block.key, at + block.num_tokens, block
        else:
            raise _out_of_order()
        yield block
    if at != bundle.header.num_tokens:
        raise UnusableFile(
            f"The file holds {at} tokens, and says that it has {bundle.header.num_tokens}. {AGAIN} {CHANGED}"
        )


def _out_of_order() -> UnusableFile:
    return UnusableFile(f"The blocks of the file do not follow each other. {AGAIN} {CHANGED}")


def _block(file: BinaryIO, record: Record, lineage: Lineage) -> Block:
    if record.nbytes > lineage.max_bytes:
        raise UnusableFile(
            f"A block of the file has {record.nbytes} bytes; of this model none has more than {lineage.max_bytes}. "
            f"{AGAIN} {CHANGED}"
        )
    try:
        return _decode(_read(file, record), lineage)
    except DamagedBlock as error:
        raise UnusableFile(f"A block of the file is damaged: {error}. {AGAIN} {CHANGED}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise UnusableFile(f"A block of the file makes no sense: {type(error).__name__}. {AGAIN} {CHANGED}") from error


def _read(file: BinaryIO, record: Record) -> memoryview:
    # Uninitialised memory: clearing it first would cost as much as reading.
    buffer = np.empty(record.nbytes, np.uint8).data
    file.seek(record.offset)
    if file.readinto(buffer) != record.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise UnusableFile(f"The file ends early. {AGAIN} {CHANGED}")
    return buffer.toreadonly()


def _decode(content: memoryview, lineage: Lineage) -> Block:
    length = block_header_bytes_of(bytes(content[:ALIGNMENT_BYTES]))
    header = parse_header(bytes(content[:length]))
    verify_header(header, wanted=header.id, root=lineage.root, chain=lineage.chain, size_bytes=content.nbytes)
    tensors = {
        name: take_tensor(name, place, content[place.offset : place.offset + place.nbytes])
        for name, place in header.places.items()
        if place.offset >= length
    }
    if len(tensors) != len(header.places) or any(type(size) is not int for t in tensors.values() for size in t.shape):
        raise ValueError("a tensor lies outside its block")
    return header.block(tensors)
