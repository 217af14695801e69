"""Clients that misbehave: each is bounded in what it sends and how long it takes, and the others do not notice."""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.eventually import eventually
from tests.support.models import tiny_loaded
from tests.support.raw_http import PATIENCE_S, answer, completion, connected, head, is_closed, rest, until
from tests.support.servers import Served, running

HEALTH = head("/health")
OK = b'{"status":"ok"}'


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    """Short times and few connections."""
    bounds = {"header_timeout_s": 1.5, "body_timeout_s": 1.5, "send_timeout_s": 1, "max_connections": 8}
    with running(tiny_loaded("llama"), options={"http": bounds}) as one:
        yield one


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "kvstrata.requests":  # each request has a line there, however it ended
            self.messages.append(self.format(record))


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Neither by uvicorn nor by us: a client's misbehaviour is no matter for the log."""
    lines = Lines()
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "kvstrata", "asyncio")]
    for logger in loggers:
        logger.addHandler(lines)
    yield
    for logger in loggers:
        logger.removeHandler(lines)
    assert lines.messages == []


@pytest.fixture(autouse=True)
def goes_on(strict: Served) -> Iterator[None]:
    """Whatever a client did: the next one is served, and the log has no line about it."""
    with nothing_logged():
        yield
        assert strict.ask("/v1/completions", prompt=[5], max_tokens=1).status_code == 200


@pytest.mark.perf
def test_headers_without_end_are_431_and_hold_up_no_other(strict: Served) -> None:
    with connected(strict) as line:
        sent = threading.Thread(target=flood, args=(line, 60))
        sent.start()
        worst_s = 0.0
        with strict.http() as http:
            while sent.is_alive():
                began = time.monotonic()
                assert http.get("/health").status_code == 200
                worst_s = max(worst_s, time.monotonic() - began)
        sent.join()
        status, error = answer(line)
    assert (status, error["code"]) == (431, "headers_too_large")
    assert "Send less" in error["message"]
    assert worst_s < 1.0


def flood(line: socket.socket, num_mb: int) -> None:
    try:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        for _ in range(num_mb):
            line.sendall(b"a" * 1_000_000)
    except OSError:
        pass  # the server may cut it short


@pytest.mark.parametrize("size", [30_000, 40_000])
def test_headers_are_bounded_at_32_kib(strict: Served, size: int) -> None:
    with connected(strict) as line:
        line.sendall(head("/health", X="a" * size, Connection="close").replace(b"POST", b"GET"))
        assert int(rest(line).split()[1]) == (200 if size < 32 * 1024 else 431)


def test_one_request_after_the_other_on_a_connection(strict: Served) -> None:
    """Each has its own 32 KiB, even where they come in one piece."""
    one = head("/health", X="a" * 20_000).replace(b"POST", b"GET")
    last = head("/health", X="a" * 20_000, Connection="close").replace(b"POST", b"GET")
    with connected(strict) as line:
        line.sendall(one * 3 + last)
        assert rest(line).count(b"200 OK") == 4


def test_too_many_requests_in_one_piece(strict: Served) -> None:
    with connected(strict) as line:
        line.sendall(HEALTH * 1000)
        answers = rest(line).count(b"200 OK")
    assert 1 <= answers < 100


STALLS = {
    "headers": (HEALTH[:-2], b"", 408),
    "headers, one byte after the other": (HEALTH[:-2], b"a", 408),
    "nothing": (b"", b"", None),
    "empty lines": (b"", b"\r\n", None),
    "a body": (head("/v1/completions", Content_Type="application/json", Content_Length=1000) + b"{", b"", 408),
    "a body, one byte after the other": (
        head("/v1/completions", Content_Type="application/json", Content_Length=1000), b" ", 408,
    ),
}  # fmt: skip


