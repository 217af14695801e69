"""Where the libraries that events need are asked for. They are an extra: most servers publish nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstrata.errors import ConfigError
from kvstrata.events.address import EventOptions

if TYPE_CHECKING:
    from kvstrata.events.publisher import Publisher
    from kvstrata.events.sockets import Sockets


def bind_events(options: EventOptions) -> Sockets:
    """Raises ConfigError where a library lacks or an address cannot be had."""
    try:
        import msgpack  # noqa: F401
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--kv-events needs a library that is not installed ({error.name}): pip install 'kvstrata[events]'"
        ) from None
    from kvstrata.events.sockets import Sockets

    return Sockets(options)


def start_publisher(sockets: Sockets, count: Callable[[str], None]) -> Publisher:
    from kvstrata.events.publisher import Publisher

    return Publisher(sockets, count)
