"""Publisher of KV events: the sockets, and the thread that publishes and replays.

A listener of the prefix cache: one thread calls `stored`, `removed` and `cleared`, which only queue events; another
thread owns the sockets. It sends the events of some milliseconds in one message. Messages are numbered from 0, without
gaps. The first message after a start, and the last one, announce that no block is cached: a consumer that outlives this
server forgets the blocks of the server before.

A consumer that asks for messages from a number on (vLLM's form: a request with 8 bytes to the replay socket) gets
them, and an empty one numbered -1. When they are no longer kept it gets one message in their place, numbered as the
last one: no block is cached, and then all blocks that are.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvstrata.errors import ConfigError
from kvstrata.events.blocks import (
    END,
    SEQUENCE_BYTES,
    BlockNumbers,
    Event,
    ReportedBlocks,
    message_body,
    sequence_frame,
)
from kvstrata.events.feed import GRAIN
from kvstrata.events.options import Address, EventOptions
from kvstrata.prefix_cache.keys import TokenIds

log = logging.getLogger(__name__)

# Events of this time go in one message.
BATCH_S = 0.02
# Messages that wait for one subscriber. A subscriber further behind misses some, sees the gap, and asks for them.
MAX_WAITING = 10_000
# Messages that are kept for consumers that ask.
KEPT_MESSAGES = 10_000
KEPT_BYTES = 64 << 20
CLOSE_S = 5.0
LINGER_MS = 1000


class EventSockets:
    """Publish socket and replay socket. Used by one thread at a time.

    They are bound before a model is loaded, so that an address in use is reported at once.
    """

    def __init__(self, options: EventOptions) -> None:
        self.topic = options.topic.encode()
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        # One reply fits into the queue. A second reply to a consumer that does not read is dropped.
        self.publish, self.publish_url = self._bind(zmq.PUB, options.publish, "--kv-events", MAX_WAITING)
        self.replay, self.replay_url = self._bind(zmq.ROUTER, options.replay, "--kv-events (replay)", KEPT_MESSAGES + 2)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close both sockets after at most `linger_ms` for messages that were sent."""
        self._context.destroy(linger=linger_ms)

    def _bind(self, kind: int, address: Address, flag: str, max_waiting: int) -> tuple[zmq.Socket[bytes], str]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, max_waiting)
        bound.setsockopt(zmq.IPV6, int(":" in address.host))
        try:
            bound.bind(address.url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(_problem(address, flag, error)) from None
        return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)


def _problem(address: Address, flag: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag}: {address.url} is in use. Stop the other program, or take another port."
    return f"{flag}: cannot publish on {address.url}: {error.strerror}. Check address and port."


class EventPublisher:
    """Listener that publishes events. `count` is called with the kind of each published event."""

    def __init__(self, sockets: EventSockets, count: Callable[[str], None] = lambda _: None) -> None:
        self._sockets = sockets
        self._count = count
        self._numbers = BlockNumbers()  # of the thread that reports changes
        self._lock = threading.Lock()  # guards the next four
        self._blocks = ReportedBlocks()
        # The first message waits for the first block: by then consumers of the server before have reconnected.
        self._waiting: list[Event] = [self._blocks.clear_blocks()]
        self._due_s: float | None = None  # when waiting events are sent
        self._ended = False
        self._kept: deque[tuple[int, bytes]] = deque()  # published messages, by number
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

    # Called by the thread that reports changes.

    def stored(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        del start
        numbers = self._numbers.numbers_of(root_key, ids)
        with self._lock:
            self._add(self._blocks.add_blocks(numbers, ids))

    def removed(self, root_key: bytes, ids: TokenIds, start: int) -> None:
        numbers = self._numbers.numbers_of(root_key, ids)
        with self._lock:
            self._add(self._blocks.remove_blocks(numbers, start))

    def cleared(self) -> None:
        with self._lock:
            if len(self._blocks):
                self._add(self._blocks.clear_blocks())

    def close(self) -> None:
        """Publish waiting events and the removal of all blocks, then end the thread."""
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
                self._ended = True  # so that no events pile up
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
        packed = message_body(time.time(), events)
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
        """Answer one request for missed messages. A request in another form gets no reply."""
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
            # Blocks of this moment are included, and announced again in the next message: that changes nothing.
            again = list(self._blocks.replay_all())
        return [(self._next - 1, message_body(time.time(), again))]
