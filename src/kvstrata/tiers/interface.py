"""The tier protocol: blocks in and out, lookups of chains, the state of writing, usage."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.tiers.block import BASE, Block, BlockId
from kvstrata.tiers.lookups import Lookup, Walk
from kvstrata.tiers.read_pool import BlockReading, Deliver
from kvstrata.tiers.read_rates import Rates
from kvstrata.tiers.removals import RemovalLog

T = TypeVar("T")

# Of a queue. A tier's writer may hurry where more waits.
CALM_SHARE = 1 / 8


class Refusal(StrEnum):
    """`put` did not take a block."""

    PRESENT = "present"
    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    FIRST_TOUCH = "first_touch"
    WRITE_BUDGET = "write_budget"
    PAUSED = "paused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Accepted:
    """On its way; `find` tells whether it still is, or arrived."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: Refusal
    nbytes: int = field(default=0, compare=False)  # of the block


@dataclass(frozen=True, slots=True)
class Removed:
    num_blocks: int = 0
    num_tokens: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Flushed:
    """`is_empty`: all that was queued has been written, dropped or failed."""

    is_empty: bool = True
    num_left: int = 0
    bytes_left: int = 0


@dataclass(frozen=True, slots=True)
class Writing:
    """How writing stands at one moment."""

    queue_bytes: int = 0
    limit_bytes: int = 0  # of the queue
    budget_bytes: float = math.inf  # that may still be written today, what is queued included
    unmoved_s: float = 0.0  # how long no block has left the queue; 0 where it is empty
    is_failing: bool = False  # the last attempt failed, or no more will be made
    paused_because: str = ""  # empty where blocks are taken
    is_full: bool = False  # that is why it is paused: there is no room
    # How often a block was not taken, or lost: a block that was put may not be there. Blocks that find no room do not
    # count, they would find none the next time either.
    num_faults: int = 0

    def would_take(self, refused: Refused) -> bool:
        """Whether a block that was refused may be taken now, where the reason did not lie in the block itself."""
        match refused.reason:
            case Refusal.PAUSED:
                return not self.paused_because
            case Refusal.QUEUE_FULL:
                # Not just for this one: half of the queue is empty.
                needed_bytes = max(refused.nbytes, self.limit_bytes // 2)
                return not self.queue_bytes or self.queue_bytes + needed_bytes <= self.limit_bytes
            case Refusal.WRITE_BUDGET:
                return self.queue_bytes + refused.nbytes <= self.budget_bytes
            case _:
                return False

    @property
    def is_calm(self) -> bool:
        """Whether so little waits to be written that writing may take its time."""
        return self.queue_bytes <= CALM_SHARE * self.limit_bytes

    def is_working(self, within_s: float) -> bool:
        """Whether it is worth waiting for room in the queue: the last attempt did not fail, and a block left the queue
        no longer ago than this. A disk that hangs says nothing."""
        return not self.is_failing and (not self.queue_bytes or self.unmoved_s < within_s)


@dataclass(frozen=True, slots=True)
class Usage:
    limit_bytes: int = 0
    allowed_bytes: int = 0  # the most that it can come to: less than the limit where the volume has no room for that
    disk_bytes: int = 0  # blocks, catalogue, quarantine and folders: what the volume gives up for the cache
    leaving_bytes: int = 0  # of blocks that were cleared and whose files are not deleted yet; part of disk_bytes
    quarantine_bytes: int = 0
    # Of the blocks that were asked about:
    block_bytes: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)  # bytes of tensors by what `tally` calls them
    # Of all, on the way:
    queue_bytes: int = 0
    num_queued: int = 0
    num_pending_reads: int = 0
    unused_bytes: int = 0  # read, or being read, and not used yet
    # Since the start:
    written_bytes: int = 0
    written_today_bytes: int = 0
    read_bytes: int = 0
    paused_because: str = ""  # empty where blocks are taken
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # event -> reason -> how often


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a shared tier has not of a conversation."""

    root: bytes = b""  # of its chain there
    links: tuple[Link, ...] = ()  # blocks, each after its parent
    marks: tuple[Link, ...] = ()  # the blocks at whose ends it has no mark
    is_known: bool = False  # False: the tier could not say


@dataclass(frozen=True, slots=True)
class SharedUsage:
    """Of a tier that others write too, since the start of this server. What it holds is not known here."""

    place: str  # without a password
    precision: str
    written_tokens: int
    read_tokens: int
    latency_s: float
    read_bytes_per_s: float
    usage: Usage


class Blocks(Protocol):
    """What a tier has, or has taken. Asked from any thread; a walk yields after each step that takes some time, so that
    its caller can pace it."""

    def find(self, key: bytes, part: str = BASE) -> int:
        """The bytes that reading it takes; 0 where it is not there, or left alone for a while."""
        ...

    def contents(self, block: BlockId) -> Mapping[str, int]:
        """Bytes of its tensors by label; nothing where it is not there."""
        ...

    def num_after(self, key: bytes) -> int:
        """How many blocks come right after it, at most; 0: it ends its chain."""
        ...

    def longest(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        """The longest chain after a parent that begins these tokens from `start` on. `at_marks`: that ends where the
        tier has a mark, so that a model that needs one can go on from it."""
        ...

    def about(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> Walk[OnDisk]:
        """For people who ask why not more of a prompt is found."""
        ...


class Tier(Protocol):
    limit_bytes: int  # 0: it can hold nothing
    read_ahead_bytes: int  # read and not yet used, at most
    on_room: Callable[[], None]  # called on a thread of the tier when the queue may have room again

    @property
    def blocks(self) -> Blocks: ...

    @property
    def removals(self) -> RemovalLog:
        """The blocks that have left, or were accepted and given up. What `clear` or `close` takes away need not be
        reported, and a tier that servers share reports nothing."""
        ...

    @property
    def rates(self) -> Rates: ...

    def look(self, walk: Walk[T], otherwise: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Have a walk done on a thread of the tier. `on_answer` is called there."""
        ...

    def put(
        self, block: Block, *, asked_twice: bool = False, replace: bool = False, unused_s: float = 0.0
    ) -> Accepted | Refused:
        """The block's bytes must not change any more. `replace`: also where the tier has this id. `asked_twice`: two
        requests had its tokens; under second touch nothing else is taken. `unused_s`: so long ago was the last."""
        ...

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        """Each block in order to `deliver`, on a thread of the tier, as soon as it is verified. Past `read_ahead_bytes`
        reading waits until blocks that were delivered are released. `sizes`: of the blocks; asked for if not given."""
        ...

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """These count as used now, though not read here. Nothing happens to those that are not here."""
        ...

    def remove(self, blocks: Sequence[BlockId]) -> Removed:
        """Not found any more when this returns, whatever hangs on them."""
        ...

    def clear(self, under: bytes = b"") -> Removed:
        """The same for all blocks under the roots that begin so."""
        ...

    def writing(self) -> Writing: ...

    def end_pause(self) -> None:
        """After a fault: take blocks again now."""
        ...

    def flush(self, timeout_s: float) -> Flushed:
        """Waits until the queue is empty, or for so long."""
        ...

    def usage(self, under: bytes = b"") -> Usage:
        """`under`: counts the blocks whose roots begin so; the rest is of the whole tier."""
        ...

    def close(self) -> None:
        """What is queued is dropped: `flush` first to keep it."""
        ...


