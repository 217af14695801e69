"""What memory holds, told to others while it changes: which tokens of which prompts came, and which went.

The engine's thread only puts a note into a queue; a thread of its own tells the listeners. Where they fall behind by
more than `MAX_WAITING_BYTES` the notes are given up, and listeners are told that nothing is known any more.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstrata.prefix_cache.entry_table import CacheListener
from kvstrata.prefix_cache.keys import TokenIds

log = logging.getLogger(__name__)

# Listeners hear of tokens when a run of so many is complete.
GRAIN = 16

MAX_WAITING_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class _Note:
    is_stored: bool
    root_key: bytes
    ids: TokenIds
    start: int


class ListenerThread:
    """A watcher that hands on what it hears to `listeners`, on a thread of its own. What a listener raises is logged
    once for each kind and keeps no other from hearing. `gave_up` is called for each note that was given up."""

    def __init__(self, listeners: Sequence[CacheListener], gave_up: Callable[[], None] = lambda: None) -> None:
        self._listeners = tuple(listeners)
        self._gave_up = gave_up
        self._notes: queue.SimpleQueue[_Note | None] = queue.SimpleQueue()  # None: cleared, or the end
        self._lock = threading.Lock()  # guards the next
        self._waiting_bytes = 0
        self._gives_up = False  # until half of what waits is told
        self._ended = False
        self._said: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name="kvstrata-watching", daemon=True)
        self._thread.start()

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        if len(ids) // GRAIN > start // GRAIN:
            self._add(_Note(True, root_key, ids.copy(), start))

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        if len(ids) // GRAIN > start // GRAIN:
            self._add(_Note(False, root_key, ids.copy(), start))

    def cleared(self) -> None:
        self._notes.put(None)

    def close(self) -> None:
        """What is waiting is told first. For at most some seconds."""
        self._ended = True
        self._notes.put(None)
        self._thread.join(timeout=5.0)

    def _add(self, note: _Note) -> None:
        with self._lock:
            was_given_up, too_much = self._gives_up, self._waiting_bytes + note.ids.nbytes > MAX_WAITING_BYTES
            self._gives_up = too_much or (was_given_up and self._waiting_bytes > MAX_WAITING_BYTES // 2)
            if not self._gives_up:
                self._waiting_bytes += note.ids.nbytes
        if self._gives_up:
            self._gave_up()
        if not self._gives_up or not was_given_up:
            self._notes.put(None if self._gives_up else note)

    def _run(self) -> None:
        while True:
            note = self._notes.get()
            if note is None and self._ended and self._notes.empty():
                return
            if note is not None:
                with self._lock:
                    self._waiting_bytes -= note.ids.nbytes
            self._tell(note)

    def _tell(self, note: _Note | None) -> None:
        for listener in self._listeners:
            try:
                if note is None:
                    listener.cleared()
                elif note.is_stored:
                    listener.stored(note.root_key, note.ids, note.start)
                else:
                    listener.removed(note.root_key, note.ids, note.start)
            except Exception as error:
                if type(error) not in self._said:
                    self._said.add(type(error))
                    log.warning("A listener of the cache failed: %s", error, exc_info=True)
