"""Files with settings: TOML, and keys one on each line."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.config.fields import ENV_PREFIX, env_name, flag_name
from kvstrata.errors import ConfigError
from kvstrata.platform.files import OpenToAll, read_private


def default_config_path() -> Path:
    """Return the path of the TOML file that is read without --config."""
    if path := os.environ.get(f"{ENV_PREFIX}CONFIG"):
        return Path(path)
    import platformdirs

    return Path(platformdirs.user_config_dir("kvstrata", appauthor=False)) / "config.toml"


@dataclass(frozen=True)
class ConfigFile:
    """A TOML file with settings. `text` is kept for the line numbers of messages."""

    path: Path
    text: str
    values: Mapping[str, Any]

    def place_of(self, key: str) -> str:
        """Return file and line of a key, as messages name them."""
        pattern = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[].=]""")
        for number, line in enumerate(self.text.splitlines(), 1):
            if pattern.match(line):
                return f"{self.path}, line {number}"
        return str(self.path)


def read_toml(path: Path) -> ConfigFile:
    try:
        text = path.read_text(encoding="utf-8")
        return ConfigFile(path, text, tomllib.loads(text))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}. Check --config (KVSTRATA_CONFIG).") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}.") from None


def read_key_file(path: Path, setting: str) -> tuple[str, ...]:
    name = f"{flag_name(setting)} ({env_name(setting)})"
    try:
        lines = read_private(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {path} cannot be read: {error}.") from None
    except OpenToAll:
        raise ConfigError(f"{name}: {path} can be read or written by every user. Run: chmod 600 {path}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise ConfigError(f"{name}: {path} has no key. Write one on each line.")
    return keys
