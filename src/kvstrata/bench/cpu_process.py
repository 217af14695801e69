"""The processes that `kvstrata bench cpu` measures: ours and llama.cpp's. Both take the same commands, one at a time.

Only one works at any moment: a process answers a command before the benchmark sends the next one, and a process that
waits for a command reads from a pipe. What waiting ones take of the machine all the same is counted.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvstrata.errors import KvstrataError

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "peers" / "llama.mjs"
PEERS = ROOT / ".peers"  # where `make peers` puts llama.cpp


class SideFailed(KvstrataError):
    """A side could not do what it was asked for."""


class Process:
    """A side that is running. Opened by `running`."""

    def __init__(self, name: str, popen: subprocess.Popen[str]) -> None:
        self.name = name
        self._popen = popen
        self._system = psutil.Process(popen.pid)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        line = ""
        try:
            self._popen.stdin.write(json.dumps({"do": do, **command}) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            pass  # it has ended, which the empty line tells too
        if not line:
            raise SideFailed(f"{self.name} ended before it answered. What it said is above")
        answer = json.loads(line)
        if "error" in answer:
            raise SideFailed(f"{self.name}: {answer['error']}")
        return answer

    def cpu_s(self) -> float:
        """Of all its threads, since it began."""
        times = self._system.cpu_times()
        return times.user + times.system


@contextmanager
def running(name: str, command: Sequence[str], folder: Path | None = None) -> Iterator[Process]:
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Process(name, popen)
        finally:
            # Both sides end when there is nothing more to read. What is in the middle of a command is not waited for.
            assert popen.stdin is not None
            popen.stdin.close()
            try:
                popen.wait(timeout=5)
            except subprocess.TimeoutExpired:
                popen.kill()


def our_command() -> list[str]:
    return [sys.executable, "-m", "kvstrata.bench.cpu_side"]


@dataclass(frozen=True)
class Peer:
    """llama.cpp where it is installed; where it is not, `missing` says what to do."""

    command: tuple[str, ...] = ()
    folder: Path = PEERS
    missing: str = ""


def find_peer(folder: Path = PEERS) -> Peer:
    if not SCRIPT.is_file():
        return Peer(missing="llama.cpp is compared with in a checkout of kvstrata only. Next: clone it, make peers")
    if not (folder / "node_modules" / "node-llama-cpp").is_dir():
        return Peer(missing="llama.cpp is not installed. Next: make peers")
    node = shutil.which("node")
    if node is None:
        return Peer(missing="llama.cpp is installed for Node, which is not here. Next: install Node 20 or newer")
    # So that memory can be counted without what waits to be collected.
    return Peer((node, "--expose-gc", str(SCRIPT)), folder)
