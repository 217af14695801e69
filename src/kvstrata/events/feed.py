"""Feed of cache events to listeners: which tokens of which prompts entered or left memory.

The engine thread only queues an event; a thread of its own calls the listeners. When queued events exceed
`MAX_WAITING_BYTES`, events are dropped, and `cleared` is called once instead of them.
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

# Listeners hear of tokens when a run of this many is complete.
GRAIN = 16
MAX_WAITING_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class _FeedEvent:
    """Tokens of one prompt that entered or left memory."""

    is_stored: bool
    root_key: bytes
    ids: TokenIds
    start: int


class ListenerThread:
    """A cache listener that passes events to `listeners` on its own thread.

    An exception of one listener is logged once per exception type and does not affect the others. `on_dropped` is
    called for each dropped event.
    """

    def __init__(self, listeners: Sequence[CacheListener], on_dropped: Callable[[], None] = lambda: None) -> None:
        self._listeners = tuple(listeners)
        self._on_dropped = on_dropped
        self._events: queue.SimpleQueue[_FeedEvent | None] = queue.SimpleQueue()  # None: cleared, or the end
        self._lock = threading.Lock()  # guards the next two
        self._waiting_bytes = 0
        self._is_dropping = False  # until half of the queue is delivered
        self._is_closed = False
        self._logged_types: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name="kvstrata-watching", daemon=True)
        self._thread.start()

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """Queue that `ids` is cached, its tokens from `start` on newly."""
        if len(ids) // GRAIN > start // GRAIN:
            self._queue_event(_FeedEvent(True, root_key, ids.copy(), start))

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        """Queue that the tokens of `ids` from `start` on are no longer cached."""
        if len(ids) // GRAIN > start // GRAIN:
            self._queue_event(_FeedEvent(False, root_key, ids.copy(), start))

    def cleared(self) -> None:
        """Queue that nothing is cached any more."""
        self._events.put(None)

    def close(self) -> None:
        """Deliver queued events for at most five seconds, then end the thread."""
        self._is_closed = True
        self._events.put(None)
        self._thread.join(timeout=5.0)

    def _queue_event(self, event: _FeedEvent) -> None:
        with self._lock:
            was_dropping, exceeds_limit = self._is_dropping, self._waiting_bytes + event.ids.nbytes > MAX_WAITING_BYTES
            self._is_dropping = exceeds_limit or (was_dropping and self._waiting_bytes > MAX_WAITING_BYTES // 2)
            if not self._is_dropping:
                self._waiting_bytes += event.ids.nbytes
        if self._is_dropping:
            self._on_dropped()
        if not self._is_dropping or not was_dropping:
            self._events.put(None if self._is_dropping else event)

    def _run(self) -> None:
        while True:
            event = self._events.get()
            if event is None and self._is_closed and self._events.empty():
                return
            if event is not None:
                with self._lock:
                    self._waiting_bytes -= event.ids.nbytes
            self._deliver(event)

    def _deliver(self, event: _FeedEvent | None) -> None:
        for listener in self._listeners:
            try:
                if event is None:
                    listener.cleared()
                elif event.is_stored:
                    listener.stored(event.root_key, event.ids, event.start)
                else:
                    listener.removed(event.root_key, event.ids, event.start)
            except Exception as error:
                if type(error) not in self._logged_types:
                    self._logged_types.add(type(error))
                    log.warning("A listener of the cache failed: %s", error, exc_info=True)
