"""Settings: defaults < TOML file < environment < flags.

`settings.py` declares every setting once. This package knows the sources of values and reports wrong ones. It does not
know the effect of a setting: `server/options.py` and `server/build.py` read settings and pass plain values down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvstrata.config.fields import NOT_A_KEY, env_name, flag_name, is_key, is_service_link
from kvstrata.config.settings import Settings
from kvstrata.config.sources import ConfigFile, default_config_path, read_key_file, read_toml
from kvstrata.errors import ConfigError
from kvstrata.platform.network import is_loopback
from kvstrata.sizes import format_bytes

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
    """Return the settings from all four sources. `flags` that are None were not given. Raises ConfigError with every
    problem."""
    # pydantic ignores a blank variable, but a user who sets one of these wants a server with keys: report it.
    given: dict[str, Any] = {name: "" for name in KEY_SETTINGS if os.environ.get(env_name(name)) == ""}
    given |= {name: value for name, value in (flags or {}).items() if value is not None}
    port_name = env_name("port")
    if is_service_link(port_name, port := os.environ.get(port_name)):
        logger.warning("%s=%s is a link to a service of that name, not a port: ignored.", port_name, port)
    path = config or default_config_path()
    file = read_toml(path) if config or path.is_file() else None
    try:
        return Settings(_file=dict(file.values) if file else {}, **given)  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        problems = [_problem(detail, given, file) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from None


def default_text(field: FieldInfo) -> str:
    """Return a default as --help shows it."""
    value = field.default
    if value is None or value == ():
        return "none"
    if _unit(field) == "size" and isinstance(value, int) and value:
        return format_bytes(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unit(field: FieldInfo) -> object:
    extra = field.json_schema_extra
    return extra.get("unit") if isinstance(extra, dict) else None


def _problem(detail: ErrorDetails, given: Mapping[str, Any], file: ConfigFile | None) -> str:
    """Return one line: where the value comes from, what is wrong, what to do. A value may be a key: it is not shown."""
    loc = detail["loc"]
    if not loc:
        return f"{detail['msg']}."
    name = str(loc[0])
    is_from_file = file is not None and name in file.values and name not in given and env_name(name) not in os.environ
    place = file.place_of(name) if file is not None and is_from_file else ""
    if detail["type"] == "extra_forbidden":
        return f"{place + ': ' if place else ''}there is no setting '{name}'. {_suggestion(name)}"
    where = f"{place}: {name}" if place else f"{flag_name(name)} ({env_name(name)})"
    return f"{where}: {detail['msg'].rstrip('.')}."


def _suggestion(name: str) -> str:
    every = "All settings: kvstrata serve --help-all"
    close = get_close_matches(name.replace("-", "_"), Settings.model_fields, n=1, cutoff=0.7)
    return f"Did you mean '{close[0]}'? {every}" if close else every
