"""Where events are published, and whether they may be: they carry prompts as token ids, and ZMQ asks for no key."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvstrata.errors import ConfigError
from kvstrata.platform.network import is_loopback

PATTERN = re.compile(r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>[0-9]{1,5})")
EXAMPLE = "tcp://127.0.0.1:5557"
MAX_PORT = 65535


@dataclass(frozen=True)
class Address:
    host: str  # * is every address of this machine
    port: int  # 0: any that is free

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class EventOptions:
    publish: Address
    replay: Address  # where consumers ask for what they missed
    topic: str


def parse(text: str, flag: str) -> Address:
    match = PATTERN.fullmatch(text)
    if match is None or int(match["port"]) > MAX_PORT:
        raise ConfigError(f"{flag}: {text!r} is not an address to publish on. Write it like {EXAMPLE}")
    return Address(match["six"] or match["host"], int(match["port"]))


def options_of(publish: str, replay: str | None, topic: str, *, has_keys: bool) -> EventOptions:
    """Without `replay` that is the next port. Raises ConfigError for an address that others can reach where no key
    keeps them out of the server itself."""
    to = parse(publish, "--kv-events")
    if replay is None:
        asked = Address(to.host, to.port + 1 if 0 < to.port < MAX_PORT else 0)
    else:
        asked = parse(replay, "--kv-events-replay")
    for address, flag in ((to, "--kv-events"), (asked, "--kv-events-replay")):
        if not has_keys and not is_loopback(address.host):
            raise ConfigError(
                f"{flag} {address.url} can be reached from other machines, and this server has no key: events carry "
                f"the token ids of prompts. Publish on {EXAMPLE}, or set a key with --api-key and let only routers "
                "reach that port."
            )
    return EventOptions(to, asked, topic)
