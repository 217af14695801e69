"""`kvstrata serve`: what becomes of flags and environment before any model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli import app, serve
from kvstrata.config import Settings, env_name
from kvstrata.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)
    monkeypatch.setenv("KVSTRATA_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("drain_timeout_s = 3\nmax_num_seqs = 3\nport = 3\n")


def settings_of(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> Settings:
    ran: list[Settings] = []
    monkeypatch.setattr(serve, "run", ran.append)
    result = CliRunner().invoke(app, ["serve", *arguments], env=environment)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return ran[0]


def test_lists_in_the_environment_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(
        monkeypatch, KVSTRATA_API_KEY="a, b", KVSTRATA_ALLOWED_HOSTS="one.example,two.example", KVSTRATA_MODEL="m"
    )
    assert settings.keys == ("a", "b")
    assert settings.allowed_hosts == ("one.example", "two.example")
    assert settings.model == "m"


def test_lists_as_flags_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch, "m", "--api-key", "a", "--api-key", "b,c", KVSTRATA_API_KEY="d")
    assert settings.keys == ("a", "b,c")
    assert settings.model == "m"


def test_flags_win_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(
        monkeypatch, "--port", "1", "--no-dynamic-cache",
        KVSTRATA_PORT="2", KVSTRATA_MAX_NUM_SEQS="2", KVSTRATA_DYNAMIC_CACHE="true", KVSTRATA_ALLOW_PUBLIC="1",
    )  # fmt: skip
    assert (settings.port, settings.max_num_seqs, settings.drain_timeout_s) == (1, 2, 3)
    assert (settings.dynamic_cache, settings.allow_public) == (False, True)


def test_an_empty_key_starts_no_open_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, environment in ((("--api-key", ""), {}), ((), {"KVSTRATA_API_KEY": ""})):
        with pytest.raises(ConfigError, match=r"--api-key \(KVSTRATA_API_KEY\): given, but empty"):
            settings_of(monkeypatch, *arguments, **environment)
