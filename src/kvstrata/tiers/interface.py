# ruff: noqa: ARG002
"""The tier protocol: blocks in and out, lookups of chains, the state of writing, removals, usage."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstrata.tiers.block import BASE, Block, BlockId
from kvstrata.tiers.lookups import Lookup, Walk, answered
from kvstrata.tiers.read_pool import BlockReading, Deliver, MissingBlock, MissReason
from kvstrata.tiers.read_rates import ReadRates

T = TypeVar("T")

# Share of the queue's limit. With more bytes queued, a tier's writer may hurry.
CALM_SHARE = 1 / 8

MAX_REMOVALS = 1 << 14  # in a log

TokenIds = NDArray[np.int32]


class Refusal(StrEnum):
    """The reasons for which `put` refuses a block."""

    PRESENT = "present"
    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    WRITE_BUDGET = "write_budget"
    PAUSED = "paused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The block is queued. `find` tells whether the tier still has it, queued or written."""


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
    """The result of a flush. `is_empty`: every queued block has been written, dropped or failed."""

    is_empty: bool = True
    num_left: int = 0
    bytes_left: int = 0


@dataclass(frozen=True, slots=True)
class WriteState:
    """The state of writing at one moment."""

    queue_bytes: int = 0
    limit_bytes: int = 0  # of the queue
    budget_bytes: float = math.inf  # that may still be written today, queued blocks included
    unmoved_s: float = 0.0  # since a block last left the queue; 0 where it is empty
    is_failing: bool = False  # the last attempt failed, or there will be no further one
    paused_because: str = ""  # empty where blocks are accepted
    is_full: bool = False  # writing is paused because there is no free space
    # How often a block was not written, or lost: a block that was accepted may be missing. Blocks that do not fit the
    # limit do not count, because they would not fit the next time either.
    num_faults: int = 0

    def would_take(self, refused: Refused) -> bool:
        """Whether a refused block may be accepted now. False for reasons that time does not change."""
        match refused.reason:
            case Refusal.PAUSED:
                return not self.paused_because
            case Refusal.QUEUE_FULL:
                # Wait until half of the queue is free, not just the bytes of this block.
                needed_bytes = max(refused.nbytes, self.limit_bytes // 2)
                return not self.queue_bytes or self.queue_bytes + needed_bytes <= self.limit_bytes
            case Refusal.WRITE_BUDGET:
                return self.queue_bytes + refused.nbytes <= self.budget_bytes
            case _:
                return False

    @property
    def is_calm(self) -> bool:
        """Whether the queue is short enough for the writer to take its time."""
        return self.queue_bytes <= CALM_SHARE * self.limit_bytes

    def is_working(self, within_s: float) -> bool:
        """Whether it is worth waiting for the queue: the last attempt did not fail, and a block left the queue at most
        `within_s` ago. A disk that hangs reports no fault."""
        return not self.is_failing and (not self.queue_bytes or self.unmoved_s < within_s)


@dataclass(frozen=True, slots=True)
class Usage:
    limit_bytes: int = 0
    allowed_bytes: int = 0  # the most that the tier can grow to: less than the limit where the volume is too full
    disk_bytes: int = 0  # space that the cache takes on the volume: blocks, catalogue, quarantine and folders
    leaving_bytes: int = 0  # of cleared blocks whose files are not deleted yet; part of disk_bytes
    quarantine_bytes: int = 0
    # Of the blocks under the requested roots:
    block_bytes: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)  # bytes of tensors by label of `tally`
    # Of the whole tier, in flight:
    queue_bytes: int = 0
    num_queued: int = 0
    num_pending_reads: int = 0
    unused_bytes: int = 0  # read, or being read, and not used yet
    # Since the start:
    written_bytes: int = 0
    written_today_bytes: int = 0
    read_bytes: int = 0
    paused_because: str = ""  # empty where blocks are accepted
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # event -> reason -> how often


@dataclass(frozen=True)
class ChainLink:
    """A block of a chain."""

    key: bytes
    parent: bytes
    start: int
    end: int
    nbytes: int = 0  # on the tier, or queued for it; 0: it is not there yet
    is_queued: bool = False  # accepted, and not written yet