def test_what_does_not_arrive_in_time_is_408(strict: Served) -> None:
    """Nor does each byte buy more time. All at once, because each takes as long as the server waits."""
    told: dict[str, bytes] = {}
    with ExitStack() as stack:
        lines = {name: stack.enter_context(connected(strict)) for name in STALLS}
        for name, line in lines.items():
            line.sendall(STALLS[name][0])
        threads = [
            threading.Thread(target=lambda name=name, line=line: told.update({name: drip(line, STALLS[name][1])}))
            for name, line in lines.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, (_, _, status) in STALLS.items():
        if status is None:
            assert told[name] == b"", name
        else:
            top, _, body = told[name].partition(b"\r\n\r\n")
            assert int(top.split()[1]) == status, name
            assert json.loads(body)["error"]["code"] == "request_timeout"


def test_a_slow_body_that_moves_is_served(strict: Served) -> None:
    """It takes longer than a body of a few bytes may."""
    request = completion(strict, padding="x" * 8000, headers={"Connection": "close"})
    with connected(strict) as line:
        begun, pieces = time.monotonic(), 5
        for piece in range(pieces):
            line.sendall(request[len(request) * piece // pieces : len(request) * (piece + 1) // pieces])
            time.sleep(0.35)
        assert time.monotonic() - begun > 1.5
        assert rest(line).split()[1] == b"200"


def drip(line: socket.socket, piece: bytes) -> bytes:
    """A piece every 0.1 s until the server has had enough. What it says then."""
    line.settimeout(0.1)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            line.sendall(piece)
            return line.recv(1 << 16)
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return b""
    raise AssertionError("the server takes it for ever")


def test_not_http_is_400_in_the_apis_form(strict: Served) -> None:
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    ):
        with connected(strict) as line:
            line.sendall(sent)
            assert answer(line)[0] == 400


def test_a_body_that_is_no_chunk_is_400(strict: Served) -> None:
    with connected(strict) as line:
        line.sendall(head("/v1/completions", Content_Type="application/json", Transfer_Encoding="chunked") + b"ZZ\r\n")
        assert answer(line)[0] == 400


def test_a_wish_for_http_2_does_not_cost_the_body(strict: Served) -> None:
    """As Java's client sends its first request."""
    wish = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAARAAAAAAAIAAAAA"}
    with connected(strict) as line:
        line.sendall(completion(strict, headers=wish))
        assert b'"completion_tokens":3' in until(line, b"}}")


def test_idle_connections_give_way(strict: Served) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(strict)) for _ in range(8)]
        for line in idle:
            line.sendall(HEALTH)
            until(line, OK)
        with connected(strict) as new:
            new.sendall(HEALTH)
            until(new, OK)
        (closed,), _, _ = select.select(idle, [], [], PATIENCE_S)
        assert is_closed(closed)


def test_silent_and_slow_ones_give_way_too(strict: Served) -> None:
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(connected(strict))
        with connected(strict) as new:
            new.sendall(HEALTH)
            until(new, OK)


def test_past_the_limit_is_503(strict: Served) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            busy = stack.enter_context(connected(strict))
            busy.sendall(completion(strict, max_tokens=1900, stream=True))
            until(busy, b"200 OK")
        with connected(strict) as new:
            new.sendall(HEALTH)
            status, error = answer(new)
    assert (status, error["code"]) == (503, "too_many_connections")
    assert "close some" in error["message"]
    strict.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_let_go(strict: Served, stream: bool) -> None:
    with small_buffers(strict), connected(strict, receive_bytes=4096) as line:
        # The document is 40 KB, and asked for ten times it is more than the server holds for a client.
        line.sendall(
            completion(strict, max_tokens=400, logprobs=5, stream=True) if stream else head("/openapi.json") * 10
        )
        assert line.recv(15) == b"HTTP/1.1 200 OK"
        eventually(lambda: not strict.server.server_state.connections, PATIENCE_S)
        strict.wait_idle()
        # What was on its way may still come, the end does not.
        told = rest(line)
        assert b"[DONE]" not in told
        assert told.count(b"200 OK") < 10


def test_a_client_that_reads_slowly_gets_all(strict: Served) -> None:
    """Longer than the server waits for a client that takes nothing."""
    with small_buffers(strict), connected(strict, receive_bytes=4096) as line:
        line.sendall(head("/openapi.json") * 10)
        told, began = b"", time.monotonic()
        while told.count(b"200 OK") < 10:
            told += line.recv(1 << 12)
            time.sleep(0.02)
        assert time.monotonic() - began > 1.5


@contextmanager
def small_buffers(served: Served) -> Iterator[None]:
    """The machine takes in megabytes for a client; with this some kilobytes."""
    (listener,) = served.server.servers[0].sockets
    before = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 2)  # Linux tells twice what was set


def test_a_wrong_key_is_told_before_the_body() -> None:
    with running(tiny_loaded("llama"), api_key=["secret"]) as locked, connected(locked) as line:
        line.sendall(
            head("/v1/completions", Content_Type="application/json", Content_Length=1000, Expect="100-continue")
        )
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 401")
        # The body that comes all the same is dropped, and the connection goes on.
        line.sendall(b"x" * 1000 + head("/health"))
        until(line, OK)


def test_a_server_that_ends_tells_those_who_still_send() -> None:
    """And leaves no traceback: neither of them, nor of a client that reads nothing."""
    with nothing_logged(), ExitStack() as stack:
        with running(tiny_loaded("llama"), drain_timeout_s=0) as one:
            lines = {name: stack.enter_context(connected(one)) for name in ("head", "body", "idle", "reader")}
            lines["head"].sendall(HEALTH[:-2])
            lines["body"].sendall(completion(one)[:-5])
            lines["idle"].sendall(HEALTH)
            lines["reader"].sendall(completion(one, max_tokens=1900, logprobs=5, stream=True))
            until(lines["idle"], OK)
            until(lines["reader"], b"200 OK")
        for name in ("head", "body"):
            assert answer(lines[name])[0] == 503, name
        assert is_closed(lines["idle"])
