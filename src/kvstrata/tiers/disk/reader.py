"""Read one block and trust nothing in it.

`read_header` and `read_block` know a file. `DiskReader` loads blocks from the queue or the folder for the tier's
readers; a fault of the disk does not raise there, it is the reason of a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstrata.tiers.block import Block, BlockId, BlockTensor, Chain
from kvstrata.tiers.block_file import (
    ALIGNMENT_BYTES,
    BlockHeader,
    Damage,
    DamagedBlock,
    decode_tensor,
    header_bytes_of,
    parse_header,
    verify_header,
)
from kvstrata.tiers.disk.errors import DiskFault, fault_of
from kvstrata.tiers.disk.filesystem import Filesystem, NotAFile, read_all
from kvstrata.tiers.disk.folder import CacheFolder
from kvstrata.tiers.disk.index import BlockIndex
from kvstrata.tiers.interface import BlockEvent, TierCounters
from kvstrata.tiers.read_pool import LoadedBlock, MissingBlock, MissReason
from kvstrata.tiers.read_rates import RateMeter

log = logging.getLogger(__name__)

# An unreadable sector can hold up a thread for seconds, at each read.
AVOIDED_FOR_S = 60.0

NUM_AVOIDED = 4096


@contextmanager
def opened(files: Filesystem, path: Path) -> Iterator[int]:
    fd = files.open(path)
    try:
        yield fd
    finally:
        files.close(fd)


def read_header(files: Filesystem, fd: int) -> BlockHeader:
    """Read and verify a header: for nearly every block one page, and no payload."""
    beginning = _read(files, fd, 0, ALIGNMENT_BYTES)
    length = header_bytes_of(beginning)
    if len(beginning) < ALIGNMENT_BYTES:
        raise DamagedBlock(Damage.LENGTH, "the file ends in its header")
    rest = _read(files, fd, ALIGNMENT_BYTES, length - ALIGNMENT_BYTES)
    if len(beginning) + len(rest) < length:
        raise DamagedBlock(Damage.LENGTH, "the file ends in its header")
    return parse_header(beginning + rest)


def read_block(files: Filesystem, path: Path, wanted: BlockId, *, chain: Chain, root: bytes | None) -> Block:
    """Read a block and verify all of it. Raises DamagedBlock, or OSError if the file cannot be read."""
    try:
        return _read_block(files, path, wanted, chain=chain, root=root)
    except ValueError as error:
        # The checksums are right, but no block has such values: no tokens, a negative size.
        raise DamagedBlock(Damage.HEADER, str(error)) from error


def _read_block(files: Filesystem, path: Path, wanted: BlockId, *, chain: Chain, root: bytes | None) -> Block:
    with opened(files, path) as fd:
        size_bytes = files.status(fd).size_bytes
        header = read_header(files, fd)
        verify_header(header, wanted=wanted, root=root, chain=chain, size_bytes=size_bytes)
        tensors = _read_tensors(files, fd, header)
    return header.block(tensors)


def _read_tensors(files: Filesystem, fd: int, header: BlockHeader) -> dict[str, BlockTensor]:
    payload = _fill(files, fd, header.header_bytes, header.file_bytes - header.header_bytes)
    return {
        name: decode_tensor(name, range_, payload[range_.offset - header.header_bytes :][: range_.nbytes])
        for name, range_ in header.ranges.items()
    }


def _fill(files: Filesystem, fd: int, offset: int, nbytes: int) -> memoryview:
    # Uninitialised memory: clearing it first would cost as much as a fast disk.
    buffer = np.empty(nbytes, dtype=np.uint8).data if nbytes else memoryview(bytearray())
    if read_all(files, fd, buffer, offset) != nbytes:
        raise DamagedBlock(Damage.LENGTH, "the file ends before its tensors do")
    return buffer.toreadonly()


def _read(files: Filesystem, fd: int, offset: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_all(files, fd, memoryview(buffer), offset)])


class ReadableStore(Protocol):
    """The part of `DiskBlockStore` that the reader uses."""

    @property
    def folder(self) -> CacheFolder: ...

    @property
    def index(self) -> BlockIndex: ...

    def forget(self, block: BlockId) -> None: ...

    def quarantine_block(self, block: BlockId, damage: Damage) -> None: ...


class DiskReader:
    def __init__(
        self,
        store: ReadableStore,
        find_queued: Callable[[BlockId], list[Block]],
        counters: TierCounters,
        *,
        chain: Chain,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._find_queued = find_queued
        self._counters = counters
        self._chain = chain
        self._clock = clock
        self._lock = threading.Lock()
        self._avoided: OrderedDict[BlockId, tuple[float, DiskFault]] = OrderedDict()
        self._logged: set[DiskFault] = set()
        self.meter = RateMeter()

    def load(self, block: BlockId, root: bytes) -> LoadedBlock | MissingBlock:
        """Return a verified block, or why it is missing."""
        result = self._load(block, root)
        match result:
            case MissingBlock(_, reason):
                self._counters.add(BlockEvent.MISSED, reason)
            case LoadedBlock():
                self._store.index.record_uses([block], self._clock())
        return result

    def avoided(self, block: BlockId) -> list[DiskFault]:
        """Return the fault for which a block is avoided for a while, if there was one."""
        with self._lock:
            until, fault = self._avoided.get(block, (0.0, DiskFault.OTHER))
            return [fault] if until > self._clock() else []

    def _load(self, block: BlockId, root: bytes) -> LoadedBlock | MissingBlock:
        for queued in self._find_queued(block):
            if queued.root != root:
                return MissingBlock(block, Damage.ROOT)
            self._counters.add(BlockEvent.READ, "queue", nbytes=queued.nbytes)
            return LoadedBlock(queued)
        if self._store.index.pending.get(block) is not None:
            return MissingBlock(block, MissReason.ABSENT)  # it was removed, and its file is still there
        for fault in self.avoided(block):
            return MissingBlock(block, fault)
        try:
            return self._load_file(block, root)
        except DamagedBlock as damage:
            self._store.quarantine_block(block, damage.reason)
            return MissingBlock(block, damage.reason)
        except FileNotFoundError:
            if self._store.index.get(block) is not None:
                self._store.forget(block)
            return MissingBlock(block, MissReason.ABSENT)
        except NotAFile:
            self._counters.add(BlockEvent.FAILED, DiskFault.NOT_A_FILE)
            self._store.forget(block)
            return MissingBlock(block, DiskFault.NOT_A_FILE)
        except OSError as error:
            return MissingBlock(block, self._avoid(block, error))

    def _load_file(self, block: BlockId, root: bytes) -> LoadedBlock:
        folder = self._store.folder
        with self.meter.reading() as measure:
            found = read_block(folder.files, folder.path(block), block, chain=self._chain, root=root)
            measure(found.nbytes)
        self._counters.add(BlockEvent.READ, "disk", nbytes=found.nbytes)
        return LoadedBlock(found)

    def _avoid(self, block: BlockId, error: OSError) -> DiskFault:
        """Keep readers from a block for a while after a fault of the disk. Return the fault."""
        fault = fault_of(error)
        self._counters.add(BlockEvent.FAILED, fault)
        with self._lock:
            self._avoided[block] = (self._clock() + AVOIDED_FOR_S, fault)
            if len(self._avoided) > NUM_AVOIDED:
                self._avoided.popitem(last=False)
            is_new = fault not in self._logged
            self._logged.add(fault)
        if is_new:
            log.warning("The disk cache cannot be read (%s): %s. Such blocks are computed again", fault, error)
        return fault
