"""`make serve`: how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
INTERRUPTED = "trap 'exit 130' INT; echo serving; while :; do sleep 0.1; done"
BROKEN = "echo serving; exit 1"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make_serve(folder: Path, script: str, *, interrupt: bool) -> tuple[int, str]:
    """Run the recipe with a script in kvstrata's place. `interrupt`: as Ctrl-C does, which all of a terminal's
    processes get."""
    command = folder / "bin" / "kvstrata"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    # The test command is a make of its own: what it hands down would make this one a part of it.
    outside = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
    with subprocess.Popen(
        ["make", "-f", str(MAKEFILE), "-o", "setup", "serve", f"VENV={folder}", "BACKEND=cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A test command in the background ignores Ctrl-C, and what it starts would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**outside, "LC_ALL": "C"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        if interrupt:
            os.killpg(process.pid, signal.SIGINT)
        said = process.stdout.read()
    return process.returncode, said


def test_ctrl_c_under_make_serve_reports_no_error(tmp_path: Path) -> None:
    _, said = make_serve(tmp_path, INTERRUPTED, interrupt=True)
    assert "Error" not in said


def test_server_that_fails_is_an_error_of_make(tmp_path: Path) -> None:
    code, said = make_serve(tmp_path, BROKEN, interrupt=False)
    assert code == 2
    assert "Error 1" in said
