"""`kvstrata chat` with a server that is not ours: whatever it may send, and no more than HTTP promises."""

from __future__ import annotations

import io
import json
import pty
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from kvstrata.cli import app

CLEAR = "\x1b[2J"  # what a terminal takes for an order
TEXT = f"one\u2028two\u2029three\x85four{CLEAR}\tfive"
EVENT = json.dumps({"choices": [{"delta": {"content": TEXT}}]}, ensure_ascii=False)
USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}})


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer("text/event-stream", f"data: {EVENT}\r\n\r\n: comment\n\ndata: {USAGE}\n\ndata: [DONE]")

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def other_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_only_line_ends_end_a_line_of_a_stream(other_server: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--url", other_server], input="Hello\n")
    assert result.exception is None
    assert TEXT.replace(CLEAR, "") in result.stdout
    assert "2 of 3 prompt tokens cached" in result.stderr


def test_terminal_shows_control_characters_instead_of_obeying_them(
    other_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pty.openpty()
    with open(reader, "rb", buffering=0) as screen, open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        app(["chat", "--url", other_server], standalone_mode=False)
        terminal.flush()
        said = screen.read(1 << 16).decode()
    assert "three\\x85four\\x1b[2J\tfive" in said
    assert CLEAR not in said
