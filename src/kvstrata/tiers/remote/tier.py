"""The remote tier: blocks that several servers share, named by their tokens and sealed. Knows no MLX arrays.

A fault of the store is counted, logged once and answered with a miss or a refusal; then the store is not queried for a
while. Nothing here raises into the caller after the start. `tiers/interface.py` documents the methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvstrata.tiers.block import Block, BlockId, Chain
from kvstrata.tiers.block_file import Damage
from kvstrata.tiers.interface import (
    Accepted,
    BlockEvent,
    Flushed,
    Refusal,
    Refused,
    RemovalLog,
    Removed,
    SharedUsage,
    TierCounters,
    Usage,
    WriteState,
)
from kvstrata.tiers.lookups import Lookup, LookupThread, Walk
from kvstrata.tiers.options import RemoteOptions
from kvstrata.tiers.read_pool import BlockReading, Deliver, LoadedBlock, MissingBlock, ReadPool
from kvstrata.tiers.read_rates import ReadRates
from kvstrata.tiers.remote.block_store import SealedBlockStore
from kvstrata.tiers.remote.chains import RemoteChains
from kvstrata.tiers.remote.health import REMOTE_EVENTS, StoreHealth
from kvstrata.tiers.remote.open_store import open_store
from kvstrata.tiers.remote.sealing import BlockNames, keys_for
from kvstrata.tiers.remote.store import KeyValueStore
from kvstrata.tiers.remote.writer import RemoteWriter

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0

# A store's size is not known here; a full store refuses or evicts blocks.
NO_LIMIT_BYTES = 1 << 62


class RemoteTier:
    """A `SharedTier` in a key-value store."""

    limit_bytes = NO_LIMIT_BYTES

    def __init__(
        self,
        options: RemoteOptions,
        *,
        chain: Chain,
        backend: str,
        store: KeyValueStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the store. `chain` is prefix_cache.keys.chain, `backend` names the model's back-end. Raises ConfigError
        if the store cannot be used, or is used with another secret."""
        self._options = options
        self.read_ahead_bytes = options.read_ahead_bytes
        self.on_room: Callable[[], None] = lambda: None
        keys = keys_for(options.url, options.secret_file)
        names = BlockNames(keys, options.precision, backend)
        store = store or open_store(options.url, keys, clock, ttl_s=options.ttl_s)
        self._counters = TierCounters(REMOTE_EVENTS)
        self._health = StoreHealth(
            self._counters, first_pause_s=options.first_pause_s, longest_pause_s=options.longest_pause_s
        )
        self.block_store = SealedBlockStore(store, keys, names, chain, self._health, self._counters, options, clock)
        self._writer = RemoteWriter(
            self.block_store, self._health, self._counters, options.queue_bytes, lambda: self.on_room()
        )
        avoided = self.block_store.avoided
        self.blocks = RemoteChains(store, names, chain, self._health, avoided, self._touch_later)
        self._reader = ReadPool(self._load, options.num_readers, options.read_ahead_bytes)
        self._lookups = LookupThread()
        self.removals = RemovalLog()
        self._is_closed = False

    # Writing.

    def put(self, block: Block, *, replace: bool = False, unused_s: float = 0.0) -> Accepted | Refused:
        """Queue a block. `replace` has no effect: blocks are created once."""
        del replace, unused_s
        refusal = self._refusal(block) or self._writer.offer(block)
        if refusal is None:
            return Accepted()
        self._counters.add(BlockEvent.REFUSED, refusal, nbytes=block.nbytes)
        return Refused(refusal, block.nbytes)

    def _refusal(self, block: Block) -> Refusal | None:
        if self._health.paused_because:
            return Refusal.PAUSED
        if self._writer.queue.num_bytes + block.nbytes > self.block_store.budget_bytes:
            return Refusal.WRITE_BUDGET
        return None

    def skipped(self, num_tokens: int) -> None:
        """Count a block that was not offered, because it has fewer bits than blocks of this tier."""
        self._counters.add(BlockEvent.SKIPPED, "fewer_bits", num_tokens=num_tokens)

    def write_state(self) -> WriteState:
        reason = self._health.paused_because
        return WriteState(
            queue_bytes=self._writer.queue.num_bytes,
            limit_bytes=self._writer.queue.limit_bytes,
            budget_bytes=self.block_store.budget_bytes,
            is_failing=bool(reason),
            paused_because=reason,
        )

    def touch(self, blocks: Iterable[BlockId]) -> None:
        self._touch_later([self.block_store.names.name_of(block) for block in blocks])

    def _touch_later(self, names: Sequence[str]) -> None:
        if names:
            self._writer.add_task(lambda: self.block_store.touch(names))

    def end_pause(self) -> None:
        self._health.lift()

    def flush(self, timeout_s: float) -> Flushed:
        return self._writer.flush(timeout_s)

    # Lookups and reads.

    @property
    def expected_latency_s(self) -> float:
        return self._health.expected_latency_s

    @property
    def is_paused(self) -> bool:
        return self._health.is_paused

    def start_lookup(self, walk: Walk[T], fallback: T, on_answer: Callable[[], None]) -> Lookup[T]:
        return self._lookups.ask(walk, fallback, on_answer)

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        reading = BlockReading(blocks, self.block_store.names.root_of(root), deliver, sizes or [0] * len(blocks))
        self._reader.submit(reading)
        return reading

    @property
    def rates(self) -> ReadRates:
        return self.block_store.rates

    def _load(self, block: BlockId, root: bytes) -> LoadedBlock | MissingBlock:
        """Load a block, on a reader thread."""
        result = self.block_store.load(block, root)
        if isinstance(result, MissingBlock) and isinstance(result.reason, Damage):
            self._delete_later(block, result.reason)
        return result

    def _delete_later(self, block: BlockId, reason: str) -> None:
        self._writer.add_task(lambda: self.block_store.delete(block, reason))

    # Removal. A shared store is cleared by its operator, or by the expiry of its blocks.

    def remove(self, blocks: Sequence[BlockId], *, durable: bool = False) -> Removed:
        """Delete blocks that no version of kvstrata could have written."""
        del durable
        for block in blocks:
            self.block_store.avoided.add(self.block_store.names.name_of(block))
            self._delete_later(block, "unreadable")
        return Removed(len(blocks))

    def clear(self, root_prefix: bytes = b"") -> Removed:
        del root_prefix
        return Removed()

    def wait_for_removals(self, timeout_s: float) -> bool:
        del timeout_s
        return True

    # Usage and shutdown.

    def usage(self, root_prefix: bytes = b"") -> Usage:
        del root_prefix
        return Usage(
            limit_bytes=self.limit_bytes,
            queue_bytes=self._writer.queue.num_bytes,
            num_queued=len(self._writer.queue),
            num_pending_reads=self._reader.num_pending,
            unused_bytes=self._reader.ahead_bytes,
            written_bytes=self._counters.nbytes(BlockEvent.WRITTEN),
            written_today_bytes=self.block_store.written_today_bytes,
            read_bytes=self._counters.nbytes(BlockEvent.READ),
            paused_because=self._health.paused_because,
            counters=self._counters.snapshot(),
        )

    def shared_usage(self) -> SharedUsage:
        return SharedUsage(
            place=self._options.url.shown,
            precision=self._options.precision,
            written_tokens=self._counters.num_tokens(BlockEvent.WRITTEN),
            read_tokens=self._counters.num_tokens(BlockEvent.READ),
            latency_s=self._health.latency_s,
            read_bytes_per_s=self.rates.read_bytes_per_s,
            usage=self.usage(),
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the tier; wait at most `timeout_s` for a store that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + timeout_s
        for each in (self._lookups, self._reader, self._writer):
            each.close(max(0.0, until_s - time.monotonic()))
        self.block_store.store.close()
