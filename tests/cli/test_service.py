"""`kvstrata service print`: units that systemd and launchd read as they were meant, with the flags that were chosen."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvstrata.cli import app, service
from kvstrata.errors import ConfigError

FLAGS = ("models/my model", "--port", "9000", "--api-key", 'a$b%c"d\\e', "--drain-timeout-s", "100")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSTRATA_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")


def printed(manager: str, *flags: str) -> str:
    result = CliRunner().invoke(app, ["service", "print", manager, *(("--", *flags) if flags else ())])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_launchd_reads_what_was_meant() -> None:
    told = plistlib.loads(printed("launchd", *FLAGS).encode())
    assert told["ProgramArguments"][-len(FLAGS) - 1 :] == ["serve", *FLAGS]
    assert told["ExitTimeOut"] > 200  # replies, then the disk cache
    assert told["WorkingDirectory"] == os.getcwd()
    assert told["RunAtLoad"] is True
    assert told["EnvironmentVariables"]["KVSTRATA_CONFIG"] == os.environ["KVSTRATA_CONFIG"]


def test_systemd_gets_the_chosen_flags() -> None:
    lines = dict(line.split("=", 1) for line in printed("systemd", "--port", "9000").splitlines() if "=" in line)
    assert lines["ExecStart"].endswith(" serve --port 9000")
    assert lines["TimeoutStopSec"] == "75"
    assert lines["WantedBy"] == "default.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    unit = tmp_path / "kvstrata.service"
    unit.write_text(printed("systemd", *FLAGS))
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "verify", "--user", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("Type=exec", "Type=nonsense"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert "nonsense" in done.stderr  # it does look


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\r\n\0"), min_size=1), min_size=1, max_size=4))
def test_no_word_of_a_command_is_lost_to_quoting(words: list[str]) -> None:
    unit = service.Unit(("/bin/kvstrata", *words), Path("/"), {}, 1)
    line = next(line for line in service.systemd(unit).split("\n") if line.startswith("ExecStart="))
    # A shell's rules for double quotes are systemd's, once its own signs are put back.
    text = line.removeprefix("ExecStart=").replace("%%", "%").replace("$$", "$")
    assert shlex.split(text) == ["/bin/kvstrata", *words]


def test_flags_that_serve_would_refuse_are_refused() -> None:
    with pytest.raises(ConfigError, match="--port"):
        printed("systemd", "--port", "many")
    result = CliRunner().invoke(app, ["service", "print", "systemd", "--", "--prt", "9000"])
    assert result.exit_code == 2
    assert "--prt" in result.output


def test_a_key_in_a_unit_is_warned_of() -> None:
    result = CliRunner().invoke(app, ["service", "print", "systemd", "--", "--api-key", "secret"])
    assert "--api-key-file" in result.stderr
    assert "secret" not in result.stderr
