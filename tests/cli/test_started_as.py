"""The command that messages print: the one by which the process was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstrata.cli import started_as


def write_script(folder: Path) -> Path:
    folder.mkdir(parents=True)
    script = folder / "kvstrata"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return script


def test_a_script_that_is_not_on_the_path_is_named_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_script(tmp_path / ".venv" / "bin")
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert started_as() == ".venv/bin/kvstrata"


def test_a_script_on_the_path_is_named_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, other = write_script(tmp_path / "one"), write_script(tmp_path / "two words")
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert started_as() == "kvstrata"
    monkeypatch.setattr(sys, "argv", [str(other)])
    assert started_as() == "'two words/kvstrata'"


def test_a_module_is_named_with_its_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/kvstrata/__main__.py"])
    monkeypatch.chdir(tmp_path)
    assert started_as() == f"{sys.executable} -m kvstrata"
