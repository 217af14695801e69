"""The disk tier: blocks in a folder, within a limit, verified whenever they are read. Knows no MLX arrays.

A fault of the disk is counted, logged once and answered with a miss or a refusal. After the start only invalid blocks
and arguments raise into the caller. `tiers/interface.py` documents the methods.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvstrata.errors import ConfigError
from kvstrata.tiers.block import Block, BlockId, Chain, Tally, no_tally
from kvstrata.tiers.disk.block_store import DiskBlockStore
from kvstrata.tiers.disk.catalogue import CatalogueFault
from kvstrata.tiers.disk.chains import DiskChains
from kvstrata.tiers.disk.errors import DISK_EVENTS
from kvstrata.tiers.disk.filesystem import Filesystem
from kvstrata.tiers.disk.folder import CacheFolder, prepare
from kvstrata.tiers.disk.index import BlockIndex, IndexTotals
from kvstrata.tiers.disk.reader import DiskReader
from kvstrata.tiers.disk.writer import DiskWriter
from kvstrata.tiers.interface import (
    Accepted,
    BlockEvent,
    Flushed,
    Refusal,
    Refused,
    RemovalCause,
    RemovalLog,
    Removed,
    TierCounters,
    Usage,
    WriteState,
)
from kvstrata.tiers.lookups import Lookup, LookupThread, Walk
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.read_pool import BlockReading, Deliver, ReadPool
from kvstrata.tiers.read_rates import ReadRates

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


def _nothing_pinned(_key: bytes) -> bool:
    return False


class DiskTier:
    def __init__(
        self,
        options: DiskOptions,
        *,
        chain: Chain,
        tally: Tally = no_tally,
        is_pinned: Callable[[bytes], bool] = _nothing_pinned,
        files: Filesystem | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder. `chain` is prefix_cache.keys.chain; `tally` counts a block's bytes by label.
        `is_pinned(key)` runs on the tier's thread, under its lock: it must not wait for a thread that calls the tier.

        Raises ConfigError if the folder cannot be used, CacheDirectoryBusy if another server uses it.
        """
        self.limit_bytes = options.limit_bytes
        self.read_ahead_bytes = options.read_ahead_bytes
        self._clock = clock
        self.on_room: Callable[[], None] = lambda: None  # called on the writer thread when the queue may accept blocks
        self._counters = TierCounters(DISK_EVENTS)
        self._folder = CacheFolder(options.directory, files or Filesystem())
        prepare(self._folder)
        self._store = self._open_store(options, is_pinned, tally)
        self._writer = DiskWriter(self._store, options, self._counters, self.removals, lambda: self.on_room())
        self._disk_reader = DiskReader(self._store, self._writer.queue.find, self._counters, chain=chain, clock=clock)
        self.blocks = DiskChains(self._store, self._writer.queue, self._disk_reader, chain)
        self._is_closed = False
        self._read_pool = ReadPool(self._disk_reader.load, options.num_readers, options.read_ahead_bytes)
        self._lookups = LookupThread()

    # Writing.

    def put(self, block: Block, *, replace: bool = False, unused_s: float = 0.0) -> Accepted | Refused:
        block = dataclasses.replace(block, last_use=self._clock() - unused_s)
        refusal = self._refusal(block, replace=replace) or self._writer.offer(block, replaces=replace)
        if refusal is None:
            return Accepted()
        self._counters.add(BlockEvent.REFUSED, refusal, nbytes=block.nbytes)
        return Refused(refusal, block.nbytes)

    def _refusal(self, block: Block, *, replace: bool) -> Refusal | None:
        if block.nbytes > self.limit_bytes:
            return Refusal.TOO_LARGE
        if not replace and self.blocks.size(block.id):
            return Refusal.PRESENT
        if not self.write_state().would_take(Refused(Refusal.WRITE_BUDGET, block.nbytes)):
            return Refusal.WRITE_BUDGET
        return None

    def write_state(self) -> WriteState:
        state = self._writer.state(self._store.budget.left_bytes(self._clock()))
        return dataclasses.replace(state, num_faults=state.num_faults + self._store.num_losses)

    def touch(self, blocks: Iterable[BlockId]) -> None:
        self._store.index.record_uses(blocks, self._clock())

    def flush(self, timeout_s: float) -> Flushed:
        """Wait for the queue, and for the comparison of the folder with its catalogue."""
        return self._writer.flush(timeout_s)

    def end_pause(self) -> None:
        self._writer.end_pause()

    # Lookups and reads.

    def start_lookup(self, walk: Walk[T], fallback: T, on_answer: Callable[[], None]) -> Lookup[T]:
        return self._lookups.ask(walk, fallback, on_answer)

    def read(
        self, blocks: Sequence[BlockId], deliver: Deliver, *, root: bytes, sizes: Sequence[int] | None = None
    ) -> BlockReading:
        reading = BlockReading(blocks, root, deliver, sizes or [self.blocks.size(block) for block in blocks])
        self._read_pool.submit(reading)
        return reading

    @property
    def index(self) -> BlockIndex:
        """The view of the files, for tests and figures."""
        return self._store.index

    @property
    def quarantined_keys(self) -> frozenset[bytes]:
        return self._store.quarantine.keys()

    @property
    def removals(self) -> RemovalLog:
        return self._store.index.removals

    @property
    def rates(self) -> ReadRates:
        return self._disk_reader.meter.rates()

    # Removal.

    def remove(self, blocks: Sequence[BlockId], *, durable: bool = False) -> Removed:
        wanted, index = frozenset(blocks), self._store.index
        self._writer.withdraw(lambda block: block.id in wanted)
        records = [record for block in wanted if (record := index.get(block)) is not None]
        totals = index.hide_durably(wanted, self._clock()) if durable else index.hide(wanted)
        index.report_removed(records, RemovalCause.CLEARED)
        return self._removed(totals)

    def clear(self, root_prefix: bytes = b"") -> Removed:
        """Hide blocks at once. The writer thread deletes their files, except of blocks that are put again meanwhile."""
        self._writer.withdraw(lambda block: block.root.startswith(root_prefix))
        return self._removed(self._store.index.hide_roots(root_prefix, self._clock()))

    def wait_for_removals(self, timeout_s: float) -> bool:
        index = self._store.index
        return self._writer.catch_up_until(lambda: not index.has_new_markers, timeout_s)

    def _removed(self, totals: IndexTotals) -> Removed:
        self._writer.wake()
        return Removed(totals.num_blocks, totals.num_tokens, totals.disk_bytes)

    # Usage and shutdown.

    def usage(self, root_prefix: bytes = b"") -> Usage:
        index, state = self._store.index, self._writer.state(0)
        totals = index.totals(root_prefix)
        return Usage(
            limit_bytes=self.limit_bytes,
            allowed_bytes=self._store.space.allowed_bytes,
            disk_bytes=self._store.space.disk_bytes,
            leaving_bytes=index.pending.num_bytes,
            quarantine_bytes=self._store.quarantine.disk_bytes,
            block_bytes=totals.disk_bytes,
            num_blocks=totals.num_blocks,
            num_tokens=totals.num_tokens,
            labels=totals.labels,
            queue_bytes=state.queue_bytes,
            num_queued=len(self._writer.queue),
            num_pending_reads=self._read_pool.num_pending,
            unused_bytes=self._read_pool.ahead_bytes,
            written_bytes=self._counters.nbytes(BlockEvent.WRITTEN),
            written_today_bytes=self._store.budget.written_bytes(self._clock()),
            read_bytes=self._counters.nbytes(BlockEvent.READ),
            paused_because=state.paused_because,
            counters=self._counters.snapshot(),
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the tier; wait at most `timeout_s` for a disk that hangs."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + timeout_s
        ends = [
            each.close(max(0.0, until_s - time.monotonic())) for each in (self._lookups, self._read_pool, self._writer)
        ]
        if all(ends):
            self._store.close()
            self._folder.release()
        else:
            # Threads of the tier may still use the catalogue and the folder; the end of the process closes both.
            log.warning("The disk cache did not close within %.0f s: the disk does not answer", timeout_s)

    def _open_store(self, options: DiskOptions, is_pinned: Callable[[bytes], bool], tally: Tally) -> DiskBlockStore:
        try:
            return DiskBlockStore(
                self._folder, options, self._counters, is_pinned=is_pinned, count_labels=tally, clock=self._clock
            )
        except (OSError, CatalogueFault) as error:
            self._folder.release()
            raise ConfigError(
                f"{self._folder.directory} cannot hold the disk cache: {error}. "
                "Make it readable and writable, or use another --disk-cache-dir"
            ) from error
