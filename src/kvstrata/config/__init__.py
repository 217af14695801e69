"""Settings: defaults < TOML file < environment < flags.

Every setting is declared once, in `settings.py`. Knows where values come from and how a wrong one is told. Knows
nothing of what a setting does: the code that puts the pieces together reads it and hands plain values down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvstrata.backend.addresses import is_loopback
from kvstrata.config.files import default_config_path, read_key_file, read_toml
from kvstrata.config.names import NOT_A_KEY, env_name, flag_name, is_key, is_service_link
from kvstrata.config.settings import Settings
from kvstrata.errors import ConfigError
from kvstrata.sizes import human_bytes

__all__ = [
    "NOT_A_KEY",
    "Settings",
    "default_config_path",
    "default_text",
    "env_name",
    "flag_name",
    "is_key",
    "is_loopback",
    "is_service_link",
    "load",
    "read_key_file",
    "read_toml",
]

logger = logging.getLogger(__name__)

KEY_SETTINGS = ("api_key", "api_key_file", "admin_key", "admin_key_file")


def load(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Settings from all four places. `flags` that are None were not given. Raises ConfigError with every problem."""
    # pydantic takes a blank variable as not set; but who sets one of these wants a locked server.
    given: dict[str, Any] = {name: "" for name in KEY_SETTINGS if os.environ.get(env_name(name)) == ""}
    given |= {name: value for name, value in (flags or {}).items() if value is not None}
    port_name = env_name("port")
    if is_service_link(port_name, port := os.environ.get(port_name)):
        logger.warning("%s=%s is a link to a service of that name, not a port: ignored.", port_name, port)
    path = config or default_config_path()
    file_values = read_toml(path) if config or path.is_file() else {}
    try:
        return Settings(_file=file_values, **given)  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from None


def default_text(field: FieldInfo) -> str:
    """The default as --help shows it."""
    value = field.default
    if value is None or value == ():
        return "none"
    if _unit(field) == "size" and isinstance(value, int) and value:
        return human_bytes(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit(field: FieldInfo) -> object:
    extra = field.json_schema_extra
    return extra.get("unit") if isinstance(extra, dict) else None


def _problem(detail: ErrorDetails) -> str:
    """One line. The value itself is never shown: it may be a key."""
    where = detail["loc"]
    if not where:
        return f"{detail['msg']}."
    name = str(where[0])
    if detail["type"] == "extra_forbidden":
        return f"{name}: there is no such setting. See: kvstrata serve --help-all"
    return f"{flag_name(name)} ({env_name(name)}): {detail['msg'].rstrip('.')}."
