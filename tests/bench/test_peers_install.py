"""`make peers`: what cannot be installed is named with the reason, and costs the others nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "peers" / "install.py"


def install(folder: Path, *names: str, programs: Path | str = "") -> list[str]:
    """`programs`: the only folder in which programs are found."""
    command = [sys.executable, str(SCRIPT), str(folder), "cpu", *names]
    done = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_a_peer_needs_and_is_not_here_is_said(tmp_path: Path) -> None:
    assert install(tmp_path / "peers", "llama-cpp", "node-llama-cpp", "llama.c") == [
        "llama-cpp: skipped: it is built here, and there is no cmake",
        "node-llama-cpp: skipped: it needs Node 20 or newer with npm, and there is none here",
        "llama.c: skipped: there is no such peer; known are mlx-lm, llama-server, vllm-mlx, llama-cpp, node-llama-cpp",
    ]


def test_an_old_node_is_not_used(tmp_path: Path) -> None:
    for name in ("node", "npm"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho v18.1.0\n")
        program.chmod(0o755)
    (said,) = install(tmp_path / "peers", "node-llama-cpp", programs=tmp_path)
    assert said == "node-llama-cpp: skipped: it needs Node 20 or newer; this is v18.1.0"


def test_what_is_there_in_the_wanted_version_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "llama-server"
    folder.mkdir()
    (folder / "installed.txt").write_text("xllamacpp==2026.10.11549\n")
    assert install(tmp_path, "llama-server") == ["llama-server: is there"]
    assert [path.name for path in folder.iterdir()] == ["installed.txt"]
