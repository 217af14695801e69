"""Bounds on writing: queued bytes, share of a core, bytes a day."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstrata.tiers.block import BASE, Block, BlockId
from kvstrata.tiers.interface import Refusal


@dataclass(slots=True, eq=False)
class Offer:
    """An offer of a block. The same block, offered again after it was withdrawn, is another offer."""

    block: Block
    replaces: bool = False  # the disk has the block in another form, which stays until this one is written
    num_attempts: int = 0


class BlockQueue:
    """Blocks to be written. `changed` guards the queue; the queue notifies of new blocks, the writer of removals."""

    def __init__(self, limit_bytes: int) -> None:
        self.changed = threading.Condition()
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.moved_s = 0.0  # when a block last left, or came to an empty queue
        self._offers: dict[BlockId, Offer] = {}
        self._lengths: dict[bytes, dict[BlockId, int]] = {}  # in tokens, of the queued bases, by parent

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, block: Block, *, replaces: bool = False) -> Refusal | None:
        """Queue a block. None: accepted."""
        with self.changed:
            if block.id in self._offers:
                return Refusal.PRESENT
            # A block that is larger than the whole queue is queued alone: otherwise it could never be written.
            if self._offers and self.num_bytes + block.nbytes > self.limit_bytes:
                return Refusal.QUEUE_FULL
            if not self._offers:
                self.moved_s = time.monotonic()
            self._offers[block.id] = Offer(block, replaces)
            self.num_bytes += block.nbytes
            if block.part == BASE:
                self._lengths.setdefault(block.parent, {})[block.id] = block.num_tokens
            self.changed.notify_all()
        return None

    def find(self, block: BlockId) -> list[Block]:
        with self.changed:
            return [self._offers[block].block] if block in self._offers else []

    def lengths(self, parent: bytes) -> set[int]:
        with self.changed:
            return set(self._lengths.get(parent, {}).values())

    def num_after(self, parent: bytes) -> int:
        with self.changed:
            return len(self._lengths.get(parent, {}))

    def offers(self) -> list[Offer]:
        with self.changed:
            return list(self._offers.values())

    def has(self, offer: Offer) -> bool:
        with self.changed:
            return self._offers.get(offer.block.id) is offer

    def needed_keys(self) -> frozenset[bytes]:
        """Return keys that must stay on the disk: parents of queued blocks, and bases of queued checkpoints."""
        with self.changed:
            return frozenset(key for each in self._offers.values() for key in (each.block.parent, each.block.key))

    def hanging_on(self, offer: Offer) -> list[Offer]:
        """Return this offer and all that no lookup could reach without it. Parents are queued before their children, a
        base before its checkpoint."""
        gone = {offer.block.key} if offer.block.part == BASE else set[bytes]()
        found: list[Offer] = []
        for other in self.offers():
            if other is offer or not gone.isdisjoint((other.block.key, other.block.parent)):
                if other.block.part == BASE:
                    gone.add(other.block.key)
                found.append(other)
        return found

    def remove(self, offer: Offer) -> None:
        with self.changed:
            if not self.has(offer):
                return
            del self._offers[offer.block.id]
            self.num_bytes -= offer.block.nbytes
            self.moved_s = time.monotonic()
            following = self._lengths.get(offer.block.parent, {})
            following.pop(offer.block.id, None)
            if not following:
                self._lengths.pop(offer.block.parent, None)


T = TypeVar("T")

STRIDE_BYTES = 1 << 20

# Shorter rests are added up: to sleep and wake has a cost too.
SHORTEST_REST_S = 0.005


class Take(Protocol):
    """Run a stride, and rest if it is time to."""

    def __call__(self, stride: Callable[[], T], /) -> T: ...


def at_once(stride: Callable[[], T], /) -> T:
    return stride()


def strides_of(content: memoryview) -> Iterator[memoryview]:
    """Split a view of bytes into strides."""
    for begin in range(0, content.nbytes, STRIDE_BYTES):
        yield content[begin : begin + STRIDE_BYTES]


class Strides:
    """Throttle to a share of a core. `clock` is the CPU time of the thread: waiting for a disk takes no core."""

    def __init__(
        self, rest: Callable[[float], None], *, share: float, clock: Callable[[], float] = time.thread_time
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"A share is above 0 and at most 1, not {share}")
        self._rest = rest
        self._rest_for_each_s = 1 / share - 1
        self._clock = clock
        self._owed_s = 0.0

    def take(self, stride: Callable[[], T], /) -> T:
        began_s = self._clock()
        result = stride()
        self._owed_s += (self._clock() - began_s) * self._rest_for_each_s
        if self._owed_s >= SHORTEST_REST_S:
            owed_s, self._owed_s = self._owed_s, 0.0
            self._rest(min(owed_s, threading.TIMEOUT_MAX))
        return result


SECONDS_OF_A_DAY = 86_400


class DailyBudget:
    """Bytes written since midnight UTC. Callers count queued bytes too: otherwise a burst could pass the limit."""

    def __init__(self, limit_bytes: int, *, day: int = 0, written_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes  # 0: no limit
        self._lock = threading.Lock()
        self._day = day
        self._written_bytes = written_bytes
        self._is_spent = False

    def left_bytes(self, now: float) -> float:
        """Return the bytes left today; infinite without a limit. The headers of queued blocks come on top."""
        if not self._limit_bytes:
            return math.inf
        written_bytes = self.written_bytes(now)
        return -math.inf if self._is_spent else self._limit_bytes - written_bytes

    def take(self, nbytes: int, now: float) -> bool:
        """Count bytes as written, and return whether they fit. After the first block that does not fit, none is
        accepted until tomorrow: it could be a child of that block."""
        with self._lock:
            self._turn(now)
            if self._limit_bytes and self._written_bytes + nbytes > self._limit_bytes:
                self._is_spent = True
            if not self._is_spent:
                self._written_bytes += nbytes
            return not self._is_spent

    def give_back(self, nbytes: int, now: float) -> None:
        """Give back bytes that were taken and could not be written."""
        with self._lock:
            self._turn(now)
            self._written_bytes = max(0, self._written_bytes - nbytes)

    def written_bytes(self, now: float) -> int:
        with self._lock:
            self._turn(now)
            return self._written_bytes

    def _turn(self, now: float) -> None:
        if day_of(now) != self._day:
            self._day, self._written_bytes, self._is_spent = day_of(now), 0, False


def day_of(now: float) -> int:
    return int(now // SECONDS_OF_A_DAY)
