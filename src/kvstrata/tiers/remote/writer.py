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

from kvstrata.tiers.block import Block, BlockId
from kvstrata.tiers.interface import Flushed, Refusal
from kvstrata.tiers.remote.health import Counters, Event, Health, StoreFault

log = logging.getLogger(__name__)

# Touches and deletes that wait; more are dropped.
MAX_ERRANDS = 256

# Interval of sweeps, for values that the store does not delete itself.
SWEEP_EVERY_S = 3600.0


class Writer:
    """Queue and thread of writes. `write` stores one block; `write` and `sweep` may raise StoreFault."""

    def __init__(
        self,
        write: Callable[[Block], None],
        sweep: Callable[[], None],
        health: Health,
        counters: Counters,
        limit_bytes: int,
        on_room: Callable[[], None],
    ) -> None:
        self._write = write
        self._sweep = sweep
        self._health = health
        self._counters = counters
        self._on_room = on_room
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._blocks: dict[BlockId, Block] = {}
        self._errands: deque[Callable[[], None]] = deque()
        self._queue_bytes = 0
        self._is_busy = False
        self._is_closing = False
        self._sweeps_s = time.monotonic() + SWEEP_EVERY_S
        self._thread = threading.Thread(target=self._run, name="kvstrata-remote-writer", daemon=True)
        self._thread.start()

    @property
    def queue_bytes(self) -> int:
        with self._changed:
            return self._queue_bytes

    @property
    def num_queued(self) -> int:
        with self._changed:
            return len(self._blocks)

    def find(self, block: BlockId) -> Block | None:
        with self._changed:
            return self._blocks.get(block)

    def offer(self, block: Block) -> Refusal | None:
        """Queue a block. None: accepted."""
        with self._changed:
            if self._is_closing:
                return Refusal.CLOSED
            if block.id in self._blocks:
                return Refusal.PRESENT
            if self._blocks and self._queue_bytes + block.nbytes > self.limit_bytes:
                return Refusal.QUEUE_FULL
            self._blocks[block.id] = block
            self._queue_bytes += block.nbytes
            self._changed.notify_all()
        return None

    def run_errand(self, errand: Callable[[], None]) -> None:
        """Queue work that may be left undone."""
        with self._changed:
            if not self._is_closing and len(self._errands) < MAX_ERRANDS:
                self._errands.append(errand)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> Flushed:
        with self._changed:
            self._changed.wait_for(lambda: not (self._blocks or self._errands or self._is_busy), timeout_s)
            return Flushed(not self._blocks, len(self._blocks), self._queue_bytes)

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._is_closing = True
            self._errands.clear()
            self._drop_all("closed")
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                until_s = max(0.0, self._sweeps_s - time.monotonic())
                self._changed.wait_for(lambda: self._blocks or self._errands or self._is_closing, until_s)
                if self._is_closing:
                    return
                self._is_busy = True
                block = next(iter(self._blocks.values()), None)
                errand = self._errands.popleft() if self._errands else None
            if errand is not None:
                self._try(errand)
            elif block is not None:
                self._write_one(block)
            else:
                self._sweeps_s = time.monotonic() + SWEEP_EVERY_S
                self._try(self._sweep)

    def _write_one(self, block: Block) -> None:
        is_done = self._try(lambda: self._write(block))
        with self._changed:
            if is_done:
                if self._blocks.pop(block.id, None) is not None:
                    self._queue_bytes -= block.nbytes
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
        for _ in self._blocks:
            self._counters.add(Event.DROPPED, reason)
        self._blocks.clear()
        self._queue_bytes = 0
