"""Remembered replies as records, and on disk: a file of lines for each salt, beside the blocks of the disk cache.

    4f0c...  {"said": 1767225600, "visible": "9a1b...", "calls": ["3f2a91c0d"], "ids": "<base64 of int32>", ...}

A line is a checksum, a space and JSON. A damaged line is ignored. Files are written on a separate thread, which no
request waits for. If the folder cannot be read or written, replies are remembered only in memory. Files contain token
ids, as the blocks do, and only their owner may read them.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import logging
import os
import queue
import stat
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from kvstrata.engine.cache_api import owner_of
from kvstrata.text.sampled_reply import DIGEST_BYTES, ReplyContent, SampledReply

CHECKSUM_BYTES = 8
MAX_CALLS = 1024
MAX_ID_CHARS = 256
SUFFIX = ".replies"
MAX_FILE_BYTES = 8 << 20
MAX_FOLDER_BYTES = 64 << 20
NEW_SUFFIX = ".new"  # of a file that is being rewritten
MAX_WAITING = 1024
OWNER_CHARS = 32
ROOT = 0  # has access anyway
OF_OTHERS = 0o077  # permission bits of group and others


@dataclass(frozen=True)
class ReplyRecord:
    visible: bytes  # digest of the visible reply
    call_ids: tuple[str, ...]
    ids: array[int]  # a tenth of a tuple's size
    visible_from: int | None
    text_from: int | None
    opened: bool
    thought: bytes
    is_proven: bool = True

    @classmethod
    def of(cls, visible: ReplyContent, sampled: SampledReply) -> ReplyRecord:
        return cls(
            visible.digest,
            tuple(call.id for call in visible.calls),
            array("i", sampled.ids),
            sampled.visible_from,
            sampled.text_from,
            sampled.opened,
            sampled.thought,
            sampled.is_proven,
        )

    @property
    def sampled(self) -> SampledReply:
        places = (self.visible_from, self.text_from)
        return SampledReply(tuple(self.ids), *places, self.opened, self.thought, self.is_proven)

    def to_json(self) -> dict[str, Any]:
        ids = np.array(self.ids, dtype="<i4").tobytes()
        return {
            "visible": self.visible.hex(),
            "calls": list(self.call_ids),
            "ids": base64.b64encode(ids).decode("ascii"),
            "visible_from": self.visible_from,
            "text_from": self.text_from,
            "opened": self.opened,
            "thought": self.thought.hex(),
            "proven": self.is_proven,
        }


def record_of(value: Any, vocab_size: int) -> ReplyRecord | None:
    """Return the record of a JSON value, or None if it is not valid for this model: the file may be untrusted."""
    try:
        ids = array("i", np.frombuffer(base64.b64decode(value["ids"], validate=True), dtype="<i4").tolist())
        record = ReplyRecord(
            bytes.fromhex(value["visible"]),
            tuple(value["calls"]),
            ids,
            value["visible_from"],
            value["text_from"],
            value["opened"],
            bytes.fromhex(value["thought"]),
            value["proven"],
        )
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None
    return record if _is_sound(record, vocab_size) else None


def to_line(record: ReplyRecord, said_s: float) -> bytes:
    """Return the record as a line. `said_s`: time of the reply, since the epoch."""
    text = json.dumps({"said": int(said_s), **record.to_json()}, separators=(",", ":")).encode()
    return _checksum(text) + b" " + text + b"\n"


def from_line(line: bytes, vocab_size: int) -> ReplyRecord | None:
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not text or checksum != _checksum(text):
        return None
    try:
        return record_of(json.loads(text), vocab_size)
    except (ValueError, RecursionError):
        return None


def said_s(line: bytes) -> float:
    """Return the time at which a reply was recorded, or 0 if the line has none."""
    try:
        value = json.loads(line.partition(b" ")[2])["said"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return 0.0
    return float(value) if isinstance(value, int) else 0.0


def _checksum(text: bytes) -> bytes:
    return blake3(text).hexdigest(CHECKSUM_BYTES).encode()


def _is_sound(record: ReplyRecord, vocab_size: int) -> bool:
    places = (record.visible_from, record.text_from)
    return (
        len(record.visible) == DIGEST_BYTES
        and len(record.thought) in (0, DIGEST_BYTES)
        and len(record.ids) > 0
        and min(record.ids) >= 0
        and max(record.ids) < vocab_size
        and all(place is None or (type(place) is int and 0 <= place <= len(record.ids)) for place in places)
        and type(record.opened) is bool
        and type(record.is_proven) is bool
        and len(record.call_ids) <= MAX_CALLS
        and all(isinstance(id, str) and len(id) <= MAX_ID_CHARS for id in record.call_ids)
    )


log = logging.getLogger(__name__)


class ReplyFiles:
    """The files of remembered replies. `fingerprint`: identity of the model that the ids belong to."""

    def __init__(self, folder: Path, fingerprint: str, vocab_size: int, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._clock = clock
        self._expired_s = 0.0  # older replies are ignored when read
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._appended_bytes = 0  # since the folder size was last checked
        self._has_warned = False  # whether the warning about an unusable folder was logged
        self._thread = threading.Thread(target=self._work, name="kvstrata-replies", daemon=True)
        self._thread.start()
        self._jobs.put(self._bound)

    def read(self, salt: str) -> list[ReplyRecord]:
        """Return the records of a salt, oldest first."""
        try:
            if not self._is_there():
                return []
            with _open_plain(self._path(salt), os.O_RDONLY) as file:
                # Read only the end of a file that is too long: its newest lines.
                file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_FILE_BYTES))
                lines = file.read(MAX_FILE_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn_once(error)
            return []
        expired_s = self._expired_s
        fresh = [line for line in lines if said_s(line) >= expired_s] if expired_s else lines
        read = (from_line(line, self._vocab_size) for line in fresh)
        return [record for record in read if record is not None]

    def append(self, salt: str, record: ReplyRecord) -> None:
        line = to_line(record, self._clock())
        if self._jobs.qsize() < MAX_WAITING:  # if a disk hangs, the reply is remembered in memory only
            self._jobs.put(lambda: self._append(self._path(salt), line))

    def clear(self, salt: str | None, owner: str | None, timeout_s: float = 5.0) -> None:
        """Delete files and wait until they are gone, at most `timeout_s`: a disk that hangs deletes them when it
        continues."""
        done = threading.Event()

        def clear() -> None:
            try:
                self._clear(salt, owner)
            finally:
                done.set()

        self._jobs.put(clear)
        done.wait(timeout_s)

    def expire(self, before_s: float) -> None:
        """Remove the replies from before a time."""
        self._expired_s = before_s
        if self._jobs.qsize() < MAX_WAITING:
            self._jobs.put(lambda: self._expire(before_s))

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and wait until everything is written, at most `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except OSError as error:
                self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "Replies cannot be kept in %s: %s. They are remembered until the server ends.", self._folder, error
            )

    def _append(self, path: Path, line: bytes) -> None:
        if not self._is_there():
            self._folder.mkdir(mode=0o700, parents=True)
        with _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
            # After a line that a crash cut off, start a new line.
            file.write(line if _ends_whole(file) else b"\n" + line)
            size = file.tell()
        if size > MAX_FILE_BYTES:
            self._halve(path)
        self._appended_bytes += len(line)
        if self._appended_bytes > MAX_FILE_BYTES:
            self._bound()

    def _halve(self, path: Path) -> None:
        """Keep the newer half of a file."""
        with _open_plain(path, os.O_RDONLY) as file:
            file.seek(-MAX_FILE_BYTES // 2, os.SEEK_END)
            lines = file.read().splitlines(keepends=True)[1:]
        self._rewrite(path, lines)

    def _rewrite(self, path: Path, lines: Sequence[bytes]) -> None:
        """Replace a file by rename, so that a crash leaves either the old or the new one."""
        new = path.with_suffix(NEW_SUFFIX)
        with _open_plain(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as file:
            file.writelines(lines)
        new.replace(path)

    def _clear(self, salt: str | None, owner: str | None) -> None:
        begins = self._digest(owner)[:OWNER_CHARS] if owner is not None else ""
        for path in self._paths():
            if path.name.startswith(begins) and (salt is None or path == self._path(salt)):
                path.unlink(missing_ok=True)
        self._remove_unfinished()

    def _expire(self, before_s: float) -> None:
        """Remove old lines from the files. Lines are in the order in which they were written."""
        for path in self._paths():
            status = path.lstat()
            if status.st_mtime < before_s:
                path.unlink(missing_ok=True)
                continue
            with _open_plain(path, os.O_RDONLY) as file:
                if said_s(file.readline()) >= before_s:
                    continue
                lines = file.read(MAX_FILE_BYTES).splitlines(keepends=True)
            kept = [line for line in lines if said_s(line) >= before_s]
            if kept:
                self._rewrite(path, kept)
                os.utime(path, (status.st_atime, status.st_mtime))
            else:
                path.unlink(missing_ok=True)

    def _remove_unfinished(self) -> None:
        """Remove the files that a crash left half written."""
        for path in self._paths(NEW_SUFFIX):
            path.unlink(missing_ok=True)

    def _bound(self) -> None:
        """Delete the least recently written files, of any model, until the folder is within its size limit."""
        self._appended_bytes = 0
        self._remove_unfinished()
        by_age = sorted(self._paths(), key=lambda path: path.lstat().st_mtime, reverse=True)
        total = 0
        for path in by_age:
            total += path.lstat().st_size
            if total > MAX_FOLDER_BYTES:
                path.unlink(missing_ok=True)

    def _paths(self, suffix: str = SUFFIX) -> list[Path]:
        return list(self._folder.glob(f"*{suffix}")) if self._is_there() else []

    def _is_there(self) -> bool:
        """Return whether the folder exists. Raises OSError for a link, which could lead anywhere, and for a folder of
        another user."""
        try:
            found = self._folder.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "It is no folder, or a link to one", str(self._folder))
        if found.st_uid not in (os.geteuid(), ROOT):
            raise PermissionError(errno.EPERM, f"It belongs to user id {found.st_uid}", str(self._folder))
        if found.st_mode & OF_OTHERS:
            self._folder.chmod(0o700)
        return True

    def _path(self, salt: str) -> Path:
        """Return the file of a salt. Names of one owner's files have a common prefix, so that they are found without a
        list of salts."""
        own = self._digest(owner_of(salt))[:OWNER_CHARS]
        return self._folder / f"{own}{self._digest(salt)[:OWNER_CHARS]}{SUFFIX}"

    def _digest(self, salt: str) -> str:
        fields = [self._fingerprint.encode(), salt.encode("utf-8", "surrogatepass")]
        return blake3(b"".join(len(field).to_bytes(8, "little") + field for field in fields)).hexdigest()


@contextmanager
def _open_plain(path: Path, flags: int) -> Iterator[BinaryIO]:
    """Open a regular file without following links or waiting for the other end of a pipe."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "rb" if flags == os.O_RDONLY else "a+b") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Not a plain file", str(path))
        yield file


def _ends_whole(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
