"""Options of KV events: addresses to publish on, and the check for the optional libraries.

Events carry prompts as token ids and ZMQ asks for no key, so an address that others can reach needs a server with
keys. The libraries are an extra, because most servers publish nothing: this module imports them when events are on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstrata.errors import ConfigError
from kvstrata.platform.network import is_loopback

if TYPE_CHECKING:
    from kvstrata.events.publisher import EventPublisher, EventSockets

PATTERN = re.compile(r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>[0-9]{1,5})")
EXAMPLE = "tcp://127.0.0.1:5557"
MAX_PORT = 65535


@dataclass(frozen=True)
class Address:
    """Host and port of a ZMQ socket."""

    host: str  # * is every address of this machine
    port: int  # 0: any that is free

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class EventOptions:
    """Addresses and topic of KV events."""

    publish: Address
    replay: Address  # for consumers that ask for missed messages
    topic: str


def parse_address(text: str) -> Address:
    """Return the address in the value of --kv-events. Raises ConfigError for other texts."""
    match = PATTERN.fullmatch(text)
    if match is None or int(match["port"]) > MAX_PORT:
        raise ConfigError(f"--kv-events: {text!r} is not an address to publish on. Write it like {EXAMPLE}")
    return Address(match["six"] or match["host"], int(match["port"]))


def event_options(publish: str, topic: str, *, has_keys: bool) -> EventOptions:
    """Return the options of the flags. The replay socket gets the next port.

    Raises ConfigError for an address that other machines can reach while the server itself has no key."""
    to = parse_address(publish)
    if not has_keys and not is_loopback(to.host):
        raise ConfigError(
            f"--kv-events {to.url} can be reached from other machines, and this server has no key: events carry the "
            f"token ids of prompts. Publish on {EXAMPLE}, or set a key with --api-key and let only routers reach that "
            "port."
        )
    return EventOptions(to, Address(to.host, to.port + 1 if 0 < to.port < MAX_PORT else 0), topic)


def bind_events(options: EventOptions) -> EventSockets:
    """Bind the sockets of events. Raises ConfigError when a library is missing or an address is not available."""
    try:
        import msgpack  # noqa: F401
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--kv-events needs a library that is not installed ({error.name}): pip install 'kvstrata[events]'"
        ) from None
    from kvstrata.events.publisher import EventSockets

    return EventSockets(options)


def start_publisher(sockets: EventSockets, count: Callable[[str], None]) -> EventPublisher:
    """Start the publisher on bound sockets."""
    from kvstrata.events.publisher import EventPublisher

    return EventPublisher(sockets, count)
