"""A server for tests of the comparison, with nothing but the standard library: chat_server.py PORT MODE FOLDER.

It answers a chat with one word after the other, and remembers prompts as a cache would: in memory, and in FOLDER when
it is told to end. MODE: good; crash (it ends at the second chat); hang (it never answers one).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT, MODE, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
KEPT = FOLDER / "seen.json"
TOKEN_S = 0.0005
seen: list[list[str]] = json.loads(KEPT.read_text()) if KEPT.is_file() else []


def words_of(messages: list[dict[str, str]]) -> list[str]:
    return [word for message in messages for word in (message["role"], *message["content"].split())]


def cached(words: list[str]) -> int:
    best = 0
    for known in seen:
        same = 0
        while same < min(len(known), len(words) - 1) and known[same] == words[same]:
            same += 1
        best = max(best, same)
    return best


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._begin("application/json")
        self.wfile.write(b'{"data": [{"id": "words"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "hang":
            threading.Event().wait()
        if MODE == "crash" and seen:
            os._exit(3)
        words = words_of(body["messages"])
        reused = cached(words)
        time.sleep((len(words) - reused) * TOKEN_S)
        seen.append(words)
        print(f"prompt eval time = 1.0 ms / {len(words) - reused} tokens", flush=True)
        self._begin("text/event-stream")
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"index": 0, "delta": {"content": "word "}}]})
            time.sleep(0.002)
        usage = {"prompt_tokens": len(words), "completion_tokens": body["max_tokens"]}
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": reused}}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


def leave(_number: int, _frame: object) -> None:
    KEPT.write_text(json.dumps(seen))
    os._exit(0)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    Server(("127.0.0.1", PORT), Handler).serve_forever()