@dataclass(frozen=True)
class TierMatch:
    links: tuple[ChainLink, ...] = ()
    mark_bytes: int = 0  # of the checkpoint at the end; 0: none is needed

    @property
    def num_tokens(self) -> int:
        return self.links[-1].end if self.links else 0

    def after(self, known_tokens: int) -> TierMatch:
        """Return the blocks that end after the first `known_tokens` tokens."""
        return replace(self, links=tuple(link for link in self.links if link.end > known_tokens))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block, and of the checkpoint."""
        blocks = tuple(link.nbytes for link in self.links)
        return (*blocks, self.mark_bytes) if self.mark_bytes else blocks


@dataclass(frozen=True)
class PromptOnTier:
    """The description of a prompt on a tier."""

    num_tokens: int = 0  # that a sequence can resume from
    is_damaged_next: bool = False  # the block after the end of the chain was damaged and is quarantined
    has_others_only: bool = False  # the tier has blocks, and none under this root


@dataclass(frozen=True, slots=True)
class MissingChain:
    """The blocks and checkpoints of a conversation that a shared tier lacks."""

    root: bytes = b""  # of the conversation's chain on the tier
    links: tuple[ChainLink, ...] = ()  # blocks, each after its parent
    marks: tuple[ChainLink, ...] = ()  # blocks without their checkpoint on the tier
    is_known: bool = False  # False: the tier could not answer


@dataclass(frozen=True, slots=True)
class SharedUsage:
    """Usage of a tier that other servers write too, since the start of this server. The full content is unknown."""

    place: str  # without a password
    precision: str
    written_tokens: int
    read_tokens: int
    latency_s: float
    read_bytes_per_s: float
    usage: Usage


class RemovalCause(StrEnum):
    EVICTED = "evicted"  # other blocks needed the space, or no request used it in time
    CLEARED = "cleared"  # a caller asked for it
    LOST = "lost"  # damaged, or its file vanished
    # Accepted, then given up before they were written:
    NO_ROOM = "no_room"
    VOLUME_FULL = "volume_full"  # may have free space again
    WRITE_BUDGET = "write_budget"  # is renewed tomorrow
    UNWRITABLE = "unwritable"
    FAILED = "failed"
    REPLACEMENT = "replacement"  # a copy in more bits; the block itself stays


@dataclass(frozen=True, slots=True)
class BlockRemoval:
    block: BlockId
    start: int  # of its tokens
    end: int
    cause: RemovalCause


class RemovalLog:
    """The blocks that have left a tier, or never arrived. Used from any thread.

    The tier's threads append; the engine thread takes some entries at a time. The log is bounded: where blocks leave
    faster than they are taken, it drops the newest removals and reports that any block may have left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._removals: deque[BlockRemoval] = deque()
        self._is_incomplete = False

    def add(self, removals: Iterable[BlockRemoval]) -> None:
        with self._lock:
            for removal in removals:
                if len(self._removals) < MAX_REMOVALS:
                    self._removals.append(removal)
                else:
                    self._is_incomplete = True

    def set_incomplete(self) -> None:
        """Record that any block may have left, or cannot be reached any more."""
        self._is_incomplete = True

    @property
    def is_empty(self) -> bool:
        return not self._removals and not self._is_incomplete

    def take(self, max_removals: int | None = None) -> list[BlockRemoval]:
        """Take the oldest removals, or all, out of the log."""
        if not self._removals:
            return []
        with self._lock:
            num_removals = len(self._removals) if max_removals is None else min(max_removals, len(self._removals))
            return [self._removals.popleft() for _ in range(num_removals)]

    def take_incomplete(self) -> bool:
        """Whether any block may have left since the last call."""
        if not self._is_incomplete:
            return False
        with self._lock:
            self._is_incomplete = False
            return True


