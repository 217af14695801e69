"""The two sockets: one that publishes, one that answers who missed something. Bound before a model is loaded, so that
an address in use is known in a moment. Does not know what is sent."""

from __future__ import annotations

import errno

import zmq

from kvstrata.errors import ConfigError
from kvstrata.events.address import Address, EventOptions

# Messages that wait for one subscriber; one that falls further behind misses some, sees it by their numbers, and asks.
MAX_WAITING = 10_000
# Messages that are kept for those who ask.
KEPT_MESSAGES = 10_000
LINGER_MS = 1000


class Sockets:
    """Used by one thread at a time."""

    def __init__(self, options: EventOptions) -> None:
        self.topic = options.topic.encode()
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        # One answer fits, a second to one who does not read does not.
        self.publish, self.publish_url = self._bound(zmq.PUB, options.publish, "--kv-events", MAX_WAITING)
        self.replay, self.replay_url = self._bound(zmq.ROUTER, options.replay, "--kv-events-replay", KEPT_MESSAGES + 2)

    def close(self, *, linger_ms: int = 0) -> None:
        """What was sent has so long to leave."""
        self._context.destroy(linger=linger_ms)

    def _bound(self, kind: int, address: Address, flag: str, max_waiting: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, max_waiting)
        socket.setsockopt(zmq.IPV6, int(":" in address.host))
        try:
            socket.bind(address.url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(_problem(address, flag, error)) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _problem(address: Address, flag: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag}: {address.url} is in use. Stop the other program, or take another port."
    return f"{flag}: cannot publish on {address.url}: {error.strerror}. Check address and port."
