"""Emulators of Google's and Azure's object stores on loopback.

Google: moto's S3 server behind a front. Google's XML API differs from S3 in tokens and preconditions; the front checks
and translates both. Azure: Azurite, Microsoft's emulator, if it is installed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import shutil
import socket
import subprocess
import threading
from email.utils import formatdate
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.eventually import eventually
from tests.tiers.remote.stores import CREDENTIAL, S3

TOKEN = "a-token-of-google"
PASSED_ON = ("Content-Type", "ETag", "Last-Modified")


class GoogleFront:
    """A front of moto's S3: it requires the token and honours `x-goog-if-generation-match: 0`, which creates once."""

    def __init__(self, s3: S3) -> None:
        self._s3 = s3
        port = s3.port

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self._answer(401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>")
                    return
                headers = {"Authorization": CREDENTIAL, "Content-Type": "application/octet-stream"}
                if self.headers.get("x-goog-if-generation-match") == "0":
                    headers["If-None-Match"] = "*"
                connection = HTTPConnection("127.0.0.1", port, timeout=10)
                # obstore escapes characters of a bucket's name that moto does not unescape.
                connection.request(self.command, self.path.replace("%2D", "-"), content, headers)
                answer = connection.getresponse()
                told = {name: value for name in PASSED_ON if (value := answer.getheader(name)) is not None}
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self._answer(answer.status, told, answer.read(), length)
                connection.close()

            def _answer(self, status: int, headers: dict[str, str], body: bytes, length: str | None = None) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("x-goog-generation", "1")
                self.send_header("Content-Length", length or str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        for method in ("GET", "PUT", "HEAD", "DELETE", "POST"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def use_bucket(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
        monkeypatch.setenv("GOOGLE_BASE_URL", self.endpoint)
        return f"gs://{self._s3.make_bucket()}/some/prefix"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Azurite:
    """An Azurite process with an account of its own and its data in memory."""

    def __init__(self) -> None:
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvstrata[remote]'")
        command = shutil.which("azurite-blob")
        if command is None:
            pytest.skip("Azurite is not installed: npm install -g azurite")
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        self._account, self._key = "kvstrata", base64.b64encode(bytes(range(64))).decode()
        self.endpoint = f"http://127.0.0.1:{port}/{self._account}"
        self._process = subprocess.Popen(
            [command, "--inMemoryPersistence", "--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{self._account}:{self._key}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._numbers = itertools.count()
        eventually(lambda: _accepts_connections(port), 60, pause_s=0.1)

    def use_bucket(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", self._account)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", self._key)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", self.endpoint)
        name = f"blocks-{next(self._numbers)}"
        self._make(name)
        return f"az://{name}/some/prefix"

    def _make(self, name: str) -> None:
        """Create a container by a request that is signed with the account's key."""
        import httpx

        told = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = [f"{key}:{value}" for key, value in sorted(told.items())]
        resource = f"/{self._account}/{self._account}/{name}\nrestype:container"
        text = "\n".join(["PUT", *[""] * 11, *lines, resource])
        digest = hmac.digest(base64.b64decode(self._key), text.encode(), hashlib.sha256)
        told["Authorization"] = f"SharedKey {self._account}:{base64.b64encode(digest).decode()}"
        httpx.put(f"{self.endpoint}/{name}?restype=container", headers=told).raise_for_status()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def _accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
