"""Every command block of the README and of 'get started' does what the page says, but for those that say why not.

One server: the first `make serve` of the README, on a free port. Other commands that serve find that port taken, which
they say once their settings were read and found good. Addresses in the pages are replaced by the server's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.docs.markdown import Block, blocks, indented
from tests.docs.sources import ROOT

PAGES = {"README.md": ROOT / "README.md", "get-started.md": ROOT / "docs" / "get-started.md"}
BLOCKS = [block for name, path in PAGES.items() for block in blocks(path, name)]
RUN = [block for block in BLOCKS if block.language in ("sh", "python") and not block.not_run]
REASONS = ("needs a hub", "needs an agent", "installs into")
SERVES = re.compile(r"(?:make|kvstrata|\.venv/bin/kvstrata) serve\b(?!.*--help)")
READY = re.compile(r"serving +(http://\S+)")
STAMPS = [f".venv/.installed-{name}" for name in ("cpu", "cuda12", "cuda13")]
START_S, COMMAND_S = 180, 90


def commands(block: Block) -> list[str]:
    """One for each line; a backslash at its end joins the next one."""
    lines = block.text.replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@dataclass(frozen=True)
class Shell:
    """Where commands run: in the repository, with the environment that is there already."""

    port: int
    variables: dict[str, str]

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env=self.variables, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, command: str) -> tuple[int, str]:
        here = command.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        here = re.sub(r"--port \d+", f"--port {self.port}", here) if SERVES.match(here) else here
        process = self.start(here)
        try:
            output, _ = process.communicate(timeout=COMMAND_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    programs = tmp_path_factory.mktemp("bin")
    # This very environment: make must not install anew because a stamp is older than pyproject.toml.
    kept = " ".join(f"-o {stamp}" for stamp in STAMPS)
    texts = {
        "kvstrata": f'exec "{sys.executable}" -m kvstrata "$@"',
        "make": f'exec "{shutil.which("make")}" {kept} "$@"',
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTRATA_", "MAKE", "MFLAGS"))}
    kept_home = {name: value for name, value in os.environ.items() if name == "KVSTRATA_HOME"}
    added = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "KVSTRATA_CONFIG": os.devnull,
        "KVSTRATA_PORT": str(port),
        "KVSTRATA_URL": f"http://127.0.0.1:{port}",
    }
    return Shell(port, {**own, **kept_home, **added})


@pytest.fixture(scope="module")
def served(shell: Shell) -> Iterator[str]:
    """The command that it was started by."""
    command = next(line for block in RUN for line in commands(block) if SERVES.match(line))
    process = shell.start(command)
    assert process.stdout is not None
    try:
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if READY.match(line):
                break
        else:
            pytest.fail("".join(said))
        yield command
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=START_S)


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{block.file}:{block.line}")
def test_the_block_works(block: Block, shell: Shell, served: str) -> None:
    if block.language == "python":
        text = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{shell.port}")
        done = subprocess.run(
            [sys.executable, "-"], input=text, env=shell.variables, capture_output=True, text=True, check=False,
            timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    for command in commands(block):
        if command == served:
            continue
        code, output = shell.run(command)
        if SERVES.match(command):
            assert f"Port {shell.port} on 127.0.0.1 is in use" in output, output
        else:
            assert code == 0, f"{command}\n{output}"
            assert output.strip(), command
        if command.startswith("curl"):
            assert "error" not in json.loads(output[output.index("{") :])


@pytest.mark.parametrize("name", PAGES)
def test_no_command_hides_in_another_kind_of_block(name: str) -> None:
    assert not indented(PAGES[name])
    assert {block.language for block in BLOCKS if block.file == name} <= {"sh", "python"}


def test_what_is_not_run_says_why() -> None:
    reasons = [block.not_run for block in BLOCKS if block.not_run]
    assert [reason for reason in reasons if reason.startswith(REASONS)] == reasons
    assert len(RUN) > len(reasons)


def test_the_readme_names_the_two_commands() -> None:
    text = PAGES["README.md"].read_text(encoding="utf-8")
    assert any(block.text == "make serve\n" for block in RUN if block.file == "README.md")
    assert "`make test`" in text
