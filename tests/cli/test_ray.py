"""`kvstrata ray config`: what it writes, and what never stands there."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvstrata.cli.ray import app
from kvstrata.errors import ConfigError

REFERENCE = "redis://cache:${STORE_PASSWORD}@valkey:6379/0"


def test_the_password_of_a_store_is_a_variable_and_never_in_the_file() -> None:
    written = CliRunner().invoke(app, ["config", "--remote-cache", REFERENCE], catch_exceptions=False)
    assert written.exit_code == 0
    assert f'remote_cache: "{REFERENCE}"' in written.stdout
    with pytest.raises(ConfigError, match=r"--remote-cache.*\$\{STORE_PASSWORD\}") as refused:
        CliRunner().invoke(app, ["config", "--remote-cache", "redis://:hunter2@valkey:6379"], catch_exceptions=False)
    assert "hunter2" not in str(refused.value)


def test_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        CliRunner().invoke(app, ["config", "--api-key", "a-key"], catch_exceptions=False)
