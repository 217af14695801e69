"""Interface of a peer in the comparison, and server processes: start, wait until ready, measure, end by process id.

A peer has a command and an environment of its own, made by `make peers`; no peer is imported here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from kvstrata.errors import KvstrataError

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / ".peers"  # where `make peers` puts them

# Source of the number of tokens that a server really computed.
KnownBy = Literal["reported", "log", "time"]


@dataclass(frozen=True)
class ComparedModel:
    """The compared model in the forms that the peers need."""

    name: str
    ours: str | None  # argument of kvstrata serve; None: the default model
    folder: Path  # for mlx-lm, weights as they are served
    dense: Path  # the same in float32 where the CPU multiplies packed weights slowly, else `folder`
    gguf: Path | None
    context_tokens: int
    token_values: int  # K and V of a token, in numbers
    mlx_value_bytes: int  # size of a number of K or V on MLX: 4 on a CPU, where models run in float32, else 2


@dataclass(frozen=True)
class ServerStart:
    """Parameters for starting a server."""

    model: ComparedModel
    port: int
    home: Path  # folder for the server's files, kept over a restart
    limit_tokens: int = 0  # capacity of the cache; 0: the server's default
    blas: Path | None = None  # for those on MLX

    def limit_bytes(self, value_bytes: int | None = None) -> int:
        """Return the limit in bytes. `value_bytes` is the size of a number of K or V, by default that on MLX."""
        return self.limit_tokens * self.model.token_values * (value_bytes or self.model.mlx_value_bytes)


class Peer(ABC):
    name: str
    known_by: KnownBy = "reported"
    known_note: str = ""  # explanation of known_by
    on_mlx = False
    compiles = False  # takes long to compile at the first start on a machine
    ready_path = "/health"

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder

    @abstractmethod
    def missing(self, model: ComparedModel) -> str:
        """Return why the peer cannot run and what to do, or an empty string if it can."""

    @abstractmethod
    def command(self, start: ServerStart) -> list[str]: ...

    @abstractmethod
    def version(self) -> str: ...

    def environment(self, start: ServerStart) -> Mapping[str, str]:
        """Return variables to add to the process's environment."""
        return preloaded(start.blas) if self.on_mlx else {}

    def model_name(self, model: ComparedModel) -> str:
        """Return the model's name in requests."""
        return model.name

    def held_bytes(self, url: str, log: str) -> int | None:  # noqa: ARG002
        """Return the bytes in the server's cache, or None if it does not report them."""
        return None

    def prefilled_in(self, log: str) -> int | None:  # noqa: ARG002
        """Return the number of prompt tokens computed according to a part of the log, or None if it does not say."""
        return None


def preloaded(library: Path | None) -> dict[str, str]:
    """Return variables that preload a BLAS library, so that it replaces the reference BLAS of MLX's wheel
    (platform/blas.py)."""
    if library is None:
        return {}
    from kvstrata.platform.device import usable_cores

    threads = str(usable_cores())
    return {"LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": threads, "OPENBLAS_THREAD_TIMEOUT": "4"}


def package_version(python: Path, *names: str) -> str:
    """Return versions of an environment's packages, such as 'mlx-lm 0.32.2, mlx 0.32.4'."""
    code = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    try:
        done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return "version not known"
    return ", ".join(f"{name} {version}" for name, version in found.items())


def asked(url: str, path: str) -> Any:
    """Return the JSON of a server's status endpoint, or None if it does not answer."""
    try:
        response = httpx.get(f"{url}{path}", timeout=10, trust_env=False)
        return response.json() if response.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError):
        return None


POLL_S = 0.2
END_S = 20.0


class ServerFailed(KvstrataError):
    """A server did not start, or has ended."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class ServerProcess:
    """A running server. Its output is appended to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        # A session of its own: Ctrl-C in the terminal ends the comparison, which then ends its servers in order.
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def log_from(self, place: int) -> str:
        with self._log.open("rb") as file:
            file.seek(place)
            return file.read().decode(errors="replace")

    def log_end(self) -> int:
        return self._log.stat().st_size

    def wait_ready(self, url: str, timeout_s: float) -> None:
        """Poll `url` until it answers; other servers do not announce that they are ready."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if not self.is_alive:
                raise ServerFailed(f"it ended with status {self._popen.returncode}: {self.last_words()}")
            try:
                if httpx.get(url, timeout=5, trust_env=False).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_S)
        raise ServerFailed(f"it did not answer within {timeout_s:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line for line in self.log_from(max(0, self.log_end() - 4000)).splitlines() if line.strip()]
        return " / ".join(line.strip() for line in lines[-2:])[-300:]

    def forget_peak(self) -> None:
        """Reset the peak of resident memory. Only Linux can; elsewhere the peak is that of the whole run."""
        for each in self._family():
            try:
                Path(f"/proc/{each.pid}/clear_refs").write_text("5")
            except OSError:
                continue

    def peak_bytes(self) -> int | None:
        """Return the sum of the peak resident memory of the process and its children."""
        peaks = [found for each in self._family() if (found := _high_water(each.pid)) is not None]
        return sum(peaks) if peaks else None

    def end(self) -> None:
        """End the server with SIGTERM, as a service manager would, and kill processes that remain.

        SIGINT is not used: processes that a shell started in the background ignore it, and so do their children.
        """
        family = self._family()
        if self.is_alive:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_S)
        _, left = psutil.wait_procs(family, timeout=3)
        for each in left:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self._popen.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._popen.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _high_water(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