class SharedBlocks(Blocks, Protocol):
    def wanted(self, root: bytes, ids: TokenIds, marks: Sequence[int]) -> Walk[Wanted]:
        """The blocks of all whole runs of 256 tokens that are not there; `marks`: where the asker has some."""
        ...


class SharedTier(Tier, Protocol):
    """A tier that several servers write: blocks of exactly 256 tokens, in one precision, named by what they hold."""

    @property
    def blocks(self) -> SharedBlocks: ...

    @property
    def expected_latency_s(self) -> float:
        """Seconds that a question is expected to take; 0: none was asked. Slow answers fade with time."""
        ...

    @property
    def is_paused(self) -> bool:
        """After a fault: it is not asked."""
        ...

    def skipped(self, num_tokens: int) -> None:
        """Counted: a block was not offered, because it has fewer bits than blocks have there."""
        ...

    def shared_usage(self) -> SharedUsage: ...


TokenIds = NDArray[np.int32]


@dataclass(frozen=True)
class Link:
    """One block of a chain."""

    key: bytes
    parent: bytes
    start: int
    end: int
    nbytes: int = 0  # on the tier, or on its way there; 0: it is not there yet
    is_queued: bool = False  # it is on its way


@dataclass(frozen=True)
class TierMatch:
    links: tuple[Link, ...] = ()
    mark_bytes: int = 0  # of the mark at the end; 0: there need not be one

    @property
    def num_tokens(self) -> int:
        return self.links[-1].end if self.links else 0

    def after(self, known_tokens: int) -> TierMatch:
        """The blocks that have more than the first tokens."""
        return replace(self, links=tuple(link for link in self.links if link.end > known_tokens))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block, and of the mark."""
        blocks = tuple(link.nbytes for link in self.links)
        return (*blocks, self.mark_bytes) if self.mark_bytes else blocks


@dataclass(frozen=True)
class OnDisk:
    """What a tier can say about a prompt."""

    num_tokens: int = 0  # that a sequence can go on from
    is_damaged_next: bool = False  # a block that goes on where the chain ends was found damaged, and put aside
    has_others_only: bool = False  # there are blocks, and none under this root


class Event(StrEnum):
    WRITTEN = "written"  # published and on the disk
    REFUSED = "refused"  # not taken by put
    DROPPED = "dropped"  # taken, then given up
    FAILED = "failed"  # the disk did not do it: writes, reads and the catalogue, by fault
    READ = "read"
    MISSED = "missed"  # asked for, not delivered
    QUARANTINED = "quarantined"
    EVICTED = "evicted"


class Counters:
    """Counted on every thread of the tier."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Event, str]] = Counter()
        self._bytes: Counter[Event] = Counter()

    def add(self, event: Event, reason: str = "ok", *, nbytes: int = 0) -> None:
        with self._lock:
            self._counts[event, reason] += 1
            self._bytes[event] += nbytes

    def nbytes(self, event: Event) -> int:
        with self._lock:
            return self._bytes[event]

    def snapshot(self) -> dict[str, dict[str, int]]:
        with self._lock:
            by_event: dict[str, dict[str, int]] = {event.value: {} for event in Event}
            for (event, reason), count in sorted(self._counts.items()):
                by_event[event.value][str(reason)] = count
            return by_event
