"""Removal log of a tier: the blocks that have left it, or never arrived.

The tier's threads append; the thread that owns MLX takes some entries at a time. The log is bounded: where blocks leave
faster than they are taken, it drops the newest removals and reports that any block may have left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvstrata.tiers.block import BlockId

MAX_REMOVALS = 1 << 14


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
    """A bounded log of removals, used from any thread."""

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