class TierBlocks(Protocol):
    """The blocks that a tier has or has accepted. Callable from any thread; a walk yields after each longer step, so
    that its caller can pace it."""

    def find(self, key: bytes, part: str = BASE) -> int:
        """Return the bytes that reading a block takes; 0: it is absent, or avoided for a while after a fault."""
        ...

    def contents(self, block: BlockId) -> Mapping[str, int]:
        """Return the bytes of a block's tensors by label; nothing where the block is absent."""
        ...

    def num_children(self, key: bytes) -> int:
        """Return the number of blocks that directly follow a block, at most; 0: the block ends its chain."""
        ...

    def longest_chain(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        """Return the longest chain after a parent that matches `ids` from `start` on. `at_marks`: the longest that ends
        at a checkpoint of the tier, for models that can resume only there."""
        ...

    def describe_prompt(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> Walk[PromptOnTier]:
        """Describe a prompt on the tier, for people who ask why no more of it is found."""
        ...


class Tier(Protocol):
    limit_bytes: int  # 0: it can hold nothing
    read_ahead_bytes: int  # read and not yet used, at most
    on_room: Callable[[], None]  # called on a thread of the tier when the queue may accept blocks again

    @property
    def blocks(self) -> TierBlocks: ...

    @property
    def removals(self) -> RemovalLog:
        """The blocks that have left, or were accepted and given up. Removals by `clear` or `close` need not be
        reported, and a shared tier reports nothing."""
        ...

    @property
    def rates(self) -> ReadRates: ...

    def start_lookup(self, walk: Walk[T], fallback: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Run a walk on a thread of the tier, which then calls `on_answer`. `fallback`: the answer if it fails."""
        ...

    def put(self, block: Block, *, replace: bool = False, unused_s: float = 0.0) -> Accepted | Refused:
        """Queue a block, whose bytes must not change any more. `replace`: also where the tier has this id.
        `unused_s`: seconds since the last use."""
        ...

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        """Deliver each block in order, on a thread of the tier, as soon as it is verified. Past `read_ahead_bytes`
        reading waits until delivered blocks are released. `sizes`: bytes of the blocks; looked up if not given."""
        ...

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Count blocks as used now without reading them. Absent blocks are ignored."""
        ...

    def remove(self, blocks: Sequence[BlockId], *, durable: bool = False) -> Removed:
        """Remove blocks: when this returns they are not found any more, even if other blocks follow them. `durable`:
        they stay removed after a crash, once `wait_for_removals` has returned; a shared tier deletes each value by
        itself either way."""
        ...

    def clear(self, root_prefix: bytes = b"") -> Removed:
        """Remove all blocks under roots with the prefix `root_prefix`, durably."""
        ...

    def wait_for_removals(self, timeout_s: float) -> bool:
        """Wait until durable removals so far survive a crash, at most `timeout_s`. Return whether they do. The engine
        thread must not call this."""
        ...

    def write_state(self) -> WriteState: ...

    def end_pause(self) -> None:
        """End the pause after a fault: accept blocks again now."""
        ...

    def flush(self, timeout_s: float) -> Flushed:
        """Wait until the queue is empty, at most `timeout_s`."""
        ...

    def usage(self, root_prefix: bytes = b"") -> Usage:
        """Return the usage: the blocks under roots with the prefix `root_prefix`, and figures of the whole tier."""
        ...

    def close(self) -> None:
        """Close the tier. Queued blocks are dropped: `flush` first to keep them."""
        ...


class SharedTierBlocks(TierBlocks, Protocol):
    def missing_chain(self, root: bytes, ids: TokenIds, marks: Sequence[int]) -> Walk[MissingChain]:
        """Return the absent blocks of all whole runs of 256 tokens. `marks`: positions of the caller's checkpoints."""
        ...


class SharedTier(Tier, Protocol):
    """A tier that several servers write: blocks of exactly 256 tokens, in one precision, named by their tokens."""

    @property
    def blocks(self) -> SharedTierBlocks: ...

    @property
    def expected_latency_s(self) -> float:
        """Seconds that a query is expected to take; 0: none was made. Slow answers fade with time."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether the tier is not queried for a while after a fault."""
        ...

    def skipped(self, num_tokens: int) -> None:
        """Count a block that was not offered, because it has fewer bits than blocks of the tier."""
        ...

    def shared_usage(self) -> SharedUsage: ...


class BlockEvent(StrEnum):
    """The events that tiers count. Each tier counts some of them."""

    WRITTEN = "written"  # published, and on the tier
    REFUSED = "refused"  # not accepted by put
    DROPPED = "dropped"  # accepted, then given up
    FAILED = "failed"  # a fault of the tier in writes, reads or its catalogue
    READ = "read"
    MISSED = "missed"  # requested, not delivered
    QUARANTINED = "quarantined"
    EVICTED = "evicted"
    DELETED = "deleted"  # damaged blocks of a shared tier
    SKIPPED = "skipped"  # not offered to a shared tier: it has fewer bits than blocks there


class TierCounters:
    """Counters of a tier's events by reason, updated on every thread of the tier."""

    def __init__(self, events: Collection[BlockEvent]) -> None:
        """Count these events, and no others."""
        self._lock = threading.Lock()
        self._counts: dict[BlockEvent, Counter[str]] = {event: Counter() for event in BlockEvent if event in events}
        self._bytes: Counter[BlockEvent] = Counter()
        self._tokens: Counter[BlockEvent] = Counter()

    def add(self, event: BlockEvent, reason: str = "ok", *, nbytes: int = 0, num_tokens: int = 0) -> None:
        with self._lock:
            self._counts[event][str(reason)] += 1
            self._bytes[event] += nbytes
            self._tokens[event] += num_tokens

    def nbytes(self, event: BlockEvent) -> int:
        with self._lock:
            return self._bytes[event]

    def num_tokens(self, event: BlockEvent) -> int:
        with self._lock:
            return self._tokens[event]

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return how often each event was counted, by its reasons."""
        with self._lock:
            return {event.value: dict(sorted(counts.items())) for event, counts in self._counts.items()}


class NoBlocks:
    def find(self, key: bytes, part: str = BASE) -> int:
        return 0

    def contents(self, block: BlockId) -> Mapping[str, int]:
        return {}

    def num_children(self, key: bytes) -> int:
        return 0

    def longest_chain(self, parent: bytes, start: int, ids: TokenIds, *, at_marks: bool = False) -> Walk[TierMatch]:
        yield from ()
        return TierMatch()

    def describe_prompt(self, root: bytes, ids: TokenIds, *, at_marks: bool) -> Walk[PromptOnTier]:
        yield from ()
        return PromptOnTier()


class NoTier:
    """The tier of a server without one: it has no blocks and refuses all."""

    limit_bytes = 0
    read_ahead_bytes = 0

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.blocks = NoBlocks()
        self.rates = ReadRates()
        self.removals = RemovalLog()

    def start_lookup(self, walk: Walk[T], fallback: T, on_answer: Callable[[], None]) -> Lookup[T]:
        """Return a lookup that has its answer: there is no thread."""
        return answered(fallback)

    def put(self, block: Block, *, replace: bool = False, unused_s: float = 0.0) -> Accepted | Refused:
        return Refused(Refusal.TOO_LARGE, block.nbytes)

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        reading = BlockReading(blocks, root, deliver, sizes or [0] * len(blocks))
        for index, block in enumerate(blocks):
            reading.give(index, MissingBlock(block, MissReason.ABSENT))
        return reading

    def touch(self, blocks: Iterable[BlockId]) -> None:
        return

    def remove(self, blocks: Sequence[BlockId], *, durable: bool = False) -> Removed:
        return Removed()

    def clear(self, root_prefix: bytes = b"") -> Removed:
        return Removed()

    def wait_for_removals(self, timeout_s: float) -> bool:
        return True

    def write_state(self) -> WriteState:
        return WriteState(is_failing=True)

    def end_pause(self) -> None:
        return

    def flush(self, timeout_s: float) -> Flushed:
        return Flushed()

    def usage(self, root_prefix: bytes = b"") -> Usage:
        return Usage()

    def close(self) -> None:
        return
