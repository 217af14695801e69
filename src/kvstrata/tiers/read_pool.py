"""Threads that read blocks ahead of need, in order, within a bound of bytes. Knows no files and no stores.

A block counts towards the bound until its receiver has used its bytes and releases it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvstrata.tiers.block import Block, BlockId

log = logging.getLogger(__name__)


class MissReason(StrEnum):
    """The reasons for which a block was not delivered. A tier adds its own names of faults and damage."""

    ABSENT = "absent"
    CLOSED = "closed"
    OTHER = "other"


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    block: Block
    # To be called when the bytes have been used: others may be read in their place. A second call does nothing.
    release: Callable[[], None] = field(default=_nothing, compare=False, repr=False)

    @property
    def id(self) -> BlockId:
        return self.block.id


@dataclass(frozen=True, slots=True)
class MissingBlock:
    id: BlockId
    reason: str  # a MissReason, or a tier's name of a fault or damage

    def release(self) -> None:
        """Do nothing: there are no bytes."""


Deliver = Callable[[LoadedBlock | MissingBlock], None]

LoadBlock = Callable[[BlockId, bytes], LoadedBlock | MissingBlock]


class BlockReading:
    """A call of `read`. Results are delivered one at a time, in the order of the ids, on a thread of the reader."""

    def __init__(self, blocks: Sequence[BlockId], root: bytes, deliver: Deliver, sizes: Sequence[int]) -> None:
        self.blocks = tuple(blocks)
        self.sizes = tuple(sizes)  # in bytes; 0 where not known before the read
        self.root = root
        self._deliver = deliver
        self._lock = threading.Lock()
        self._ready: dict[int, LoadedBlock | MissingBlock] = {}
        self._next = 0
        self._is_delivering = False
        self._is_cancelled = False
        self._finished = threading.Event()
        if not self.blocks:
            self._finished.set()

    def cancel(self) -> None:
        """Cancel: no delivery begins after this returns; one in progress on another thread may still end."""
        with self._lock:
            self._is_cancelled = True
            dropped = list(self._ready.values())
            self._ready.clear()
            self._finished.set()
        for result in dropped:
            result.release()

    @property
    def is_cancelled(self) -> bool:
        with self._lock:
            return self._is_cancelled

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all blocks are delivered or cancelled. Return whether that was in time."""
        return self._finished.wait(timeout_s)

    def give(self, index: int, result: LoadedBlock | MissingBlock) -> None:
        with self._lock:
            is_dropped = self._is_cancelled
            if not is_dropped:
                self._ready[index] = result
                if self._is_delivering:
                    return  # the thread that delivers at present delivers this one too
                self._is_delivering = True
        if is_dropped:
            result.release()
            return
        while self._deliver_next():
            pass

    def _deliver_next(self) -> bool:
        with self._lock:
            if self._is_cancelled or self._next not in self._ready:
                self._is_delivering = False
                if self._next == len(self.blocks):
                    self._finished.set()
                return False
            result = self._ready.pop(self._next)
            self._next += 1
        try:
            self._deliver(result)
        except Exception:  # A bug of the caller must not end a thread that other readings need
            log.exception("Delivering a block of the tier failed")
            result.release()
        return True


class ReadPool:
    def __init__(self, load: LoadBlock, num_threads: int, ahead_bytes: int) -> None:
        self._load = load
        self._limit_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._jobs: deque[tuple[BlockReading, int]] = deque()
        self._numbers = itertools.count()
        self._ahead: dict[int, int] = {}  # bytes of each read that was begun, until they are used
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstrata-tier-reader-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, reading: BlockReading) -> None:
        jobs = [(reading, index) for index in range(len(reading.blocks))]
        with self._changed:
            if not self._is_closing:
                self._jobs.extend(jobs)
                self._changed.notify_all()
                return
        for _, index in jobs:
            reading.give(index, MissingBlock(reading.blocks[index], MissReason.CLOSED))

    @property
    def num_pending(self) -> int:
        with self._changed:
            return sum(not reading.is_cancelled for reading, _ in self._jobs)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of blocks that are read, or being read, and not used yet."""
        with self._changed:
            return sum(self._ahead.values())

    def close(self, timeout_s: float) -> bool:
        """End the threads; reads that have not begun are misses. False: a thread still waits for the tier."""
        with self._changed:
            self._is_closing = True
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        ends = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        for reading, index in left:
            reading.give(index, MissingBlock(reading.blocks[index], MissReason.CLOSED))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._may_begin())
                if self._is_closing:
                    return
                reading, index = self._jobs.popleft()
                number = next(self._numbers)
                self._ahead[number] = reading.sizes[index]
            reading.give(index, self._read(reading, index, number))

    def _may_begin(self) -> bool:
        """Whether the next block fits beside the blocks not used yet. A block above the bound is read alone."""
        while self._jobs and self._jobs[0][0].is_cancelled:
            self._jobs.popleft()
        if not self._jobs:
            return False
        reading, index = self._jobs[0]
        return not self._ahead or sum(self._ahead.values()) + reading.sizes[index] <= self._limit_bytes

    def _read(self, reading: BlockReading, index: int, number: int) -> LoadedBlock | MissingBlock:
        result = self._attempt(reading.blocks[index], reading.root)
        if isinstance(result, MissingBlock):
            self._used(number)
            return result
        with self._changed:
            self._ahead[number] = result.block.nbytes
        return replace(result, release=lambda: self._used(number))

    def _used(self, number: int) -> None:
        with self._changed:
            self._ahead.pop(number, None)
            self._changed.notify_all()

    def _attempt(self, block: BlockId, root: bytes) -> LoadedBlock | MissingBlock:
        try:
            return self._load(block, root)
        except Exception:  # A bug is logged and must not end the thread
            log.exception("Reading a block of the tier failed in a way that it should not")
            return MissingBlock(block, MissReason.OTHER)
