"""The queue of blocks on their way to the disk, and the thread that empties it. Knows no files.

A block stays in the queue until it is published, so it can be found at every moment: first here, then in the catalogue.
A fault of the disk changes nothing about that: the block is tried again after a pause. One that is given up takes along
what is queued behind it and hangs on it, which no lookup could reach.
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
from dataclasses import dataclass
from typing import TypeVar

from kvstrata.disk.pause import LONGEST_PAUSE_S, Pause
from kvstrata.disk.publish import Dropped, Failed, SettledIn, Written
from kvstrata.disk.reasons import Drop, Fault
from kvstrata.disk.strides import Strides, Take
from kvstrata.disk.usage import Counters, Event
from kvstrata.tier.base import Flushed, Refusal, Writing
from kvstrata.tier.block import BASE, Block, BlockId

log = logging.getLogger(__name__)

# The block, the keys that must stay, whether it is still wanted at the moment of publication, and what paces the work.
Publish = Callable[[Block, Callable[[], frozenset[bytes]], Callable[[], bool], Take], Written | Dropped | Failed]
# Let go of what no request asked for in time, but for keys that must stay. Tells in how many seconds to do so again.
Expire = Callable[[frozenset[bytes]], float]

# More than computing threads, but not all there is: a thread that never gets a core may hold the interpreter meanwhile.
NICENESS = 10
LARGEST_NICENESS = 19
# Of one block, each after a longer pause. Some minutes: a disk that was full has room again, and a block that can never
# be written does not keep the others waiting for good.
MAX_ATTEMPTS = 6
FULL = (Fault.NO_SPACE, Drop.RESERVE)
# Of the queue. What is past it is written without a rest: rather that than refuse blocks.
REST_BELOW = 0.25


@dataclass(slots=True, eq=False)
class _Entry:
    """One offer of a block: the same block, offered again after it was withdrawn, is another."""

    block: Block
    num_attempts: int = 0


class Writer:
    def __init__(
        self,
        publish: Publish,
        *,
        settle_in: Callable[[], SettledIn | Failed],
        counters: Counters,
        on_written: Callable[[Written], None],
        limit_bytes: int,
        first_pause_s: float,
        expire: Expire = lambda _: math.inf,
        share: float,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`share`: of one core, for what is long; more where a flush or close waits or the queue fills up. `on_room` is
        called on the writer's thread whenever a block was tried."""
        self._publish = publish
        self._settle_in = settle_in
        self._expire = expire
        self._expires_s = -math.inf  # when to call it
        self._on_written = on_written
        self._on_room = on_room
        self._counters = counters
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._queue: dict[BlockId, _Entry] = {}
        self._lengths: dict[bytes, dict[BlockId, int]] = {}  # of the bases in it, by parent
        self._is_writing = False
        self._bytes = 0
        self._moved_s = 0.0  # when a block last left the queue, or came to an empty one
        self._pause = Pause(first_pause_s, time.monotonic)
        self._strides = Strides(self._rest, share=share)
        self._num_flushing = 0
        self._num_faults = 0
        self._is_settled_in = False
        self._has_just_settled = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvstrata-disk-writer", daemon=True)
        self._thread.start()

    # For callers.

    def offer(self, block: Block) -> Refusal | None:
        """None: taken. Waits for nothing but the queue's lock, which is never held over a file operation."""
        with self._changed:
            if self._is_closing:
                return Refusal.CLOSED
            if self._pause.is_on:
                return Refusal.PAUSED
            if block.id in self._queue:
                return Refusal.PRESENT
            # A block that is larger than the whole queue goes alone: otherwise it could never be written.
            if self._queue and self._bytes + block.nbytes > self._limit_bytes:
                return Refusal.QUEUE_FULL
            if not self._queue:
                self._moved_s = time.monotonic()
            self._queue[block.id] = _Entry(block)
            self._bytes += block.nbytes
            if block.part == BASE:
                self._lengths.setdefault(block.parent, {})[block.id] = block.num_tokens
            self._changed.notify_all()
        return None

    def queued(self, block: BlockId) -> list[Block]:
        with self._changed:
            return [self._queue[block].block] if block in self._queue else []

    def lengths(self, parent: bytes) -> set[int]:
        with self._changed:
            return set(self._lengths.get(parent, {}).values())

    def withdraw(self, is_unwanted: Callable[[Block], bool]) -> None:
        """What is being written is not published any more, unless it just was: then it is on the disk."""
        with self._changed:
            for entry in [entry for entry in self._queue.values() if is_unwanted(entry.block)]:
                self._leave(entry)
                self._counters.add(Event.DROPPED, Drop.CLEARED)

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return self._bytes

    def state(self, budget_bytes: float) -> Writing:
        with self._changed:
            is_paused = self._pause.is_on
            return Writing(
                queue_bytes=self._bytes,
                limit_bytes=self._limit_bytes,
                budget_bytes=budget_bytes,
                unmoved_s=time.monotonic() - self._moved_s if self._queue else 0.0,
                is_failing=self._is_closing or bool(self._pause.reason),
                paused_because=self._pause.reason if is_paused else "",
                is_full=is_paused and self._pause.reason in FULL,
                num_faults=self._num_faults,
            )

    @property
    def num_blocks(self) -> int:
        with self._changed:
            return len(self._queue)

    def end_pause(self) -> None:
        """Take blocks again, whatever the disk said: there may be no later. Until it says so again."""
        with self._changed:
            self._pause.lift()
            self._changed.notify_all()

    def wake(self) -> None:
        """Something is out of step: settle in again, once no pause is on."""
        with self._changed:
            self._is_settled_in = False
            self._changed.notify_all()

    def expire_within(self, seconds: float) -> None:
        """Something that was written may have to go by then."""
        with self._changed:
            self._expires_s = min(self._expires_s, time.monotonic() + seconds)

    def flush(self, timeout_s: float) -> Flushed:
        """Everything is tried at once, a pause or not, and what fails is given up: there may be no later."""
        with self._changed:
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(self._has_nothing_to_do, timeout_s)
            finally:
                self._num_flushing -= 1
            return Flushed(not self._queue, len(self._queue), self._bytes)

    def close(self, timeout_s: float) -> bool:
        """The block at hand is finished, the rest dropped and counted. False: the thread still waits for the disk."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            for entry in list(self._queue.values()):
                self._leave(entry)
                self._counters.add(Event.DROPPED, Drop.CLOSED)
            self._changed.notify_all()
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        _step_back()
        while True:
            with self._changed:
                if not self._wait_for_work():
                    return
                # What is deleted in slices leaves a turn to a block between two of them.
                must_settle_in = not self._is_settled_in and not (self._has_just_settled and self._queue)
                must_expire = self._must_expire()
                batch = [] if must_settle_in or must_expire else list(self._queue.values())[:1]
                self._is_writing = True
                self._has_just_settled = must_settle_in
                self._is_settled_in = self._is_settled_in or must_settle_in
            if must_settle_in:
                self._settle_in_now()
            elif must_expire:
                self._expire_now()
            for entry in batch:
                self._settle(entry, self._attempt(entry))
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
            if batch:
                self._on_room()

    def _settle_in_now(self) -> None:
        outcome = _guarded(self._settle_in)
        with self._changed:
            if isinstance(outcome, Failed):
                self._counters.add(Event.FAILED, outcome.reason)
                self._pause.begin(outcome.reason, outcome.what)
            elif not outcome.is_done:
                self._is_settled_in = False

    def _expire_now(self) -> None:
        seconds = _guarded(lambda: self._expire(self._kept()))
        with self._changed:
            self._expires_s = time.monotonic() + (LONGEST_PAUSE_S if isinstance(seconds, Failed) else seconds)

    def _must_expire(self) -> bool:
        return time.monotonic() >= self._expires_s

    def _has_work(self) -> bool:
        return bool(self._queue) or not self._is_settled_in or self._must_expire()

    def _has_nothing_to_do(self) -> bool:
        return self._is_closing or not (self._is_writing or self._has_work())

    def _wait_for_work(self) -> bool:
        while not self._is_closing:
            has_work = self._has_work()
            if has_work and (self._num_flushing or not self._pause.is_on):
                return True
            seconds = self._pause.remaining_s if has_work else self._expires_s - time.monotonic()
            self._changed.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        return False

    def _attempt(self, entry: _Entry) -> Written | Dropped | Failed:
        is_wanted, take = (lambda: self._is_queued(entry)), self._strides.take
        return _guarded(lambda: self._publish(entry.block, self._kept, is_wanted, take))

    def _kept(self) -> frozenset[bytes]:
        """Parents stay while their children are on the way; a part stays with its base."""
        with self._changed:
            return frozenset(key for e in self._queue.values() for key in (e.block.parent, e.block.key))

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(self._is_pressed, seconds)

    def _is_pressed(self) -> bool:
        return self._is_closing or self._num_flushing > 0 or self._bytes > REST_BELOW * self._limit_bytes

    def _settle(self, entry: _Entry, outcome: Written | Dropped | Failed) -> None:
        match outcome:
            case Written(file_bytes):
                self._counters.add(Event.WRITTEN, entry.block.part, nbytes=file_bytes)
                self._on_written(outcome)
                with self._changed:
                    # The disk works again: what it did not do meanwhile is to be done.
                    self._is_settled_in = self._is_settled_in and not self._pause.reason
                    self._pause.end()
                    self._leave(entry)
            case Dropped(Drop.CLEARED):
                pass  # it left when it was withdrawn
            case Dropped(Drop.RESERVE as reason):
                # Others fill the volume, and may make room again: as with a full disk.
                self._hold(entry, Event.DROPPED, reason, "what is free is left to others")
            case Dropped(reason):
                self._give_up(entry, Event.DROPPED, reason)
            case Failed(reason, what):
                self._hold(entry, Event.FAILED, reason, what)

    def _hold(self, entry: _Entry, event: Event, reason: Fault | Drop, what: str) -> None:
        """After a pause it is tried again, unless it had enough attempts or a flush waits."""
        with self._changed:
            self._num_faults += 1
            self._pause.begin(reason, what)
            entry.num_attempts += 1
            if self._num_flushing or entry.num_attempts == MAX_ATTEMPTS:
                self._give_up(entry, event, reason)
            elif event is Event.FAILED:
                self._counters.add(event, reason)

    def _give_up(self, entry: _Entry, event: Event, reason: Fault | Drop) -> None:
        """And what is queued and hangs on it. Parents are queued before their children, a base before its parts."""
        with self._changed:
            self._num_faults += reason is Drop.WRITE_BUDGET  # tomorrow it may be taken
            gone = {entry.block.key} if entry.block.part == BASE else set[bytes]()
            for other in list(self._queue.values()):
                if other is entry or not gone.isdisjoint((other.block.key, other.block.parent)):
                    if other.block.part == BASE:
                        gone.add(other.block.key)
                    self._leave(other)
                    self._counters.add(event, reason)

    def _is_queued(self, entry: _Entry) -> bool:
        with self._changed:
            return self._queue.get(entry.block.id) is entry

    def _leave(self, entry: _Entry) -> None:
        if self._queue.get(entry.block.id) is entry:
            del self._queue[entry.block.id]
            self._bytes -= entry.block.nbytes
            self._moved_s = time.monotonic()
            following = self._lengths.get(entry.block.parent, {})
            following.pop(entry.block.id, None)
            if not following:
                self._lengths.pop(entry.block.parent, None)


Outcome = TypeVar("Outcome")


def _guarded(work: Callable[[], Outcome]) -> Outcome | Failed:
    try:
        return work()
    except Exception as error:  # The thread must outlive a mistake of ours, and say it.
        log.exception("The disk cache's writer failed in a way that it should not")
        return Failed(Fault.OTHER, repr(error))


def _step_back() -> None:
    """Let computing threads have the cores: on Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            own = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(own + NICENESS, LARGEST_NICENESS))
