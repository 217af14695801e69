"""A client that speaks HTTP by hand, so that it can misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.servers import Served

PATIENCE_S = 60  # for what must come; how busy the machine is must not matter


@contextmanager
def connected(served: Served, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as line:
        if receive_bytes is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        line.settimeout(PATIENCE_S)
        line.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        yield line


def head(path: str, **headers: str | int) -> bytes:
    lines = [f"{'POST' if headers else 'GET'} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def completion(served: Served, *, headers: dict[str, str] | None = None, **asked: Any) -> bytes:
    body = json.dumps({"model": served.name, "prompt": [5] * 10, "max_tokens": 3, **asked}).encode()
    given = {"Content_Type": "application/json", "Content_Length": len(body), **(headers or {})}
    return head("/v1/completions", **given) + body


def rest(line: socket.socket) -> bytes:
    """Everything until the server closes; a reset is an end like any other."""
    told = b""
    try:
        while more := line.recv(1 << 16):
            told += more
    except ConnectionResetError:
        pass
    return told


def answer(line: socket.socket) -> tuple[int, dict[str, Any]]:
    """The only response on a connection that the server then closes: status and the API's error."""
    text = rest(line)
    top, _, body = text.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return int(top.split()[1]), error


def until(line: socket.socket, mark: bytes) -> bytes:
    told = b""
    while mark not in told:
        more = line.recv(1 << 16)
        assert more, told
        told += more
    return told


def is_closed(line: socket.socket) -> bool:
    """Waits until the server closes it without a word."""
    return rest(line) == b""
