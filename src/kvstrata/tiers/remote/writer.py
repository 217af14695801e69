"""The thread that writes blocks to the store, parents first, and does other work that may wait: touches, deletes.

No request waits for it. After a fault all queued blocks are given up: missing blocks are offered again when their
conversation continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstrata.tiers.block import Block
from kvstrata.tiers.interface import BlockEvent, Flushed, Refusal, TierCounters
from kvstrata.tiers.remote.block_store import SealedBlockStore
from kvstrata.tiers.remote.health import StoreFault, StoreHealth
from kvstrata.tiers.write_limits import QueuedBlock, WriteQueue

log = logging.getLogger(__name__)

# Touches and deletes that wait; more are dropped.
MAX_TASKS = 256

# Interval of sweeps, for values that the store does not delete itself.
SWEEP_EVERY_S = 3600.0


class RemoteWriter:
    """The writer thread, its queue of blocks and its other tasks."""

    def __init__(
        self,
        block_store: SealedBlockStore,
        health: StoreHealth,
        counters: TierCounters,
        limit_bytes: int,
        on_room: Callable[[], None],
    ) -> None:
        """Start the thread, which calls `on_room` after each attempt to write a block."""
        self.queue = WriteQueue(limit_bytes)
        self._changed = self.queue.changed
        self._block_store = block_store
        self._health = health
        self._counters = counters
        self._on_room = on_room
        self._tasks: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._is_closing = False
        self._sweeps_s = time.monotonic() + SWEEP_EVERY_S
        self._thread = threading.Thread(target=self._run, name="kvstrata-remote-writer", daemon=True)
        self._thread.start()

    # For callers.

    def offer(self, block: Block) -> Refusal | None:
        """Queue a block. None: accepted."""
        with self._changed:
            return Refusal.CLOSED if self._is_closing else self.queue.add(block)

    def add_task(self, task: Callable[[], None]) -> None:
        """Queue work that may be left undone."""
        with self._changed:
            if not self._is_closing and len(self._tasks) < MAX_TASKS:
                self._tasks.append(task)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> Flushed:
        with self._changed:
            self._changed.wait_for(lambda: not (self._has_work() or self._is_busy), timeout_s)
            return Flushed(not len(self.queue), len(self.queue), self.queue.num_bytes)

    def close(self, timeout_s: float) -> bool:
        """Drop and count the queued blocks. False: the thread still waits for the store."""
        with self._changed:
            self._is_closing = True
            self._tasks.clear()
            self._drop_all("closed")
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread.

    def _has_work(self) -> bool:
        return bool(len(self.queue) or self._tasks)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                until_s = max(0.0, self._sweeps_s - time.monotonic())
                self._changed.wait_for(lambda: self._has_work() or self._is_closing, until_s)
                if self._is_closing:
                    return
                self._is_busy = True
                task = self._tasks.popleft() if self._tasks else None
                entries = self.queue.entries()[:1]
            if task is not None:
                self._try(task)
            elif entries:
                self._write_one(entries[0])
            else:
                self._sweeps_s = time.monotonic() + SWEEP_EVERY_S
                self._try(self._block_store.sweep)

    def _write_one(self, entry: QueuedBlock) -> None:
        is_done = self._try(lambda: self._block_store.write(entry.block))
        with self._changed:
            if is_done:
                self.queue.remove(entry)
            else:
                self._drop_all("fault")
        self._on_room()

    def _try(self, work: Callable[[], None]) -> bool:
        """Run work unless the store is paused. Return whether it succeeded."""
        if self._health.paused_because:
            return False
        try:
            work()
        except StoreFault:
            return False
        except Exception:  # A bug is logged and must not end the thread.
            log.exception("The remote cache's writer failed in a way that it should not")
            return False
        return True

    def _drop_all(self, reason: str) -> None:
        for entry in self.queue.entries():
            self.queue.remove(entry)
            self._counters.add(BlockEvent.DROPPED, reason)
