"""The thread that writes queued blocks to the disk, its pauses and its pace. Knows no files.

After a fault of the disk a block stays queued and is tried again after a pause. When a block is given up, queued blocks
that no lookup could reach without it are dropped too.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from kvstrata.tiers.block import Block
from kvstrata.tiers.disk.block_store import CaughtUp, DroppedBlock, Published, WriteFailed
from kvstrata.tiers.disk.errors import CAUSES, DiskFault, DropReason
from kvstrata.tiers.interface import (
    BlockEvent,
    BlockRemoval,
    Flushed,
    Refusal,
    RemovalCause,
    RemovalLog,
    TierCounters,
    WriteState,
)
from kvstrata.tiers.options import DiskOptions
from kvstrata.tiers.write_limits import Backoff, Pace, QueuedBlock, Throttle, WriteQueue

log = logging.getLogger(__name__)

# More than computing threads, but not the maximum: a thread that never gets a core may hold the GIL meanwhile.
NICENESS = 10

LARGEST_NICENESS = 19

# Attempts for a block, each after a longer pause. Some minutes in all: a full disk may have space again by then, and a
# block that can never be written does not keep the others waiting for good.
MAX_ATTEMPTS = 6

LONGEST_PAUSE_S = 300.0

FULL = (DiskFault.NO_SPACE, DropReason.RESERVE)

# Share of the queue. Above it the writer does not rest, because full queues refuse blocks.
REST_BELOW = 0.25


class DiskWork(Protocol):
    """The disk operations of the thread. Faults of the disk do not raise."""

    def publish(
        self, block: Block, is_needed: Callable[[bytes], bool], is_wanted: Callable[[], bool], pace: Pace
    ) -> Published | DroppedBlock | WriteFailed:
        """Write a block. Evictions must keep the keys that `is_needed` names. `is_wanted` is asked at the moment of
        publication. `pace` throttles long work."""
        ...

    def catch_up(self) -> CaughtUp | WriteFailed:
        """Reconcile index, folder and limit after a start, and delete some files of removed blocks."""
        ...

    def save(self) -> None:
        """Copy changes of the index to the catalogue. Called when the queue runs empty."""
        ...

    def expire(self, is_needed: Callable[[bytes], bool]) -> float:
        """Delete blocks that no request used in time, except keys that must stay. Return the seconds until the next
        call."""
        ...


class DiskWriter:
    def __init__(
        self,
        work: DiskWork,
        options: DiskOptions,
        counters: TierCounters,
        removals: RemovalLog,
        on_room: Callable[[], None],
    ) -> None:
        """Start the thread. `removals` receives the blocks that are given up. The thread calls `on_room` after each
        attempt to write a block."""
        self.queue = WriteQueue(options.queue_bytes)
        self._changed = self.queue.changed
        self._work = work
        self._counters = counters
        self._removals = removals
        self._on_room = on_room
        self._backoff = Backoff(options.first_pause_s, LONGEST_PAUSE_S)
        self._throttle = Throttle(self._rest, share=options.writer_share)
        self._expires_s = -math.inf  # when a block on the disk may expire
        self._must_catch_up = True
        self._has_just_caught_up = False
        self._is_writing = False
        self._num_flushing = 0
        self._num_faults = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvstrata-disk-writer", daemon=True)
        self._thread.start()

    # For callers.

    def offer(self, block: Block, *, replaces: bool = False) -> Refusal | None:
        """Queue a block. None: accepted. Waits only for the queue's lock, which is never held over a file operation.
        `replaces`: the disk may have the block in another form."""
        with self._changed:
            if self._is_closing:
                return Refusal.CLOSED
            return Refusal.PAUSED if self._backoff.is_paused else self.queue.add(block, replaces=replaces)

    def withdraw(self, is_unwanted: Callable[[Block], bool]) -> None:
        """Drop queued blocks. A block that is being written is not published any more, unless it just was: then the
        caller removes it from the disk. The thread deletes files once no pause is on."""
        with self._changed:
            unwanted = [entry for entry in self.queue.entries() if is_unwanted(entry.block)]
            self._drop(unwanted, BlockEvent.DROPPED, DropReason.CLEARED)

    def state(self, budget_bytes: float) -> WriteState:
        with self._changed:
            is_paused = self._backoff.is_paused
            return WriteState(
                queue_bytes=self.queue.num_bytes,
                limit_bytes=self.queue.limit_bytes,
                budget_bytes=budget_bytes,
                unmoved_s=time.monotonic() - self.queue.moved_s if len(self.queue) else 0.0,
                is_failing=self._is_closing or bool(self._backoff.reason),
                paused_because=self._backoff.reason if is_paused else "",
                is_full=is_paused and self._backoff.reason in FULL,
                num_faults=self._num_faults,
            )

    def end_pause(self) -> None:
        """Accept blocks again despite the last fault, until the next one: there may be no later attempt."""
        with self._changed:
            self._backoff.lift()
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the thread catch up with what is out of step, once no pause is on."""
        with self._changed:
            self._must_catch_up = True
            self._changed.notify_all()

    def catch_up_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Let the thread catch up now, also during a pause, and wait until `is_done`. Return whether it is.

        `is_done` runs under the queue's lock, and must take no other.
        """
        with self._changed:
            if not is_done():
                self._backoff.lift()
                self._must_catch_up = True
                self._changed.notify_all()
            return self._changed.wait_for(lambda: is_done() or self._is_closing, timeout_s) and is_done()

    def flush(self, timeout_s: float) -> Flushed:
        """Write all blocks now, also during a pause, and give up a block that fails: no later attempt may come."""
        with self._changed:
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(self._has_nothing_to_do, timeout_s)
            finally:
                self._num_flushing -= 1
            return Flushed(not len(self.queue), len(self.queue), self.queue.num_bytes)

    def close(self, timeout_s: float) -> bool:
        """Finish the current block, drop and count the others. False: the thread still waits for the disk."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._drop(self.queue.entries(), BlockEvent.DROPPED, DropReason.CLOSED)
            self._changed.notify_all()
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        _lower_priority()
        while True:
            with self._changed:
                if not self._wait_for_work():
                    return
                # Deletes run in slices, so that a block can be written between two of them.
                catches_up = self._must_catch_up and not (self._has_just_caught_up and len(self.queue))
                expires = not catches_up and self._must_expire()
                entries = [] if catches_up or expires else self.queue.entries()[:1]
                self._is_writing = True
                self._has_just_caught_up = catches_up
                self._must_catch_up = self._must_catch_up and not catches_up
            if catches_up:
                self._catch_up()
            elif expires:
                self._expire()
            for entry in entries:
                self._write(entry)
                if not len(self.queue):
                    _guarded(self._work.save)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
            if entries:
                self._on_room()

    def _catch_up(self) -> None:
        outcome = _guarded(self._work.catch_up)
        with self._changed:
            if isinstance(outcome, WriteFailed):
                self._counters.add(BlockEvent.FAILED, outcome.reason)
                self._begin_pause(outcome.reason, outcome.what)
            elif not outcome.is_done:
                self._must_catch_up = True

    def _expire(self) -> None:
        seconds = _guarded(lambda: self._work.expire(self.queue.needs))
        with self._changed:
            self._expires_s = time.monotonic() + (LONGEST_PAUSE_S if isinstance(seconds, WriteFailed) else seconds)

    def _must_expire(self) -> bool:
        return time.monotonic() >= self._expires_s

    def _has_work(self) -> bool:
        return len(self.queue) > 0 or self._must_catch_up or self._must_expire()

    def _has_nothing_to_do(self) -> bool:
        return self._is_closing or not (self._is_writing or self._has_work())

    def _wait_for_work(self) -> bool:
        while not self._is_closing:
            has_work = self._has_work()
            if has_work and (self._num_flushing or not self._backoff.is_paused):
                return True
            seconds = self._backoff.remaining_s if has_work else self._expires_s - time.monotonic()
            self._changed.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        return False

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(self._is_pressed, seconds)

    def _is_pressed(self) -> bool:
        is_filling_up = self.queue.num_bytes > REST_BELOW * self.queue.limit_bytes
        return self._is_closing or self._num_flushing > 0 or is_filling_up

    def _write(self, entry: QueuedBlock) -> None:
        is_wanted, pace = (lambda: self.queue.has(entry)), self._throttle.pace
        match _guarded(lambda: self._work.publish(entry.block, self.queue.needs, is_wanted, pace)):
            case Published(file_bytes, expires_in_s):
                self._counters.add(BlockEvent.WRITTEN, entry.block.part, nbytes=file_bytes)
                with self._changed:
                    self._expires_s = min(self._expires_s, time.monotonic() + expires_in_s)
                    # The disk works again: catch up with what it did not do meanwhile.
                    self._must_catch_up = self._must_catch_up or bool(self._backoff.reason)
                    if self._backoff.end():
                        log.info("The disk cache can be written again")
                    self.queue.remove(entry)
            case DroppedBlock(DropReason.CLEARED):
                pass  # it left the queue when it was withdrawn
            case DroppedBlock(DropReason.RESERVE as reason):
                # Other programs fill the volume, and may free space again: as with a full disk.
                self._hold(entry, BlockEvent.DROPPED, reason, "what is free is left to others")
            case DroppedBlock(reason):
                self._give_up(entry, BlockEvent.DROPPED, reason)
            case WriteFailed(reason, what):
                self._hold(entry, BlockEvent.FAILED, reason, what)

    def _begin_pause(self, reason: DiskFault | DropReason, what: str) -> None:
        """Begin a pause. Its reason is logged unless the last pause had the same."""
        if self._backoff.begin(reason):
            log.warning(
                "The disk cache cannot be written (%s): %s. The server goes on from memory and tries again in %.0f s",
                reason,
                what,
                self._backoff.remaining_s,
            )

    def _hold(self, entry: QueuedBlock, event: BlockEvent, reason: DiskFault | DropReason, what: str) -> None:
        """Keep a block for an attempt after a pause, unless it had enough attempts or a flush waits."""
        with self._changed:
            self._num_faults += 1
            self._begin_pause(reason, what)
            entry.num_attempts += 1
            if self._num_flushing or entry.num_attempts == MAX_ATTEMPTS:
                self._give_up(entry, event, reason)
            elif event is BlockEvent.FAILED:
                self._counters.add(event, reason)

    def _give_up(self, entry: QueuedBlock, event: BlockEvent, reason: DiskFault | DropReason) -> None:
        """Drop a block, and the queued blocks that no lookup could reach without it."""
        with self._changed:
            self._num_faults += reason is DropReason.WRITE_BUDGET  # it may be accepted tomorrow
            self._drop(self.queue.unreachable_without(entry), event, reason)

    def _drop(self, entries: list[QueuedBlock], event: BlockEvent, reason: DiskFault | DropReason) -> None:
        for entry in entries:
            self.queue.remove(entry)
            self._counters.add(event, reason)
        if reason is not DropReason.CLOSED:
            self._removals.add(_removal(entry, reason) for entry in entries)


Outcome = TypeVar("Outcome")


def _guarded(work: Callable[[], Outcome]) -> Outcome | WriteFailed:
    try:
        return work()
    except Exception as error:  # A bug is logged and must not end the thread.
        log.exception("The disk cache's writer failed in a way that it should not")
        return WriteFailed(DiskFault.OTHER, repr(error))


def _removal(entry: QueuedBlock, reason: DiskFault | DropReason) -> BlockRemoval:
    block, cause = entry.block, CAUSES.get(reason, RemovalCause.FAILED)
    if entry.replaces and cause is not RemovalCause.CLEARED:
        cause = RemovalCause.REPLACEMENT
    return BlockRemoval(block.id, block.start, block.start + block.num_tokens, cause)


def _lower_priority() -> None:
    """Lower the priority of this thread below computing threads; on Linux each thread has its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            own = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(own + NICENESS, LARGEST_NICENESS))
