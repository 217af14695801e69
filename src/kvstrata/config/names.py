"""What a setting is called in each place, and what a key may look like. Light to import."""

from __future__ import annotations

import re

ENV_PREFIX = "KVSTRATA_"
LINK_PATTERN = re.compile(r"(?:tcp|udp|sctp)://", re.IGNORECASE)
NOT_A_KEY = "an API key must be printable ASCII without spaces"


def flag_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def env_name(setting: str) -> str:
    return ENV_PREFIX + setting.upper()


def is_service_link(name: str, value: str | None) -> bool:
    """For a service called kvstrata Kubernetes sets KVSTRATA_PORT=tcp://10.0.0.1:8000 in every container, as Docker did
    for links. The other names that they set (KVSTRATA_SERVICE_HOST, KVSTRATA_PORT_8000_TCP) are no settings."""
    return name.upper() == env_name("port") and LINK_PATTERN.match(value or "") is not None


def is_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
