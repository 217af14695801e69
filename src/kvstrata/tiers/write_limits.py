"""Bounds on writing: queued bytes, pauses after faults, share of a core, bytes a day."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstrata.tiers.block import BASE, Block, BlockId
from kvstrata.tiers.interface import Refusal


@dataclass(slots=True, eq=False)
class QueuedBlock:
    """An entry of the queue. The same block, queued again after it was withdrawn, is another entry."""

    block: Block
    replaces: bool = False  # the tier has the block in another form, which stays until this one is written
    num_attempts: int = 0


class WriteQueue:
    """Blocks to be written. `changed` guards the queue and is never held over a file operation or a query; the queue
    notifies of new blocks, the writer of removals."""

    def __init__(self, limit_bytes: int) -> None:
        self.changed = threading.Condition()
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.moved_s = 0.0  # when a block last left, or came to an empty queue
        self._entries: dict[BlockId, QueuedBlock] = {}
        self._lengths: dict[bytes, dict[BlockId, int]] = {}  # in tokens, of the queued bases, by parent
        self._needed: Counter[bytes] = Counter()  # how many entries name a key as theirs or as their parent

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, block: Block, *, replaces: bool = False) -> Refusal | None:
        """Queue a block. None: accepted."""
        with self.changed:
            if block.id in self._entries:
                return Refusal.PRESENT
            # A block that is larger than the whole queue is queued alone: otherwise it could never be written.
            if self._entries and self.num_bytes + block.nbytes > self.limit_bytes:
                return Refusal.QUEUE_FULL
            if not self._entries:
                self.moved_s = time.monotonic()
            self._entries[block.id] = QueuedBlock(block, replaces)
            self.num_bytes += block.nbytes
            self._needed.update((block.key, block.parent))
            if block.part == BASE:
                self._lengths.setdefault(block.parent, {})[block.id] = block.num_tokens
            self.changed.notify_all()
        return None

    def find(self, block: BlockId) -> list[Block]:
        with self.changed:
            return [self._entries[block].block] if block in self._entries else []

    def lengths_after(self, parent: bytes) -> set[int]:
        """Return the lengths in tokens of the queued blocks that follow a parent."""
        with self.changed:
            return set(self._lengths.get(parent, {}).values())

    def num_children(self, parent: bytes) -> int:
        with self.changed:
            return len(self._lengths.get(parent, {}))

    def entries(self) -> list[QueuedBlock]:
        """Return all entries, the oldest first."""
        with self.changed:
            return list(self._entries.values())

    def has(self, entry: QueuedBlock) -> bool:
        with self.changed:
            return self._entries.get(entry.block.id) is entry

    def needs(self, key: bytes) -> bool:
        """Whether a key must stay on the tier: of the parent of a queued block, or the base of a queued checkpoint."""
        with self.changed:
            return key in self._needed

    def unreachable_without(self, entry: QueuedBlock) -> list[QueuedBlock]:
        """Return this entry and all entries that no lookup could reach without it. Parents are queued before their
        children, a base before its checkpoint."""
        gone = {entry.block.key} if entry.block.part == BASE else set[bytes]()
        found: list[QueuedBlock] = []
        for other in self.entries():
            if other is entry or not gone.isdisjoint((other.block.key, other.block.parent)):
                if other.block.part == BASE:
                    gone.add(other.block.key)
                found.append(other)
        return found

    def remove(self, entry: QueuedBlock) -> None:
        with self.changed:
            if not self.has(entry):
                return
            del self._entries[entry.block.id]
            self.num_bytes -= entry.block.nbytes
            self.moved_s = time.monotonic()
            for key in (entry.block.key, entry.block.parent):
                self._needed[key] -= 1
                if not self._needed[key]:
                    del self._needed[key]
            following = self._lengths.get(entry.block.parent, {})
            following.pop(entry.block.id, None)
            if not following:
                self._lengths.pop(entry.block.parent, None)


class Backoff:
    """Pauses after faults, each twice as long as the last, up to a limit. The caller's lock guards it."""

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._clock = clock
        self._next_s = first_s
        self._until_s = 0.0
        self.reason = ""  # of the last fault; empty after a success

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._until_s - self._clock()) if self.reason else 0.0

    @property
    def is_paused(self) -> bool:
        return self.remaining_s > 0

    def begin(self, reason: str) -> bool:
        """Begin a pause. Return whether the fault before this one had another reason, or there was none."""
        is_news = reason != self.reason
        self.reason = reason
        self._until_s = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)
        return is_news

    def lift(self) -> None:
        """Allow an attempt now. After another fault the next pause is longer all the same."""
        self._until_s = 0.0

    def end(self) -> bool:
        """Record a success. Return whether it follows a fault."""
        was_failing = bool(self.reason)
        self.reason, self._next_s = "", self._first_s
        return was_failing


T = TypeVar("T")

SLICE_BYTES = 1 << 20

# Shorter rests are added up: to sleep and wake has a cost too.
SHORTEST_REST_S = 0.005


class Pace(Protocol):
    """Run a slice of work, and rest if it is time to."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def unpaced(work: Callable[[], T], /) -> T:
    return work()


def slices_of(content: memoryview) -> Iterator[memoryview]:
    """Split a view of bytes into slices of work."""
    for begin in range(0, content.nbytes, SLICE_BYTES):
        yield content[begin : begin + SLICE_BYTES]


class Throttle:
    """Limit work to a share of a core. `clock` is the CPU time of the thread: waiting for a disk takes no core."""

    def __init__(
        self, rest: Callable[[float], None], *, share: float, clock: Callable[[], float] = time.thread_time
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"A share is above 0 and at most 1, not {share}")
        self._rest = rest
        self._rest_for_each_s = 1 / share - 1
        self._clock = clock
        self._owed_s = 0.0

    def pace(self, work: Callable[[], T], /) -> T:
        began_s = self._clock()
        result = work()
        self._owed_s += (self._clock() - began_s) * self._rest_for_each_s
        if self._owed_s >= SHORTEST_REST_S:
            owed_s, self._owed_s = self._owed_s, 0.0
            self._rest(min(owed_s, threading.TIMEOUT_MAX))
        return result


SECONDS_OF_A_DAY = 86_400


class DailyWriteBudget:
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
            self._begin_day(now)
            if self._limit_bytes and self._written_bytes + nbytes > self._limit_bytes:
                self._is_spent = True
            if not self._is_spent:
                self._written_bytes += nbytes
            return not self._is_spent

    def give_back(self, nbytes: int, now: float) -> None:
        """Give back bytes that were taken and could not be written."""
        with self._lock:
            self._begin_day(now)
            self._written_bytes = max(0, self._written_bytes - nbytes)

    def written_bytes(self, now: float) -> int:
        with self._lock:
            self._begin_day(now)
            return self._written_bytes

    def _begin_day(self, now: float) -> None:
        if day_of(now) != self._day:
            self._day, self._written_bytes, self._is_spent = day_of(now), 0, False


def day_of(now: float) -> int:
    return int(now // SECONDS_OF_A_DAY)
