"""Fault injection for the disk tier: a `Filesystem` with faults, damage of files, faults of the catalogue.

Operations are numbered from 0. A fault is selected by the name or the number of an operation, so a test can fail every
step of a publication in turn.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstrata.tiers.disk.catalogue import Catalogue, CatalogueFault
from kvstrata.tiers.disk.filesystem import FileStatus, Filesystem

Act = Callable[[], None]


def fail(code: int) -> Act:
    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def kill() -> None:
    """Kill this process as from outside: no handler runs, and nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(event: threading.Event) -> Act:
    def act() -> None:
        event.wait(30)

    return act


@dataclass
class FaultyFiles(Filesystem):
    """A filesystem that runs `before[name]` and `at_step[number]` before an operation. If they raise, it is not run."""

    before: dict[str, Act] = field(default_factory=dict)
    at_step: dict[int, Act] = field(default_factory=dict)
    torn_after_bytes: int | None = None  # a write that passes this length is cut there, and the next one fails
    free: int | None = None
    steps: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_written: int = 0

    def _step(self, name: str) -> None:
        with self._lock:
            number = len(self.steps)
            self.steps.append(name)
        self.before.get(name, lambda: None)()
        self.at_step.get(number, lambda: None)()

    def create(self, path: Path) -> int:
        self._step("create")
        return super().create(path)

    def write(self, fd: int, piece: memoryview) -> int:
        self._step("write")
        if self.torn_after_bytes is None:
            return super().write(fd, piece)
        room = self.torn_after_bytes - self._num_written
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(fd, piece[:room])
        self._num_written += count
        return count

    def set_modified(self, fd: int, seconds: float) -> None:
        self._step("set_modified")
        super().set_modified(fd, seconds)

    def sync(self, fd: int) -> None:
        self._step("sync")
        super().sync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self._step("sync_folder")
        super().sync_folder(path)

    def open(self, path: Path) -> int:
        self._step("open")
        return super().open(path)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._step("read_into")
        return super().read_into(fd, buffer, offset)

    def status(self, place: int | Path) -> FileStatus:
        self._step("status")
        return super().status(place)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        super().unlink(path)

    def names(self, folder: Path) -> list[str]:
        self._step("names")
        return super().names(folder)

    def make_folder(self, path: Path) -> None:
        self._step("make_folder")
        super().make_folder(path)

    def set_mode(self, path: Path, mode: int) -> None:
        self._step("set_mode")
        super().set_mode(path, mode)

    def free_bytes(self, folder: Path) -> int:
        self._step("free_bytes")
        return super().free_bytes(folder) if self.free is None else self.free


def fail_once(files: FaultyFiles, step: str, code: int) -> None:
    def act() -> None:
        files.before = {}
        fail(code)()

    files.before = {step: act}


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def cut(path: Path, length: int) -> None:
    os.truncate(path, length)


def swap(left: Path, right: Path) -> None:
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


@dataclass
class CatalogueFaults:
    """The fault of every save of a catalogue. `error` None: saves work."""

    error: sqlite3.Error | None = None


def faulty_catalogues(monkeypatch: pytest.MonkeyPatch) -> CatalogueFaults:
    faults, save = CatalogueFaults(), Catalogue.save

    def save_or_fail(catalogue: Catalogue, *changes) -> None:
        if faults.error is not None:
            raise CatalogueFault(faults.error)
        save(catalogue, *changes)

    monkeypatch.setattr(Catalogue, "save", save_or_fail)
    return faults


def full_volume() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error
