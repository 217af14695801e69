"""A server as a process: started, waited for, watched and ended, by its own id and those of its children only."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from kvstrata.errors import KvstrataError

POLL_S = 0.2
END_S = 20.0


class ServerFailed(KvstrataError):
    """A server did not start, or is gone."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Process:
    """One server that runs. What it prints goes to `log`."""

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
        """Other people's servers tell no one that they are ready: they have to be asked again and again."""
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
        """Only Linux has this; elsewhere the peak is that of the whole run."""
        for each in self._family():
            try:
                Path(f"/proc/{each.pid}/clear_refs").write_text("5")
            except OSError:
                continue

    def peak_bytes(self) -> int | None:
        """The most that was resident at once, of the process and its children together."""
        peaks = [found for each in self._family() if (found := _high_water(each.pid)) is not None]
        return sum(peaks) if peaks else None

    def end(self) -> None:
        """As a service manager would; what does not follow is killed.

        Not with SIGINT: what a shell started in the background ignores it, and so do its children.
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
