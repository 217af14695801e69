"""Publishes which blocks memory holds, some milliseconds' events in one message, and answers who missed messages.

A listener of the store: `stored`, `removed` and `cleared` come from one thread, which only notes; a thread of its own
has the sockets. Messages are numbered from 0, without gaps. The first one after a start, and the last one, say that
nothing holds: a consumer that outlives this server forgets what the one before had.

Who asks for messages from a number on (vLLM's form: a request with 8 bytes to the replay socket) gets those, and an
empty one numbered -1. Where they are not kept any more it gets one message in their place, numbered as the last one:
nothing holds, and then all that does.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvstrata.events.blocks import BlockNumbers, Event, ReportedBlocks
from kvstrata.events.feed import GRAIN
from kvstrata.events.sockets import KEPT_MESSAGES, LINGER_MS, Sockets
from kvstrata.events.wire import END, SEQUENCE_BYTES, body, sequence_frame
from kvstrata.prefix_cache.keys import TokenIds

log = logging.getLogger(__name__)

# Events of so long go in one message.
BATCH_S = 0.02
KEPT_BYTES = 64 << 20
CLOSE_S = 5.0


class Publisher:
    """`count` is told what kind of event was published."""

    def __init__(self, sockets: Sockets, count: Callable[[str], None] = lambda _: None) -> None:
        self._sockets = sockets
        self._count = count
        self._numbers = BlockNumbers()  # of the thread that tells
        self._lock = threading.Lock()  # guards the next four
        self._blocks = ReportedBlocks()
        # The first message waits for the first block: by then those who had the server before have connected again.
        self._waiting: list[Event] = [self._blocks.cleared()]
        self._due_s: float | None = None  # when what waits is sent
        self._ended = False
        self._kept: deque[tuple[int, bytes]] = deque()  # what was published, by its number
        self._kept_bytes = 0
        self._next = 0
        self._wakes, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvstrata-events", daemon=True)
        self._thread.start()

    block_tokens = GRAIN

    @property
    def publish_url(self) -> str:
        return self._sockets.publish_url

    @property
    def replay_url(self) -> str:
        return self._sockets.replay_url

    @property
    def topic(self) -> str:
        return self._sockets.topic.decode()

    # Called by the thread that tells.

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        del start
        numbers = self._numbers.of(root_key, ids)
        with self._lock:
            self._add(self._blocks.stored(numbers, ids))

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        numbers = self._numbers.of(root_key, ids)
        with self._lock:
            self._add(self._blocks.removed(numbers, start))

    def cleared(self) -> None:
        with self._lock:
            if len(self._blocks):
                self._add(self._blocks.cleared())

    def close(self) -> None:
        """What waits is published first, and that nothing holds any more."""
        self.cleared()
        with self._lock:
            if not self._ended:
                self._ended = True
                self._wake()
        self._thread.join(CLOSE_S)

    def _add(self, event: Event | None) -> None:
        if event is None or self._ended:
            return
        self._waiting.append(event)
        if self._due_s is None:
            self._due_s = time.monotonic() + BATCH_S
            self._wake()

    def _wake(self) -> None:
        self._wakes.send(b"\0")

    # From here on: the publisher's own thread.

    def _run(self) -> None:
        try:
            self._serve()
            self._publish()
        finally:
            with self._lock:
                self._ended = True  # whatever ended it: nothing piles up
                self._wakes.close()
            self._woken.close()
            self._sockets.close(linger_ms=LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sockets.replay, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._ended:
            ready = dict(poller.poll(self._left_ms()))
            if self._woken.fileno() in ready:
                self._woken.recv(64)
            if self._left_ms() == 0:
                self._publish()
            if self._sockets.replay in ready:
                self._answer()

    def _left_ms(self) -> int | None:
        with self._lock:
            return None if self._due_s is None else max(0, round(1000 * (self._due_s - time.monotonic())))

    def _publish(self) -> None:
        with self._lock:
            if self._due_s is None:
                return
            events, self._waiting, self._due_s = self._waiting, [], None
        packed = body(time.time(), events)
        self._sockets.publish.send_multipart([self._sockets.topic, sequence_frame(self._next), packed])
        for event in events:
            self._count(type(event).__name__)
        self._keep(packed)

    def _keep(self, packed: bytes) -> None:
        self._kept.append((self._next, packed))
        self._kept_bytes += len(packed)
        self._next += 1
        while len(self._kept) > KEPT_MESSAGES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """One question. A question in another form has no answer."""
        client, *rest = self._sockets.replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != SEQUENCE_BYTES:
            log.debug("A question for missed KV events was not understood: %d parts", len(rest))
            return
        first = int.from_bytes(rest[1], "big", signed=True)
        for number, packed in self._missed(first):
            self._sockets.replay.send_multipart([client, b"", sequence_frame(number), packed])
        self._sockets.replay.send_multipart([client, b"", END, b""])

    def _missed(self, first: int) -> list[tuple[int, bytes]]:
        self._publish()
        if not self._next or (self._kept and first >= self._kept[0][0]):
            return [kept for kept in self._kept if kept[0] >= first]
        with self._lock:
            # What came in this moment is in here and follows in a message of its own: twice is the same as once.
            again = list(self._blocks.told_again())
        return [(self._next - 1, body(time.time(), again))]
